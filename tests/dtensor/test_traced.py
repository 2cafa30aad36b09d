"""A traced function as a program."""

from __future__ import annotations

from typing import Any

from kdist.dtensor.stitching import Stitcher
from kdist.dtensor.traced import as_program
from kdist.program.pruning import pruned

import keras
import numpy as np
import tensorflow as tf


def test_shapes_of_nodes_that_are_called_as_arguments_and_results_are() -> None:
    """TensorFlow renames them in a function's definition, if its graph was cut out of another."""

    def function(x: Any, y: Any) -> Any:
        joined = tf.concat([x, y], 0, name="concat")
        return tf.nn.relu(joined, name="relu"), joined

    specs = [tf.TensorSpec((2, 3)), tf.TensorSpec((4, 3))]
    whole = tf.compat.v1.wrap_function(function, specs)
    concat = next(op for op in whole.graph.get_operations() if op.type == "ConcatV2")
    program = as_program(pruned(whole, whole.inputs, [*concat.outputs, *whole.outputs]))
    stitcher = Stitcher(program)
    assert "concat" not in stitcher.nodes
    shapes = [stitcher.shape(reference).as_list() for reference in program.results]
    assert shapes == [[6, 3]] * 3


def test_what_xla_compiles_is_compiled() -> None:
    """Such as a convolution in groups, which Keras has compiled: on a CPU there is no other way."""

    def function(x: Any, kernel: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            found = keras.ops.conv(x, kernel, padding="same")
        return found, tape.gradient(found, kernel)

    given = tf.ones((2, 5, 4)), tf.ones((3, 2, 4))
    concrete = tf.function(function).get_concrete_function(*given)
    stitched = Stitcher(as_program(concrete)).stitch([""])

    @tf.function
    def step(x: Any, kernel: Any) -> Any:
        return stitched([[x, kernel]])[1][0]

    for ours, right in zip(step(*given), concrete(*given), strict=True):
        np.testing.assert_array_equal(ours, right)
