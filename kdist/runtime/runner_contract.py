"""What steps give runners, and get from them, whatever the programs run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist.optimizer.reduction import Reduction
from kdist.optimizer.slice_gradients import SliceGradients
from kdist.program.batch import SplitBatch, share_of
from kdist.program.loss import has_rows
from kdist.program.step_result import SliceResult

import tensorflow as tf

Begin = Callable[[SliceGradients, Sequence[int]], Reduction]
"""Begins the reduction of the gradients that a source will have, of some trainable variables."""


def loss_factor(scale: Any) -> tf.Tensor:
    """What programs multiply the loss by, a float32 scalar: a scale, or 1 for None."""
    return tf.constant(1.0) if scale is None else tf.cast(scale, tf.float32)


@dataclasses.dataclass(frozen=True)
class Collected:
    """A forward pass without a loss, for a loss over the whole batch.

    Attributes:
        results: Per slice, or replica of a pipeline, as steps take them; see `Program.collect`.
        parts: Per call of the model on a part of the batch: `outputs`, `masks`, `added`.
        batch: The batch in these parts.
        given: Values of trainable and of carried variables, whole, for the loss.
        back: What the backward pass needs of it.
    """

    results: Sequence[SliceResult]
    parts: Sequence[SliceResult]
    batch: SplitBatch
    given: tuple[list[Any], list[Any]]
    back: Any = None


@dataclasses.dataclass(frozen=True)
class Coming:
    """What will come back through the parts of a forward pass: specs, known before it is written.

    Attributes:
        cotangents: Per part, of the gradient of each flat output and its logits; None without one.
        added: The same of each `add_loss` value.
    """

    cotangents: Sequence[Sequence[Any]]
    added: Sequence[Sequence[Any]]

    @classmethod
    def of(
        cls,
        made: Sequence[Sequence[Any]],
        cotangents: Sequence[Sequence[Any]],
        added: Sequence[Sequence[Any]],
        like: Callable[[Any, Any], Any] = lambda made, g: tf.TensorSpec(made.shape, g.dtype),
    ) -> Coming:
        """What gradients are like that were found once.

        Args:
            made: Per part, what they are gradients of.
            cotangents: Per part, of outputs and logits; None without one.
            added: The same of `add_loss` values.
            like: Describes one, from what it is the gradient of and the gradient.
        """
        found, ends = [], [len(one) for one in cotangents]
        for tensors, *gradients in zip(made, cotangents, added, strict=True):
            pairs = zip(tensors, [*gradients[0], *gradients[1]], strict=True)
            found.append([None if g is None else like(t, g) for t, g in pairs])
        return cls(
            [one[:end] for one, end in zip(found, ends)],
            [one[end:] for one, end in zip(found, ends)],
        )


def row_shares(batch: SplitBatch) -> list[Any]:
    """Each replica's share of the rows, float64."""
    return [share_of(count, batch.size) for count in batch.counts]


def layer_weights(batch: SplitBatch, mean: bool) -> list[Any]:
    """What each replica's `add_loss` values count: its share of the rows, or 1 if it has any."""
    shares = row_shares(batch)
    return shares if mean else [has_rows(share) for share in shares]
