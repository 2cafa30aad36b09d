"""Marks that TensorFlow's clustering pass reads; see `kdist._compat.xla_clusters`."""

from __future__ import annotations

import contextlib
from typing import Any

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


@pytest.mark.parametrize("stays", [True, False])
def test_stays_a_call(stays: bool) -> None:
    """A call that XLA compiles, of which nothing is read, between operations that are ordered."""
    added = tf.function(lambda x, y: x + y, jit_compile=True)
    called = added.get_concrete_function(x=tf.TensorSpec(3), y=tf.TensorSpec(3))
    dtype = tf.float32.as_datatype_enum
    definition = function_pb2.FunctionDef()
    definition.signature.name = f"kdist_test_of_calls_{stays}"
    definition.signature.input_arg.add(name="x", type=dtype)

    def add(op: str, name: str, inputs: list[str], device: str = DEVICES[0]) -> Any:
        node = definition.node_def.add(op=op, name=name, device=device)
        node.input.extend(inputs)
        return node

    for op in ("Exp", "Sin"):
        add(op, op, ["x"]).attr["T"].type = dtype
    call = add("PartitionedCall", "call", ["Exp:y:0", "Sin:y:0"])
    call.attr["f"].func.name = called.function_def.signature.name
    call.attr["Tin"].list.type.extend([dtype, dtype])
    call.attr["Tout"].list.type.append(dtype)
    call.attr[xla_clusters.MUST_COMPILE].b = True
    if stays:
        xla_clusters.stays_a_call(call)
    for i, op in enumerate(("Cos", "Neg", "Abs")):
        add(op, op, ["x", "^call"], DEVICES[1]).attr["T"].type = dtype
        definition.signature.output_arg.add(name=f"y{i}", type=dtype)
        definition.ret[f"y{i}"] = f"{op}:y:0"
    function = Registered(definition, called)

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        return function.call([x], [tf.float32] * 3)[1]

    fails = contextlib.nullcontext() if stays else pytest.raises(tf.errors.NotFoundError)
    with fails:
        np.testing.assert_array_equal(step(tf.ones(3))[1], [-1.0] * 3)


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
