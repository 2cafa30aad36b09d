"""What loops and calls hand on is taken from where they got it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdist.dtensor.handed_on import handed_on, redirected
from kdist.dtensor.stitching import Stitcher
from kdist.dtensor.traced import as_program

import pytest
import tensorflow as tf

NUMBER = tf.TensorSpec((), tf.float64)


def looped(x: Any, weight: Any) -> Any:
    """A loop that swaps two values, and reads a weight."""
    turns = tf.while_loop(
        lambda i, a, b: i < 3, lambda i, a, b: (i + 1, b * weight, a), (0, x, x + 1.0)
    )
    return turns[1]


@tf.function(autograph=False)
def called(x: Any, weight: Any) -> Any:
    return tf.sin(x * weight) * weight


def traced(function: Any) -> Any:
    """Of a value and its gradient with respect to the weight."""

    def both(x: Any, weight: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(weight)
            value = function(x, weight)
        return [value, tape.gradient(value, weight)]

    return tf.function(both, autograph=False).get_concrete_function(NUMBER, NUMBER)


def takers(reference: str, nodes: Mapping[str, Any]) -> set[str]:
    return {name for name, node in nodes.items() if reference in node.input}


@pytest.mark.parametrize("function", [looped, called], ids=["loop", "call"])
def test_a_backward_pass_takes_weights_from_where_the_forward_one_did(function: Any) -> None:
    concrete = traced(function)
    program = as_program(concrete)
    x, weight = (one.name for one in program.arguments)
    nodes = {node.name: node for node in program.definition.node_def}
    instead = handed_on(nodes, {})
    assert takers(weight, nodes) < takers(weight, redirected(nodes, instead))
    # What a loop swaps is another value in each turn.
    assert (x in instead.values()) == (function is called)
    stitched = Stitcher(program).stitch([""])
    given = tf.constant(2.0, tf.float64), tf.constant(3.0, tf.float64)
    step = tf.function(lambda *one: stitched([list(one)])[1][0], autograph=False)
    assert [float(one) for one in step(*given)] == [float(one) for one in concrete(*given)]
