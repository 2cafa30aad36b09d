"""Models that return similarities of all rows of a batch, as CLIP does."""

from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers, ops

ROWS, WIDTH = 8, 6
X = np.random.default_rng(0).normal(size=(2, ROWS + ROWS // 2, WIDTH))
"""Of two batches, the last of which is smaller."""
Y = np.zeros((X.shape[1], 1))
MESHES = ({"data": 2}, {"data": 2, "model": 2})

pytestmark = pytest.mark.usefixtures("float64")


class Similarities(layers.Layer):
    """Of each row of one tensor to each of another."""

    def call(self, one: Any, other: Any) -> Any:
        """See `keras.Layer`."""
        return ops.matmul(one, ops.transpose(other))


def contrasted(_: Any, similarities: Any) -> Any:
    """Each row belongs to that of its own number."""
    numbers = ops.arange(ops.shape(similarities)[0])
    return keras.losses.sparse_categorical_crossentropy(numbers, similarities, from_logits=True)


def met(_: Any, features: Any) -> Any:
    """A loss in which rows meet."""
    return ops.square(features - ops.mean(features, axis=0, keepdims=True))


def clip(features: bool = False) -> keras.Model:
    """Two encoders; returns similarities, and features of the first if asked for."""
    inputs = [keras.Input((WIDTH,), name=name) for name in ("image", "text")]
    one, other = (layers.Dense(4, name=f"of_{x.name}")(x) for x in inputs)
    out = {"similar": Similarities(name="similar")(one, other)}
    out |= {"features": layers.Identity(name="features")(one)} if features else {}
    return keras.Model(inputs, out if features else out["similar"])


class Subclassed(keras.Model):
    """`clip` with features, whose outputs no constructor tells of.

    Args:
        container: `dict`, or `list` in the order of `clip`.
        **kwargs: See `keras.Model`.
    """

    def __init__(self, container: type = dict, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.container = container
        self.image, self.text = layers.Dense(4, name="image"), layers.Dense(4, name="text")
        self.similar = Similarities()

    def call(self, inputs: Any) -> Any:
        """See `keras.Model`."""
        one, other = self.image(inputs[0]), self.text(inputs[1])
        outputs = {"similar": self.similar(one, other), "features": one}
        return outputs if self.container is dict else list(outputs.values())


def trained(model: keras.Model, loss: Any) -> tuple[list[float], list[Any]]:
    model.compile(keras.optimizers.Adam(0.01), loss)
    given: Any = Y
    if isinstance(loss, dict | list):
        given = keras.tree.map_structure(lambda one: Y, loss)
    history = model.fit(list(X), given, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"], [ops.convert_to_numpy(v) for v in model.trainable_variables]


CUT = {
    ".*image/kernel": (None, "model"),
    ".*image/bias": ("model",),
    ".*text/kernel": ("model", None),
}
"""One encoder's features are cut, and the other's are sums."""


def parallel(model: keras.Model, axes: dict[str, int], **config: Any) -> keras.Model:
    layouts = CUT if "model" in axes else {}
    config["mesh"], config["layout_map"] = kdist.mesh(**axes), layouts
    return kdist.parallelize(model, kdist.ParallelConfig(**config))


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_similarities_of_parts_are_refused(axes: dict[str, int]) -> None:
    model = parallel(clip(), axes)
    refused = "output 'similar' has an entry for each row of the batch in each of its rows"
    with pytest.raises(ValueError, match=f'{refused}.* set ParallelConfig.batch_semantics="glo'):
        trained(model, contrasted)


def test_similarities_of_micro_batches_are_refused() -> None:
    pipeline = kdist.PipelineConfig(micro_batches=2)
    model = parallel(clip(), {"pipe": 2}, pipeline=pipeline)
    with pytest.raises(ValueError, match="what micro-batches compute .* mesh without `pipe`"):
        trained(model, contrasted)


@pytest.mark.parametrize(
    ("losses", "name"),
    [
        ({"similar": contrasted}, "'similar'"),
        ({"similar": contrasted, "features": "mse"}, "'similar'"),
        ([contrasted, "mse"], "0"),
    ],
    ids=["alone", "beside another", "in a list"],
)
def test_similarities_of_a_subclassed_model_are_refused(losses: Any, name: str) -> None:
    model = parallel(Subclassed(type(losses)), {"data": 2})
    with pytest.raises(ValueError, match=f"output {name} has an entry for each row of the batch"):
        trained(model, losses)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_features_of_a_subclassed_model_equal_one_device(axes: dict[str, int]) -> None:
    """The other output is a similarity, which no loss is of."""
    plain, model = Subclassed(), Subclassed()
    for one in (plain, model):
        one([rows[:ROWS] for rows in X])
    model.set_weights(plain.get_weights())
    model = parallel(model, axes)
    loss = {"features": met}
    (wanted, weights), (found, mine) = trained(plain, loss), trained(model, loss)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)
    for one, other in zip(mine, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("loss", [contrasted, {"features": met}], ids=["similar", "features"])
@pytest.mark.parametrize("level", [0, 3])
def test_what_joins_equals_one_device(axes: dict[str, int], loss: Any, level: int) -> None:
    """The refusal's first way; and outputs that a loss does not compare refuse nothing."""
    several = isinstance(loss, dict)
    plain = clip(several)
    options: dict[str, Any] = {} if several else {"batch_semantics": "global"}
    options["optimizer"] = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)
    model = parallel(keras.models.clone_model(plain), axes, **options)
    model.set_weights(plain.get_weights())
    (wanted, weights), (found, mine) = trained(plain, loss), trained(model, loss)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)
    for one, other in zip(mine, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)
