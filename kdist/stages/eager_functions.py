"""A virtual stage that runs operation by operation, for debugging."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdist.dtensor.sharded import Sharded
from kdist.program.vjp import differentiable
from kdist.stages.body import StageInput, StageOutput
from kdist.stages.functions import Saved, StageFunctions
from kdist.storage.sparse import is_sparse

import tensorflow as tf


@dataclasses.dataclass
class Taped(Saved):
    """What an eager forward keeps for its backward.

    Attributes:
        tape: Knows what was computed.
        inputs: Parameters, and what came from the stage before, as the tape knows them.
        outputs: What takes cotangents, as the tape knows it.
        found: Gradients of the parameters, from the first half of a backward to the second.
    """

    tape: Any = None
    inputs: tuple[list[Any], list[Any]] = ([], [])
    outputs: list[Any] = dataclasses.field(default_factory=list)
    found: list[Any] = dataclasses.field(default_factory=list)


class EagerFunctions(StageFunctions):
    """See `StageFunctions`, whose trace says what there is: state, masks, gradients.

    The layers are then called with values, each time.
    """

    def forward(self, s: int, params: list[Any], given: StageInput) -> tuple[StageOutput, Saved]:
        """See `StageFunctions.forward`."""
        values = [p.parts[0] for p in params]
        flat = [t.parts[0] if isinstance(t, Sharded) else t for t in given.flat()]
        boundary = flat[: len([t for t in given.boundary.values() if t is not None])]
        wanted = self.wanted
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([t for t in (*values, *boundary) if differentiable(t)])
            made = self.body.run(values, given.filled(flat), wanted.training, wanted.whole)
            outputs = [tf.identity(t) for t in made.flat()]
        result = made.filled([Sharded((t,)) for t in outputs])
        sent = result.targets(wanted.whole)
        return result, Taped(
            params, [], sent, tape=tape, inputs=(values, boundary), outputs=outputs[: len(sent)]
        )

    def needs(self, half: str) -> set[int]:
        """See `StageFunctions.needs`; the tape has what it looks at."""
        return set()

    def backward(self, s: int, saved: Any) -> tuple[list[Any], list[Any]]:
        """See `StageFunctions.backward`."""
        params, boundary = saved.inputs
        found = _gradients(saved, [*params, *boundary])
        return found[: len(params)], list(map(_dense, found[len(params) :]))

    def backward_input(self, s: int, saved: Any) -> list[Any]:
        """See `StageFunctions.backward_input`; all at once, as gradients may print too."""
        saved.found, inward = self.backward(s, saved)
        return inward

    def backward_weight(self, s: int, saved: Any) -> list[Any]:
        """See `StageFunctions.backward_weight`."""
        return list(saved.found)


def _gradients(saved: Taped, sources: Sequence[Any]) -> list[Any]:
    """Gradients of some inputs; None where there is none."""
    pairs = [(t, d) for t, d in zip(saved.outputs, saved.cotangents) if d is not None]
    targets = [t for t, _ in pairs if differentiable(t)]
    given = [_value(d) for t, d in pairs if differentiable(t)]
    found = saved.tape.gradient(targets, list(sources), output_gradients=given)
    return [None if g is None else _sharded(g) for g in found]


def _value(tensor: Any) -> Any:
    return tensor.parts[0] if isinstance(tensor, Sharded) else tensor


def _sharded(gradient: Any) -> Any:
    if not is_sparse(gradient):
        return Sharded((gradient,))
    values, indices = (Sharded((t,)) for t in (gradient.values, gradient.indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _dense(gradient: Any) -> Any:
    """Rows as a tensor."""
    if not is_sparse(gradient):
        return gradient
    values, indices = gradient.values.parts[0], gradient.indices.parts[0]
    rows = tf.IndexedSlices(values, indices, gradient.dense_shape)
    return Sharded((tf.convert_to_tensor(rows),))
