"""What a plan says of processes, and what it says that it does not count."""

from __future__ import annotations

import dataclasses

import kdist
from kdist.plan.plan import Plan

import keras
import pytest

NEAR = {f"CPU:{n}": f"/job:worker/task:{n // 2}/device:CPU:{n % 2}" for n in range(4)}


def over_processes(plan: Plan) -> Plan:
    """The plan, had the four devices of its mesh been two of each of two processes."""
    topology = plan.topology
    slices = [
        dataclasses.replace(one, devices=tuple(NEAR[at.split("device:")[1]] for at in one.devices))
        for one in topology.slices
    ]
    return dataclasses.replace(
        plan, topology=dataclasses.replace(topology, slices=tuple(slices), host=NEAR["CPU:0"])
    )


def planned(axes: dict[str, int], **settings: object) -> str:
    """What the plan of a small model prints about processes."""
    words = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(8, 8, name="words")(words)
    x = keras.layers.Dense(8, activation="tanh", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    layouts = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=layouts if "model" in axes else {},
        pipeline=kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None,
        **settings,  # type: ignore[arg-type]
    )
    model = kdist.parallelize(keras.Model(words, x), config)
    model.compile("sgd", "mse")
    model.plan(batch_size=8)  # looks the tables up
    return str(over_processes(model.plan()).between_processes())


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"data": 4}, "tables"),
        ({"data": 2, "model": 2}, "tables"),
        ({"model": 2, "data": 2}, "what layers send over 'model', tables"),
        ({"pipe": 2, "model": 2}, "what stages send, tables"),
        ({"model": 2, "pipe": 2}, "what layers send over 'model', tables"),
    ],
    ids=str,
)
def test_what_is_not_counted_is_named(axes: dict[str, int], expected: str) -> None:
    assert planned(axes).endswith(f"; not counted: {expected}"), planned(axes)


def test_compressed_gradients_are_not_counted() -> None:
    said = planned({"data": 4}, compression=kdist.CompressionConfig(rest="fp16"))
    assert said.endswith("; not counted: tables, compressed gradients")
