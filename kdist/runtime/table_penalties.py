"""Penalties of tables on the host, or split by hand: over all rows, computed where these are.

No device of a slice holds what a penalty reads, so no program computes it. Its gradient, of the
table's size, stays where the table is, in parts if that is, and joins the rows of the slices there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.optimizer.reduction import Reduction
from kdist.optimizer.slice_gradients import SliceGradients, by_position
from kdist.program.fetched_tables import FetchedTables
from kdist.program.looked_up import LookedUp
from kdist.program.loss_parts import LossParts, merged, penalty_name
from kdist.program.step_result import StepResult
from kdist.runtime.runner_contract import Begin
from kdist.sharding.placement import Index, covers
from kdist.storage.parts import InParts, assemble

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class TablePenalties:
    """The penalties of a step.

    Attributes:
        parts: By name, their values.
        gradients: Of trainable variables, by position: dense, or `InParts`.
    """

    parts: LossParts
    gradients: Mapping[int, Any]

    def joining(self, begin: Begin | None) -> Begin | None:
        """Begins a reduction of gradients that has these too."""
        if begin is None or not self.gradients:
            return begin

        def joined(source: SliceGradients, connected: Sequence[int]) -> Reduction:
            every = sorted({*connected, *self.gradients})
            return begin(source.joined(self.gradients), every)

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
            once=by_position(result.once, self.gradients),
        )


BY_ELEMENT = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
"""Penalties that are sums of what each element gives: a table's is the sum of its parts'."""


def table_penalties(
    tables: FetchedTables, scale: Any = None, differentiate: bool = True
) -> TablePenalties:
    """Computes the penalties of a model's tables where these are, in the graph of now.

    Args:
        tables: The tables.
        scale: What the loss is multiplied by before differentiation, None for 1.
        differentiate: Whether gradients are asked for.
    """
    parts: LossParts = {}
    gradients: dict[int, Any] = {}
    for table in tables.penalized:
        found = [
            _penalty(table, index, value, scale, differentiate) for index, value in _values(table)
        ]
        home = table.entry.placement.shards[0].holders[0]
        with tf.device(table.entry.device(home)):
            values = [value for value, _ in found]
            total = values[0] if len(values) == 1 else tf.add_n(values)
        parts[penalty_name(table.layer.embeddings)] = [total]
        if differentiate:
            made = [gradient for _, gradient in found]
            whole = len(made) == 1 and covers(made[0][0], table.entry.placement.shape)
            gradients[table.position] = made[0][1] if whole else InParts(made)
    return TablePenalties(parts, gradients)


def _values(table: LookedUp) -> list[tuple[Index, Any]]:
    """A table, in the parts that its penalty is computed of, each where it is."""
    entry, found = table.entry, []
    for shard in entry.placement.shards:
        if 0 not in shard.shape:
            home = shard.holders[0]
            with tf.device(entry.device(home)):
                value = tf.identity(keras_trainer.tf_variable(entry.locals[home]))
            found.append((shard.index, value))
    if len(found) == 1 or type(table.penalty) in BY_ELEMENT:
        return found
    # A penalty of the user's own may be of any elements together.
    with tf.device(found[0][1].device):
        return [(tuple(slice(0, n) for n in entry.placement.shape), assemble(found))]


def _penalty(
    table: LookedUp, index: Index, value: Any, scale: Any, differentiate: bool
) -> tuple[Any, tuple[Index, Any]]:
    """The penalty of a part of a table, and where its gradient lies and what it is."""
    with tf.device(value.device):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(value)
            penalty = tf.cast(tf.reduce_sum(table.penalty(value)), keras.config.floatx())
            target = penalty if scale is None else penalty * tf.cast(scale, penalty.dtype)
        gradient = tape.gradient(target, value) if differentiate else None
        if differentiate and gradient is None:
            gradient = tf.zeros_like(value)
    return penalty, (index, gradient)
