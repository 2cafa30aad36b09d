"""A forward pass, and a backward pass from gradients that come from elsewhere.

A loss over the whole batch is computed between the two: it takes all replicas' outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.program.logits import logits_among
from kdist.program.program import Program

import keras
import tensorflow as tf

PullBack = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""(gradient of each flat output and then of its logits, of each `add_loss` value; None without one)
-> gradients of the connected variables.
"""


def with_their_logits(outputs: Any, marks: Sequence[Any]) -> list[Any]:
    """Flat outputs, then the logits among what `Program.collect` calls masks."""
    return [*keras.tree.flatten(outputs), *logits_among(marks).values()]


def made_by(found: Mapping[str, Any]) -> list[Any]:
    """Of what `Program.collect` returns: outputs with their logits, and `add_loss` values."""
    return [*with_their_logits(found["outputs"], found["masks"]), *found["added"]]


def as_it_is(gradient: Any, _: Any) -> Any:
    """A gradient where nothing is laid out."""
    return gradient


def recorded(
    program: Program,
    params: list[Any],
    carried: list[Any],
    x: Any,
    laid: Callable[[Any, Any], Any] = as_it_is,
) -> tuple[dict[str, Any], PullBack]:
    """What `Program.collect` returns in training, and what pulls gradients back through it.

    Args:
        program: The pure functions.
        params: Values of `ModelState.params`.
        carried: Values of `ModelState.carried`.
        x: Inputs of a replica.
        laid: See `both_passes`.
    """
    trained = params[: len(program.state.trainable)]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(trained)
        found = program.collect(params, carried, x, training=True)
    made = made_by(found)

    def pull_back(cotangents: Sequence[Any], added: Sequence[Any]) -> list[Any]:
        pairs = [(t, laid(c, t)) for t, c in zip(made, (*cotangents, *added)) if c is not None]
        if not pairs:
            return program.connected([None] * len(trained), x)
        targets, given = zip(*pairs)
        return program.connected(tape.gradient(targets, trained, output_gradients=given), x)

    return found, pull_back


def both_passes(
    program: Program, laid: Callable[[Any, Any], Any] = as_it_is
) -> Callable[..., dict[str, Any]]:
    """A pure function of both passes: of what `recorded` and `PullBack` take.

    It returns what `Program.collect` does, and `gradients`. Nothing of the forward pass needs the
    last two arguments, so that it can be cut where these come in.

    Args:
        program: The pure functions.
        laid: Lays a gradient that comes from elsewhere out as what it is the gradient of.
    """

    def function(
        params: list[Any],
        carried: list[Any],
        x: Any,
        cotangents: Sequence[Any],
        added: Sequence[Any],
    ) -> dict[str, Any]:
        found, pull_back = recorded(program, params, carried, x, laid)
        return {**found, "gradients": pull_back(cotangents, added)}

    return function
