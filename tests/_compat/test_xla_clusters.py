"""Marks that TensorFlow's clustering pass reads; see `kdist._compat.xla_clusters`."""

from __future__ import annotations

from kdist._compat import xla_clusters
from kdist._compat.dtensor_internals import Registered
from kdist._compat.run_metadata import function_graphs

import pytest
import tensorflow as tf
from tensorflow.core.framework import function_pb2

DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{k}" for k in (1, 2)]


@pytest.mark.parametrize("marked", [True, False])
def test_mark(marked: bool) -> None:
    definition = function_pb2.FunctionDef()
    definition.signature.name = f"kdist_test_of_marks_{marked}"
    definition.signature.input_arg.add(name="x", type=tf.float32.as_datatype_enum)
    for k, device in enumerate(DEVICES):
        source = "x"
        # Two that no optimizer of TensorFlow puts together, whatever the processor.
        for op in ("Pow", "Atan2"):
            node = definition.node_def.add(op=op, name=f"{op}{k}", device=device)
            node.input.extend(["x", source])
            node.attr["T"].type = tf.float32.as_datatype_enum
            source = f"{node.name}:z:0"
            if marked:
                xla_clusters.mark(node, "scope")
        definition.signature.output_arg.add(name=f"y{k}", type=tf.float32.as_datatype_enum)
        definition.ret[f"y{k}"] = source
    function = Registered(definition)

    @tf.function
    def call(x: tf.Tensor) -> list[tf.Tensor]:
        return function.call([x], [tf.float32] * len(DEVICES))[1]

    graphs = function_graphs(lambda: call(tf.ones(3)))
    found = {
        n.device for g in graphs for p in g.partition_graphs for n in p.node if n.op == "_XlaRun"
    }
    assert found == (set(DEVICES) if marked else set())
