"""A traced function as a program."""

from __future__ import annotations

from typing import Any

from kdist.dtensor.stitching import Stitcher
from kdist.dtensor.traced import as_program
from kdist.program.pruning import pruned

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
