"""Non-trainable state through a step: what goes into each replica, and how results combine.

- statistics (BatchNormalization): the mean over the replicas that had rows;
- seed generators: every replica draws from its own stream, a fixed function of the logical seed,
  the first one's being that of a single device;
- metrics that layers own: what every replica added is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kdist.program.batch import SplitBatch
from kdist.program.model_state import ModelState
from kdist.storage.variables import stored

import keras
import tensorflow as tf

SEED_STRIDE = 0x9E3779B1
"""Odd, so that replicas' seeds differ for any replica count below 2**32 (Weyl sequence)."""


def carried_for(state: ModelState, replica: int) -> list[Any]:
    """Values of `ModelState.carried` for one replica, on the device in scope."""
    values = []
    for variable in state.fixed:
        entry = stored(variable)
        values.append(variable.value if entry is None else entry.whole_at(replica))
    values += [replica_seed(tf.convert_to_tensor(v.value), replica) for v in state.seeds]
    values += [tf.convert_to_tensor(v.value) for v in state.metrics]
    return [tf.convert_to_tensor(v) for v in values]


def replica_seed(seed: Any, replica: int) -> Any:
    """The seed state of a replica: that of a single device for replica 0, others apart from it."""
    if replica == 0:
        return seed
    offset = (replica * SEED_STRIDE) % 2**32
    return tf.stack([seed[0] + tf.constant(offset, seed.dtype), seed[1]])


def combine(
    state: ModelState,
    updated: Sequence[int],
    values: Sequence[Sequence[Any]],
    batch: SplitBatch,
) -> None:
    """Writes back the state that the replicas' forward passes changed; see `combined`."""
    for variable, value in combined(state, updated, values, batch):
        variable.assign(value)


def combined(
    state: ModelState,
    updated: Sequence[int],
    values: Sequence[Sequence[Any]],
    batch: SplitBatch,
) -> Iterator[tuple[keras.Variable, Any]]:
    """What the state that the replicas' forward passes changed is after the step.

    Args:
        state: The model's variables.
        updated: Positions in `state.written` that changed.
        values: New values, per replica, in the order of `updated`.
        batch: Tells which replicas had rows.

    Yields:
        Each variable with its new value.
    """
    seeds_from = len(state.fixed)
    metrics_from = seeds_from + len(state.seeds)
    used = [tf.cast(count > 0, tf.float64) for count in batch.counts]
    for j, position in enumerate(updated):
        variable = state.written[position]
        new = [replica[j] for replica in values]
        if len(new) == 1 or seeds_from <= position < metrics_from:
            yield variable, new[0]
        elif metrics_from <= position < len(state.carried):
            old = tf.convert_to_tensor(variable.value)
            added = [(n - old) * tf.cast(u, old.dtype) for n, u in zip(new, used)]
            yield variable, old + tf.add_n(added)
        elif new[0].dtype.is_floating:
            yield variable, _mean(new, used)
        else:
            yield variable, new[0]


def _mean(values: Sequence[Any], used: Sequence[Any]) -> Any:
    """The mean of values that count 1, or 0; of 16 bits in 32, since a sum may be beyond 16."""
    dtype = values[0].dtype
    wide = tf.float32 if dtype.size < tf.float32.size else dtype
    weighted = [tf.cast(v, wide) * tf.cast(u, wide) for v, u in zip(values, used)]
    return tf.cast(tf.add_n(weighted) / tf.cast(tf.add_n(used), wide), dtype)
