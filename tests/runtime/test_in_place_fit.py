"""`fit` on rows that lie where they were read, as over processes, composed with what there is.

One process reads all rows here; `tests/cluster/test_own_rows.py` has several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist
from kdist.api import fitted_model
from kdist.runtime.in_place import InPlace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from ..parity import assert_close, assert_same_history, config, mlp

pytestmark = pytest.mark.usefixtures("float64")
RNG = np.random.default_rng(0)
ROWS = 19
X, Y, WEIGHTS = RNG.normal(size=(ROWS, 6)), RNG.normal(size=(ROWS, 3)), RNG.uniform(size=ROWS)
IDS = RNG.integers(0, 5, size=(ROWS, 6))


@keras.saving.register_keras_serializable("test_in_place_fit")
class Own(keras.Model):
    """A subclassed model with a loss of its own over all rows."""

    def __init__(self, own_loss: bool = True) -> None:
        super().__init__(name="own")
        self.up = layers.Dense(8, "tanh", name="up")
        self.down = layers.Dense(3, name="down")
        self.own_loss = own_loss

    def call(self, x: Any) -> Any:
        return self.down(self.up(x))

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
    ) -> Any:
        if not self.own_loss:
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        return ops.sqrt(ops.mean(ops.square(y - y_pred)))


def subclassed(own_loss: bool) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = Own(own_loss)
    model.build((None, 6))
    return model


def masked() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(5, 8, mask_zero=True, name="table")(inputs)
    x = layers.Dense(8, "tanh", name="up")(x)
    return keras.Model(inputs, layers.Dense(3, name="down")(layers.GlobalAveragePooling1D()(x)))


def looped() -> keras.Model:
    """Every matrix product is in a loop: it runs on gathered weights."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    x = layers.SimpleRNN(4, name="only")(layers.Reshape((3, 2))(inputs))
    return keras.Model(inputs, x[:, :3])


MODELS: dict[str, Callable[[], keras.Model]] = {
    "mlp": mlp,
    "masked": masked,
    "subclassed": lambda: subclassed(False),
    "own loss": lambda: subclassed(True),
    "looped": looped,
}
MESHES = {"inner": {"data": 2, "model": 2}, "pipe": {"pipe": 2, "data": 2}} | {
    "all": {"pipe": 2, "data": 2, "model": 2}
}
CASES = [
    *((mesh, level, "mlp") for mesh in MESHES for level in (0, 1, 3)),
    *((mesh, 2, "masked") for mesh in MESHES),
    *(("inner", level, name) for name in ("subclassed", "own loss") for level in (0, 3)),
    ("inner", 0, "looped"),
]


def read(x: np.ndarray, batch: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, Y, WEIGHTS)).batch(batch)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Has datasets read as over processes; grows with each step, whether it took rows in place."""
    monkeypatch.setattr(fitted_model, "has_joined", lambda: True)
    found: list[bool] = []
    plain = InPlace.graph

    def graph(*args: Any) -> Any:
        made = plain(*args)
        found.append(made is not None)
        return made

    monkeypatch.setattr(InPlace, "graph", graph)
    return found


@pytest.mark.parametrize(("mesh", "level", "name"), CASES)
def test_it_equals_one_device(
    mesh: str, level: int, name: str, in_place: list[bool], recwarn: pytest.WarningsRecorder
) -> None:
    x, axes = IDS if name == "masked" else X, MESHES[mesh]
    options: dict[str, Any] = {"optimizer": kdist.OptimizerConfig(level=level, threshold_kb=0)}
    if "pipe" in axes:
        options["pipeline"] = kdist.PipelineConfig(micro_batches=2)
    other = config(axes, **options)
    if name == "looped":
        cut = {".*only/.*/kernel": (None, "model")}
        other = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cut)
    plain, parallel = MODELS[name](), kdist.parallelize(MODELS[name](), other)
    histories = []
    for model in (plain, parallel):
        model.compile(keras.optimizers.Adam(0.01), "mse", weighted_metrics=["mae"])
        # 8, 8 and 3 rows: a replica has fewer than the other, and others than before.
        histories.append(model.fit(read(x, 8), epochs=2, verbose=0, validation_data=read(x, 8)))
    assert_same_history(*histories)
    assert_close(*[[m.predict(read(x, 8), verbose=0), m.get_weights()] for m in (plain, parallel)])
    said = [str(one.message) for one in recwarn if "process 0 reads" in str(one.message)]
    assert not said
    if "model" in axes and name != "looped":
        assert all(in_place) and len(in_place) == 2 * 3 * 2 + 3


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_equals_what_process_0_reads(policy: str, in_place: list[bool]) -> None:
    """To the bit: the same programs on the same rows."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    found = []
    for process_0 in (False, True):
        model = kdist.parallelize(mlp(), config({"data": 2, "model": 2}))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        arrays = (X.astype("float32"), Y.astype("float32"))
        given = arrays if process_0 else (tf.data.Dataset.from_tensor_slices(arrays).batch(8),)
        options = {"batch_size": 8, "shuffle": False} if process_0 else {}
        history = model.fit(*given, epochs=2, verbose=0, **options).history["loss"]
        found.append([history, *model.get_weights()])
    assert in_place == [True] * 6
    for mine, other in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, other)
