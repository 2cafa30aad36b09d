"""What a device computes between two communications is one function; equal ones are the same."""

from __future__ import annotations

from typing import Any

import kdist
from kdist._compat import run_metadata
from kdist.dtensor.outlining import PREFIX

import keras
import numpy as np
import pytest
import tensorflow as tf

WIDTH, ROWS = 8, 4


def trained(axes: dict[str, int], blocks: int, micro_batches: int = 0, **more: Any) -> list[Any]:
    """The calls of segments in the graphs of a first training step."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((WIDTH,))
    for i in range(blocks):
        y = keras.layers.RMSNormalization()(x)
        y = keras.layers.Dense(2 * WIDTH, "gelu", name=f"up_{i}")(y)
        x = keras.layers.Add()([x, keras.layers.Dense(WIDTH, name=f"down_{i}")(y)])
    layouts = {"up.*kernel": (None, "model"), "down.*kernel": ("model", None)}
    pipeline = kdist.PipelineConfig(micro_batches=micro_batches) if micro_batches else None
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes), layout_map=layouts, pipeline=pipeline, **more
    )
    model = kdist.parallelize(keras.Model(inputs, x), config)
    model.compile("sgd", "mse", jit_compile=False)
    rows = ROWS * max(micro_batches, 1)
    x, y = np.ones((rows, WIDTH), "f4"), np.ones((rows, WIDTH), "f4")
    graphs = run_metadata.function_graphs(lambda: model.train_on_batch(x, y))
    nodes = [n for g in graphs for part in g.partition_graphs for n in part.node]
    return [n for n in nodes if n.attr["f"].func.name.startswith(PREFIX)]


def functions(calls: list[Any]) -> set[str]:
    return {one.attr["f"].func.name for one in calls}


def test_equal_blocks_call_the_same_functions() -> None:
    whole = kdist.FusionConfig(overlap=False)  # in chunks, blocks are cut at different places
    few, many = (trained({"data": 2, "model": 2}, n, fusion=whole) for n in (3, 6))
    assert len(functions(many)) == len(functions(few))
    assert len(many) >= 1.6 * len(few)


def test_all_devices_and_micro_batches_call_the_same_functions() -> None:
    few, many = (trained({"pipe": 2, "model": 2}, 4, n) for n in (2, 6))
    assert len(functions(many)) == len(functions(few))
    assert len(many) == 3 * len(few)
    assert {one.device[-1] for one in many} == set("0123")


def test_no_call_is_a_variant_for_a_device() -> None:
    """TensorFlow would prepare each by itself; that pass is off for the graphs of steps."""
    calls = trained({"data": 2, "model": 2}, 2)
    assert calls and not any("specialized" in name for name in functions(calls))


@pytest.mark.parametrize("mesh", [{"data": 2, "model": 2}, {"pipe": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("layers", [["up.*"], []], ids=str)
def test_recompute_does_without(mesh: dict[str, int], layers: list[str]) -> None:
    """A call holds what it is given until it ends: a twelfth of the memory that is left."""
    again = kdist.RecomputeConfig(layers=layers) if layers else None
    calls = trained(mesh, 2, 2 if "pipe" in mesh else 0, recompute=again)
    assert bool(calls) == (not layers)


def test_a_failure_inside_names_the_layer() -> None:
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), keras.layers.Embedding(10, 8, name="words")]
        + [keras.layers.Flatten(), keras.layers.Dense(8, "gelu"), keras.layers.Dense(2)]
    )
    layouts = {".*dense.*kernel": (None, "model")}
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=layouts)
    kdist.parallelize(model, config)
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"words\w*/\w*Gather"):
        model.train_on_batch(np.full((4, 4), 11), np.zeros((4, 2)))
