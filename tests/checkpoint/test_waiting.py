"""Models that their first batch cuts into stages are restored before there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kdist

import keras
import numpy as np
import pytest

from ..parity import assert_close

pytestmark = pytest.mark.usefixtures("float64")
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 6)), RNG.normal(size=(8, 2))
FIT = {"batch_size": 2, "shuffle": False, "verbose": 0}


class Chained(keras.Model):
    """Calls its layers one after the other, and has no graph of them."""

    def __init__(self) -> None:
        super().__init__(name="chained")
        first, last = keras.layers.Dense(4, "tanh", name="up"), keras.layers.Dense(2, name="down")
        self.chain = [first, last]

    def call(self, inputs: Any) -> Any:
        for layer in self.chain:
            inputs = layer(inputs)
        return inputs


def graph() -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4, "tanh", name="up")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="down")(hidden))


def model(stages: str, level: int = 0, seed: int = 0, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(seed)
    made = graph() if stages == "measured" else Chained()
    made(X[:2])
    if stages != "plain":
        how: dict[str, Any] = {"costs": "measured"}
        if stages == "lists":
            how = {"stages": [made.chain[:1], made.chain[1:]]}
        pipeline = kdist.PipelineConfig(micro_batches=1, **how)
        optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)
        mesh = kdist.mesh(pipe=2, data=2)
        config = kdist.ParallelConfig(mesh=mesh, pipeline=pipeline, optimizer=optimizer, **options)
        kdist.parallelize(made, config)
    made.compile(keras.optimizers.Adam(0.1, gradient_accumulation_steps=3), "mse")
    return made


@pytest.mark.filterwarnings("ignore:.*has no effect.*:UserWarning")
@pytest.mark.parametrize("stages", ["lists", "measured"])
@pytest.mark.parametrize("level", [0, 3])
def test_what_waits_for_its_first_batch_goes_on(stages: str, level: int, tmp_path: Path) -> None:
    plain = model("plain")
    before = model(stages, level)
    for one in (plain, before):
        one.fit(X, Y, **FIT)  # ends within a cycle of accumulation
    kdist.checkpoint.save(before, tmp_path)
    after = model(stages, 3 - level, seed=1)
    assert kdist.checkpoint.restore(after, tmp_path).step == 1
    for one in (plain, after):
        one.fit(X, Y, **FIT)
    assert_close(plain.get_weights(), after.get_weights())
    assert_close(plain.optimizer.variables, after.optimizer.variables)


def test_what_was_not_sent_yet_waits_for_devices(tmp_path: Path) -> None:
    sent = {"compression": kdist.CompressionConfig(patterns={".*kernel": kdist.PowerSGD(rank=1)})}
    before = model("lists", **sent)
    before.fit(X, Y, **FIT)
    kdist.checkpoint.save(before, tmp_path)
    after = model("lists", seed=1, **sent)
    with pytest.raises(kdist.checkpoint.CheckpointError, match="Predict a batch first.*PowerSGD"):
        kdist.checkpoint.restore(after, tmp_path)
    after.predict(X, verbose=0)
    kdist.checkpoint.restore(after, tmp_path)
    assert_close(before.get_weights(), after.get_weights())
