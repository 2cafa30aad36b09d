"""Penalties of tables on the host, which are over all of their rows: computed where the table is.

No device holds what a penalty reads, so no program computes it. Its gradient, of the table's size,
stays on the host, and joins the rows of the slices there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.optimizer.gradients import GradientSource
from kdist.optimizer.reduction import Reduction
from kdist.program.fetched_tables import FetchedTables
from kdist.program.loss_parts import LossParts, merged, penalty_name
from kdist.program.step_result import StepResult
from kdist.runtime.plain_runner import Begin

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class TablePenalties:
    """The penalties of a step.

    Attributes:
        parts: By name, their values.
        gradients: Of trainable variables, by position: dense.
    """

    parts: LossParts
    gradients: Mapping[int, Any]

    def joining(self, begin: Begin | None) -> Begin | None:
        """Begins a reduction of gradients that has these too."""
        if begin is None or not self.gradients:
            return begin

        def joined(source: GradientSource, connected: Sequence[int]) -> Reduction:
            once = getattr(source, "once", {})
            source.once = _summed(once, self.gradients)  # type: ignore[attr-defined]
            return begin(source, sorted({*connected, *self.gradients}))

        return joined

    def added_to(self, result: StepResult) -> StepResult:
        """What slices gave, with the penalties in the first one's part of the loss."""
        if not self.parts:
            return result
        total = tf.add_n([value for values in self.parts.values() for value in values])
        first = result.slices[0]
        first = dataclasses.replace(first, loss_parts=merged([first.loss_parts, self.parts]))
        return dataclasses.replace(
            result,
            loss=result.loss + tf.cast(total, result.loss.dtype),
            slices=[first, *result.slices[1:]],
            once=_summed(result.once, self.gradients),
        )


def _summed(some: Mapping[int, Any], others: Mapping[int, Any]) -> dict[int, Any]:
    """Gradients by position, added where both have one."""
    found = dict(some)
    for v, gradient in others.items():
        found[v] = found[v] + gradient if v in found else gradient
    return found


def table_penalties(
    tables: FetchedTables, scale: Any = None, differentiate: bool = True
) -> TablePenalties:
    """Computes the penalties of a model's tables on the host, in the graph of now.

    Args:
        tables: The tables.
        scale: What the loss is multiplied by before differentiation, None for 1.
        differentiate: Whether gradients are asked for.
    """
    parts: LossParts = {}
    gradients = {}
    for table in tables.penalized:
        entry = table.entry
        (home,) = entry.placement.shards[0].holders
        with tf.device(entry.device(home)):
            value = tf.identity(keras_trainer.tf_variable(entry.locals[home]))
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(value)
                penalty = tf.cast(tf.reduce_sum(table.penalty(value)), keras.config.floatx())
                target = penalty if scale is None else penalty * tf.cast(scale, penalty.dtype)
            if differentiate:
                found = tape.gradient(target, value)
                gradients[table.position] = tf.zeros_like(value) if found is None else found
        parts[penalty_name(table.layer.embeddings)] = [penalty]
    return TablePenalties(parts, gradients)
