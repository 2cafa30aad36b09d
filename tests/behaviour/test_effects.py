"""What layers do besides returning values: Python, print, assert. Each happens once per row.

Nothing reads what they return, so what cuts a step into functions may forget them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import assert_same_weights

MESHES: dict[str, dict[str, int]] = {
    "data4": {"data": 4},
    "data2_model2": {"data": 2, "model": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_model2": {"pipe": 2, "model": 2},
    "zero_bubble": {"pipe": 2, "data": 2},
    "zero_bubble_model2": {"pipe": 2, "model": 2},
}
WITHOUT_STAGES = [name for name, axes in MESHES.items() if "pipe" not in axes]
X = np.random.default_rng(0).normal(size=(20, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(20, 4)).astype("float32")


class Noting(keras.layers.Layer):
    """Notes how many rows it sees, in the forward pass and in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[int] = []
        self.backward: list[int] = []

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def noted(x: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                tf.py_function(self._note(self.backward), [x], [])
                return upstream

            tf.py_function(self._note(self.forward), [x], [])
            return tf.identity(x), gradient

        return noted(x)

    @staticmethod
    def _note(rows: list[int]) -> Any:
        return lambda x: rows.append(len(x))

    def seen(self) -> tuple[int, int]:
        """Rows noted since the last time."""
        found = sum(self.forward), sum(self.backward)
        self.forward.clear()
        self.backward.clear()
        return found


class Bounded(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        tf.debugging.assert_less(tf.reduce_max(x), 0.5, message="larger than a half")
        return x * 1.0


class Rooted(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return tf.sqrt(x - 100.0)


class Printing(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        tf.print("all of it:", tf.shape(x)[1], tf.reduce_max(x))
        return x * 1.0


class PrintingWords(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        tf.print("words:", tf.reduce_max(x))
        return x


class Summing(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        tf.summary.scalar("sum", tf.reduce_sum(x))
        return x * 1.0


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Skipping(keras.layers.Layer):
    """Makes features steps of a sequence, with a mask that leaves some out."""

    def call(self, x: Any) -> Any:
        return keras.ops.expand_dims(x, -1)

    def compute_mask(self, x: Any, previous: Any = None) -> Any:
        return x > 0.1


def trained_on(
    mesh: str | None,
    layer: keras.Layer,
    kind: type[keras.Model] = keras.Model,
    again: bool = False,
    masked: bool = False,
) -> keras.Model:
    """A compiled model with a layer in its first stage; `again` has the layer recomputed.

    Of one that is `masked`, a mask of the outputs leaves some features out.
    """
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, "tanh", name="dense_a")(inputs)
    x = keras.layers.Dense(8, "tanh", name="dense_b")(layer(x))
    outputs = keras.layers.Dense(4, name="dense_c")(x)
    model = kind(inputs, Skipping()(outputs) if masked else outputs)
    if again:
        kdist.recompute(layer)
    return model if mesh is None else parallel(model, mesh)


def parallel(model: keras.Model, mesh: str) -> keras.Model:
    """The model on a mesh, compiled; layers whose kernels are cut are called `dense_`."""
    axes, options = MESHES[mesh], {}
    if "pipe" in axes:
        schedule = "zero_bubble" if mesh.startswith("zero") else "gpipe"
        options["pipeline"] = kdist.PipelineConfig(micro_batches=2, schedule=schedule)
    if "model" in axes:
        options["layout_map"] = {"dense_./(kernel|embeddings)": (None, "model")}
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), **options))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("again", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("mesh", MESHES)
def test_python_of_a_layer_runs_once_for_each_row(mesh: str, again: bool) -> None:
    layer = Noting()
    model = trained_on(mesh, layer, again=again)
    model.fit(X, Y, batch_size=20, verbose=0)
    assert layer.seen() == (20, 20)
    model.evaluate(X, Y, batch_size=20, verbose=0)
    assert layer.seen() == (20, 0)
    model.predict(X, batch_size=20, verbose=0)
    assert layer.seen() == (20, 0)


@pytest.fixture(params=["float32", "mixed_bfloat16"])
def policy(request: Any) -> Iterator[None]:
    """Dtypes; in mixed precision DTensor has stages traced again."""
    keras.config.set_dtype_policy(request.param)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mesh", MESHES)
def test_in_batches_of_two_sizes(mesh: str, policy: None) -> None:
    """Each size is a trace; so is each pass."""
    layer = Noting()
    model = trained_on(mesh, layer)
    model.fit(X, Y, batch_size=8, verbose=0)
    assert layer.seen() == (20, 20)
    model.evaluate(X, Y, batch_size=8, verbose=0)
    assert layer.seen() == (20, 0)


def mean_of_weights() -> keras.losses.Loss:
    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("eager", [False, True], ids=["", "eager"])
@pytest.mark.parametrize("counts", ["rows", "masks", "weights"])
@pytest.mark.parametrize("mesh", [*WITHOUT_STAGES, "pipe2_data2"])
def test_where_a_pass_before_counts_what_the_loss_is_divided_by(
    float64: None, mesh: str, counts: str, eager: bool
) -> None:
    """It needs no more than masks: layers in front of them see each row once all the same."""
    layer, masked = Noting(), counts == "masks"
    found = trained_on(mesh, layer, masked=masked)
    expected = trained_on(None, Noting(), masked=masked)
    data = [X, Y[..., None] if masked else Y]
    data += [np.arange(1.0, 21.0, dtype="float32")] if counts == "weights" else []
    for model in (found, expected):
        loss = mean_of_weights() if counts == "weights" else "mse"
        model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=eager)
        model.fit(*data[:2], sample_weight=(data[2:] or [None])[0], batch_size=20, verbose=0)
    assert layer.seen() == (20, 20)
    assert_same_weights(expected, found)
    found.evaluate(*data[:2], sample_weight=(data[2:] or [None])[0], batch_size=20, verbose=0)
    assert layer.seen() == (20, 0)


class Deciding(keras.layers.Layer):
    """Python that needs values: there is no graph of it."""

    def build(self, shape: Any) -> None:
        self.built = True

    def call(self, x: Any) -> Any:
        if tf.is_tensor(x) and float(tf.reduce_max(x)) > 100.0:
            raise ValueError("larger than a hundred")
        return x * 1.0

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)


def test_python_that_looks_at_values_runs_op_by_op_alone(float64: None) -> None:
    models = [trained_on(mesh, Deciding(), masked=True) for mesh in (None, "data4")]
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        model.fit(X, Y[..., None], batch_size=20, verbose=0)
    assert_same_weights(*models)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mesh", WITHOUT_STAGES)
def test_in_a_step_of_the_users_own_too(mesh: str) -> None:
    layer = Noting()
    model = trained_on(mesh, layer, OwnStep)
    model.fit(X, Y, batch_size=20, verbose=0)
    assert layer.seen() == (20, 20)


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [*((one, keras.Model) for one in MESHES), *((one, OwnStep) for one in WITHOUT_STAGES)],
)
def test_an_assertion_stops_training(mesh: str, kind: type[keras.Model]) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="larger than a half"):
        trained_on(mesh, Bounded(), kind).fit(X, Y, batch_size=20, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="larger than a half"):
        trained_on(mesh, Bounded(), kind).evaluate(X, Y, batch_size=20, verbose=0)


@pytest.mark.filterwarnings("ignore:DTensor cannot expand:UserWarning")
@pytest.mark.parametrize("mesh", MESHES)
def test_a_print_is_there_once_for_each_part_of_the_batch(mesh: str, capfd: Any) -> None:
    model, axes = trained_on(mesh, Printing()), MESHES[mesh]
    parts = axes.get("data", 1) * (2 if "pipe" in axes else 1)
    for one in (model.fit, model.evaluate):
        one(X, Y, batch_size=20, verbose=0)
        lines = [line for line in capfd.readouterr().err.splitlines() if "all of it: 8" in line]
        assert len(set(lines)) == len(lines) == parts


@pytest.mark.parametrize("mesh", ["zero_bubble", "pipe2_data2", "data4"])
def test_op_by_op(mesh: str) -> None:
    layer = Noting()
    model = trained_on(mesh, layer)
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model.fit(X, Y, batch_size=20, verbose=0)
    assert layer.seen() == (20, 20)


class OwnLoss(keras.Model):
    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return tf.reduce_max(tf.square(y - y_pred))


@pytest.mark.parametrize("mesh", [name for name in MESHES if not name.startswith("zero")])
def test_with_a_loss_over_the_whole_batch(mesh: str) -> None:
    """It comes between the forward and the backward pass, of which there is one each."""
    layer = Noting()
    model = trained_on(mesh, layer, OwnLoss)
    model.fit(X, Y, batch_size=20, verbose=0)
    assert layer.seen() == (20, 20)


@pytest.mark.filterwarnings("ignore:DTensor cannot expand:UserWarning")
@pytest.mark.parametrize("mesh", MESHES)
def test_a_summary_is_written_once_for_each_part_of_the_batch(mesh: str, tmp_path: Path) -> None:
    layer = Summing()
    model, axes = trained_on(mesh, layer), MESHES[mesh]
    parts = axes.get("data", 1) * (2 if "pipe" in axes else 1)
    x = X.astype("float64")
    before = keras.Model(model.input, layer.input)(x).numpy().sum()
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default(step=3):
        model.fit(x, Y, batch_size=20, verbose=0)
    writer.flush()
    (written,) = tmp_path.iterdir()
    events = [
        tf.compat.v1.Event.FromString(one.numpy()) for one in tf.data.TFRecordDataset(str(written))
    ]
    found = [
        float(tf.make_ndarray(value.tensor))
        for event in events
        for value in event.summary.value
        if event.step == 3
    ]
    assert len(found) == parts
    assert abs(sum(found) - before) < 1e-4


@pytest.mark.filterwarnings("ignore:DTensor cannot expand:UserWarning")
@pytest.mark.parametrize("mesh", MESHES)
def test_a_print_next_to_a_text(mesh: str, capfd: Any) -> None:
    """A stage that looks texts up has a print of numbers, and one of what was looked up."""
    words = np.array(list("abcd" * 5))
    inputs = keras.Input((1,), dtype="string")
    x = keras.layers.StringLookup(vocabulary=list("abc"))(inputs)
    x = Printing()(keras.layers.Embedding(4, 8, name="dense_e")(PrintingWords()(x)))
    model = keras.Model(inputs, keras.layers.Dense(4, name="dense_c")(x[:, 0]))
    parallel(model, mesh)
    parts = MESHES[mesh].get("data", 1) * (2 if "pipe" in MESHES[mesh] else 1)
    model.fit(tf.constant(words[:, None]), Y, batch_size=20, shuffle=False, verbose=0)
    lines = capfd.readouterr().err.splitlines()
    for said in ("all of it: 1", "words: 3"):
        assert len([line for line in lines if said in line]) == parts


@pytest.fixture
def checked() -> Iterator[None]:
    """With `tf.debugging.enable_check_numerics`, every operation's results are looked at."""
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


@pytest.mark.parametrize("mesh", MESHES)
def test_checked_numbers_train_as_before(mesh: str, checked: None, recwarn: Any) -> None:
    """Neither an island nor a gathered tensor comes of it: no warning."""
    found = trained_on(mesh, keras.layers.Identity())
    found.fit(X, Y, batch_size=20, verbose=0)
    assert not [one for one in recwarn if "expand" in str(one.message)]
    tf.debugging.disable_check_numerics()
    expected = trained_on(mesh, keras.layers.Identity())
    expected.fit(X, Y, batch_size=20, verbose=0)
    assert_same_weights(expected, found)


@pytest.mark.parametrize("mesh", MESHES)
def test_checked_numbers_name_the_operation_that_makes_nan(mesh: str, checked: None) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match='NaN in output 0 of graph op "Sqrt"'):
        trained_on(mesh, Rooted()).fit(X, Y, batch_size=20, verbose=0)


def test_functions_that_run_eagerly() -> None:
    """`tf.config.run_functions_eagerly`, for breakpoints; afterwards the model has graphs."""
    models = [trained_on("pipe2_data2", keras.layers.Identity()) for _ in range(2)]
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.warns(UserWarning, match="does not apply to tf.data"):
            models[0].fit(X, Y, batch_size=20, verbose=0)
    finally:
        tf.config.run_functions_eagerly(False)
    models[1].fit(X, Y, batch_size=20, verbose=0)
    for model in models:
        model.fit(X, Y, batch_size=20, verbose=0)
    assert_same_weights(*models)
