"""Every internal behind `kdist._compat.keras_twins` is there and does what is expected."""

from __future__ import annotations

from typing import Any

from kdist._compat import keras_twins

import keras
import numpy as np


def test_own_lambdas():
    layer = keras.layers.Lambda(lambda t: 2 * t, name="twice")
    with keras_twins.own_lambdas():
        again = keras.layers.Lambda.from_config(layer.get_config())
    np.testing.assert_array_equal(again(np.ones((1, 2))), 2 * np.ones((1, 2)))


def test_names_kept():
    keras.layers.Dense(1)
    first = keras.layers.Dense(1).name
    with keras_twins.names_kept():
        assert keras.layers.Dense(1).name == "dense"
    following = keras.layers.Dense(1).name
    assert int(following.rsplit("_", 1)[1]) == int(first.rsplit("_", 1)[1]) + 1


def test_take_order():
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    layer.quantize("float8")
    again = keras.layers.Dense.from_config(layer.get_config())
    again.build((None, 3))
    names = [[v.name for v in one.variables] for one in (layer, again)]
    assert names[0] != names[1] and set(names[0]) == set(names[1])
    keras_twins.take_order(again, layer)
    assert [v.name for v in again.variables] == names[0]
    keras_twins.take_order(again, keras.layers.Dense(2))  # not alike
    assert [v.name for v in again.variables] == names[0]


def test_loss_in():
    loss = keras.losses.MeanSquaredError(name="mine", reduction="sum")
    again = keras_twins.loss_in(loss, "float64")
    assert (again.dtype, again.name, again.reduction) == ("float64", "mine", "sum")
    assert again(np.zeros((2, 1)), np.ones((2, 1))).dtype == "float64"
    assert loss.dtype == "float32"


class Rounded(keras.losses.Loss):
    """Not registered with Keras, and without a `get_config`."""

    def __init__(self, digits: int) -> None:
        super().__init__()
        self.digits = digits

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.round(y_true - y_pred, self.digits)


def test_loss_in_of_an_own_class():
    again = keras_twins.loss_in(Rounded(1), "float64")
    assert isinstance(again, Rounded) and (again.digits, again.dtype) == (1, "float64")


def test_compile_options():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD()
    model.compile(optimizer, "mse", metrics=["mae"])
    options = keras_twins.compile_options(model)
    assert options["optimizer"] is optimizer
    assert (options["loss"], options["metrics"]) == ("mse", ["mae"])
    assert set(options) >= {"loss_weights", "weighted_metrics", "run_eagerly"}


def test_not_decayed():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")])
    kernel, bias = model.trainable_variables
    optimizer = keras.optimizers.AdamW()
    assert keras_twins.not_decayed(optimizer, [kernel, bias]) is None
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    assert keras_twins.not_decayed(optimizer, [kernel, bias]) == [bias]
    # In the name of the `tf.Variable`, which begins with the layer's.
    optimizer.exclude_from_weight_decay(var_names=["dense"])
    assert keras_twins.not_decayed(optimizer, [kernel, bias]) == [kernel, bias]
    assert not optimizer._use_weight_decay(kernel.value), "Keras itself remembers what it was asked"


def test_equal_draws():
    seeds = keras.random.SeedGenerator(1)
    with keras_twins.equal_draws():
        normal = keras.random.normal((2, 3), mean=1.0, stddev=2.0, seed=seeds)
        cut = keras.random.truncated_normal((2,), dtype="float64", seed=seeds)
        uniform = keras.random.uniform((3,), 2.0, 4.0, seed=seeds)
    np.testing.assert_allclose(normal, np.full((2, 3), 2.2), rtol=1e-6)
    np.testing.assert_allclose(cut, np.full(2, 0.6))
    assert cut.dtype == "float64"
    np.testing.assert_allclose(uniform, np.full(3, 3.2), rtol=1e-6)
    assert seeds.state.numpy().tolist() == [1, 0]
    drawn = keras.random.normal((4,), seed=seeds).numpy()
    assert len(set(drawn.tolist())) == 4


def test_added_losses():
    layer = keras.layers.ActivityRegularization(l1=1.0)
    layer(np.ones((2, 2)))
    assert [float(v) for v in keras_twins.added_losses(layer)] == [2.0]
    assert keras_twins.added_losses(keras.layers.Dense(1)) == []


def test_own_variables() -> None:
    class Scaled(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inside = keras.layers.Dense(2)
            self.scale = self.add_weight(shape=(1,), name="scale")

    layer = Scaled()
    layer.inside.build((None, 3))
    assert [v.name for v in keras_twins.own_variables(layer)] == ["scale"]


def test_own_attributes() -> None:
    class Pair(keras.Model):
        def __init__(self, inside: keras.layers.Layer) -> None:
            super().__init__()
            self._width, self.inside = 3, inside

        def train_step(self, x: Any) -> Any:
            return {"size": keras.ops.mean(self.inside(x))}

    model = Pair(keras.layers.Dense(2))
    model.other = keras.optimizers.SGD()
    model.compile("sgd", "mse")
    model.fit(np.ones((2, 3)), verbose=0)
    assert [*keras_twins.own_attributes(model)] == ["_width", "inside", "other"]


def test_made_to_train() -> None:
    frozen = keras.layers.Dense(2, name="frozen")
    layers = [keras.Input((3,)), frozen, keras.layers.BatchNormalization(name="norm")]
    model = keras.Sequential([*layers, keras.layers.Dropout(0.5)])
    frozen.trainable = False
    paths = [v.path.removeprefix(f"{model.name}/") for v in keras_twins.made_to_train(model)]
    assert paths == ["frozen/kernel", "frozen/bias", "norm/gamma", "norm/beta"]
    dense = keras.layers.Dense(2)
    dense.build((None, 3))
    kernel = dense.kernel
    dense.enable_lora(1)
    assert any(v is kernel for v in keras_twins.made_to_train(keras.Sequential([dense])))
