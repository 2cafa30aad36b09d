"""Marks that TensorFlow's clustering pass reads; see `kdist._compat.xla_clusters`."""

from __future__ import annotations

from kdist._compat import xla_clusters
from kdist._compat.dtensor_internals import Registered
from kdist._compat.run_metadata import function_graphs

import keras
import numpy as np
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


def test_known_operations() -> None:
    known = xla_clusters.known_operations()
    assert {"MatMul", "StatelessWhile", "PartitionedCall", "Assert"} <= known
    assert not {"PyFunc", "ResizeBicubic", "PrintV2", "LookupTableFindV2"} & known


def test_not_compiled() -> None:
    """In a loop's body, too; of Keras's layers with a gradient there is nothing."""

    @tf.function(autograph=False)
    def own(x: tf.Tensor) -> tf.Tensor:
        turns = tf.while_loop(
            lambda i, x: i < 3,
            lambda i, x: (i + 1, tf.numpy_function(np.sin, [x], x.dtype)),
            (0, x),
            shape_invariants=(tf.TensorShape(()), tf.TensorShape(None)),
        )
        return turns[1]

    (found,) = xla_clusters.not_compiled(own.get_concrete_function(tf.ones((2, 2))).graph)
    assert found.startswith("PyFunc (")
    model = keras.Sequential(
        [keras.layers.LSTM(3, dropout=0.1, use_cudnn=False), keras.layers.BatchNormalization()]
    )

    @tf.function(autograph=False)
    def kerass(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    assert not xla_clusters.not_compiled(kerass.get_concrete_function(tf.ones((2, 4, 3))).graph)
