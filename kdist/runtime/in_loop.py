"""Several steps in one graph, of which some may be without a barrier between them.

A turn of a loop begins when all of the turn before is done. Within a turn TensorFlow orders what
reads and writes a variable, and nothing else: a step's first layers compute with new values that
have arrived while those of the last step's other layers are still on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def in_loop(
    step: Callable[..., tuple[Any, tuple]], start: tuple, count: Any, together: int = 1
) -> Any:
    """Runs steps one after the other, in the graph of now.

    Args:
        step: `step(i, *state)` gives what the i-th step returns, and the state of the next one.
        start: The state of the first one.
        count: How many there are, at least one; a scalar tensor.
        together: How many a turn of the loop makes; those that are left have turns of their own.

    Returns:
        What the last step returned.
    """
    one = tf.function(step, autograph=False)
    results, _ = one.get_concrete_function(tf.constant(0), *start).structured_outputs
    nothing = tf.nest.map_structure(_blank, results)
    shapes = tf.nest.map_structure(lambda t: t.shape, (tf.constant(0), results, start))

    @tf.function(autograph=False)
    def several(i: Any, *state: Any) -> Any:
        for n in range(together):
            results, state = step(i + n, *state)
        return results, state

    done: tuple[Any, ...] = (tf.constant(0), nothing, start)
    for turn, size in ((several, together), (one, 1)):
        if turn is one or together > 1:
            done = tf.while_loop(
                lambda i, *_, size=size: i + size <= count,
                lambda i, _, state, turn=turn, size=size: (i + size, *turn(i, *state)),
                done,
                shape_invariants=shapes,
                parallel_iterations=1,
            )
    return done[1]


def _blank(result: Any) -> Any:
    """Zeros in the place of a result; none along dims whose size is not known."""
    return tf.zeros([size or 0 for size in result.shape], result.dtype)
