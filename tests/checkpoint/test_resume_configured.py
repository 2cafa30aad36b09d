"""`fit` goes on in the middle of an epoch however the model is trained."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import kdist
from kdist.callbacks import ShardedCheckpoint

import keras
import numpy as np
import pytest

from ..equivalence.harness import precision
from ..equivalence.matrix import product, spread
from .kinds import state
from .runs import BATCH, ROWS, STEPS, StopAfter, Stopped

EVERY = 3
STOPS = (4, STEPS + 2, 2 * STEPS + 3)


def adam(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-2, **options)


def scaled() -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(
        adam(), initial_scale=64.0, dynamic_growth_steps=EVERY + 1
    )


@dataclasses.dataclass(frozen=True)
class Trained:
    """How a model is trained.

    Attributes:
        mesh: Axes.
        level: Of optimizer parallelism.
        optimizer: Makes the optimizer.
        micro_batches: Of a pipeline.
        host: Whether the table is on the host.
        exact: Whether it goes on to the bit. Sums of several replicas go on as their total.
    """

    mesh: Mapping[str, int]
    level: int = 0
    optimizer: Callable[[], Any] = adam
    micro_batches: int | None = None
    host: bool = False
    exact: bool = True

    def model(self) -> keras.Model:
        """A model with a table, dropout and statistics."""
        keras.utils.set_random_seed(21)
        tokens = keras.Input((4,), dtype="int32")
        x = keras.layers.Embedding(12, 4, name="table")(tokens)
        x = keras.layers.Dense(8, activation="tanh", name="up")(keras.layers.Flatten()(x))
        x = keras.layers.Dropout(0.3, name="drop")(x)
        x = keras.layers.BatchNormalization(name="statistics")(x)
        model = keras.Model(tokens, keras.layers.Dense(3, name="head")(x))
        if self.host:
            kdist.place(model.get_layer("table"), "host")
        pipeline = kdist.PipelineConfig(micro_batches=self.micro_batches or 1)
        config = kdist.ParallelConfig(
            mesh=kdist.mesh(**self.mesh),
            optimizer=kdist.OptimizerConfig(level=self.level, threshold_kb=0),
            pipeline=pipeline if self.micro_batches else None,
        )
        kdist.parallelize(model, config)
        model.compile(self.optimizer(), "mse", metrics=["mae"])
        return model


accumulating = functools.partial(adam, gradient_accumulation_steps=4)
averaging = functools.partial(adam, use_ema=True, ema_overwrite_frequency=5)
HOW = {
    "level3": Trained({"data": 2}, 3),
    "pipeline": Trained({"pipe": 2, "data": 2}, 1, micro_batches=2),
    "host-table": Trained({"data": 2}, 1, host=True),
    "accumulation-level0": Trained({"data": 2}, optimizer=accumulating),
    "accumulation": Trained({"data": 2}, 1, accumulating, exact=False),
    "accumulation-pipeline": Trained({"pipe": 2, "data": 2}, 1, accumulating, 2, exact=False),
    "averages": Trained({"data": 2}, 1, averaging),
    "averages-level3": Trained({"data": 2}, 3, averaging),
    "loss-scale": Trained({"data": 2}, 1, scaled),
    "loss-scale-level3": Trained({"data": 2}, 3, scaled),
}
DEFAULT = [
    ("accumulation", STEPS + 2),
    ("level3", 4),
    ("pipeline", STEPS + 2),
    ("host-table", 4),
    ("averages", STEPS + 2),
    ("loss-scale", 4),
]


@pytest.fixture(autouse=True)
def float64():
    with precision("float64"):
        yield


def run(how: str, saver: ShardedCheckpoint, stop: int | None = None) -> Any:
    """One run: its history and its state, if it ends."""
    draw = np.random.default_rng(3)
    x, y = draw.integers(0, 12, (ROWS, 4)), draw.normal(size=(ROWS, 3))
    model = HOW[how].model()
    rest = [StopAfter(stop)] if stop else []
    with contextlib.suppress(Stopped):
        found = model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[saver, *rest])
        return found.history, state(model)
    return None


@functools.cache
def unbroken(how: str) -> Any:
    return run(how, ShardedCheckpoint(tempfile.mkdtemp(), every_steps=EVERY))


@pytest.mark.parametrize(("how", "stop"), spread(product(HOW, STOPS), DEFAULT))
def test_it_ends_as_a_run_that_did_not_stop(tmp_path, how, stop):
    history, values = unbroken(how)
    assert run(how, ShardedCheckpoint(tmp_path, every_steps=EVERY), stop) is None
    saver = ShardedCheckpoint(tmp_path, every_steps=EVERY, resume=True)
    again, found = run(how, saver)
    assert 0 < saver.restored.step < stop
    tolerance = 0.0 if HOW[how].exact else 1e-9
    for a, b in zip(found, values, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance / 1000)
    assert history.keys() == again.keys()
    for name, expected in history.items():
        np.testing.assert_allclose(again[name], expected, rtol=tolerance)
