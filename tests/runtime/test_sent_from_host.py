"""What leaves the host for devices is what a look-up itself made, in a graph that ran.

TensorFlow allocates in pinned memory what an operation of the host makes for a copy to a GPU, but
not what it passes on. So nothing may be between a look-up of a table on the host and the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kdist
from kdist._compat import run_metadata
from kdist.api.attached import attached

import keras
import numpy as np
import pytest
import tensorflow as tf

ROWS, LENGTH, BATCH = 64, 4, 8

MESHES: dict[str, dict[str, Any]] = {
    "data": {"axes": {"data": 2}},
    "inner": {"axes": {"data": 2, "model": 2}, "layout_map": {"up/kernel": (None, "model")}},
    "stages": {"axes": {"pipe": 2, "data": 2}, "pipeline": kdist.PipelineConfig(micro_batches=2)},
    "ahead": {"axes": {"data": 2}},
}


def sent(steps: Any, host: str) -> Iterator[str]:
    """Kinds of the operations whose numbers the host sends to devices."""
    graphs = [part for one in run_metadata.function_graphs(steps) for part in one.partition_graphs]
    for graph in graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            ends = [
                node.attr[f"{end}_device"].s.decode().endswith(host) for end in ("send", "recv")
            ]
            floats = node.attr["T"].type == tf.float32.as_datatype_enum
            if node.op == "_Send" and ends == [True, False] and floats:
                made = nodes[node.input[0].split(":")[0]].op
                if made != "Const":  # which stands for an order of operations
                    yield made


@pytest.mark.parametrize("name", MESHES)
def test_rows_of_tables_leave_from_the_look_up(name: str) -> None:
    ahead, options = name == "ahead", dict(MESHES[name])
    ids = keras.Input((LENGTH,), dtype="int32")
    table = kdist.place(keras.layers.Embedding(ROWS, 8, name="table"), "host", prefetch=ahead)
    x = keras.layers.Dense(16, "relu", name="up")(keras.layers.Flatten()(table(ids)))
    model = keras.Model(ids, keras.layers.Dense(3, name="down")(x))
    mesh = kdist.mesh(**options.pop("axes"))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, **options))
    adam = kdist.lazy(keras.optimizers.Adam())
    model.compile(adam, "mse", steps_per_execution=2 if ahead else 1)
    data = np.zeros((2 * BATCH, LENGTH), "int32"), np.zeros((2 * BATCH, 3), "float32")
    found = list(sent(lambda: model.fit(*data, BATCH, verbose=0), attached(model).topology.host))
    assert len(found) >= 2 and set(found) == {"ResourceGather"}
