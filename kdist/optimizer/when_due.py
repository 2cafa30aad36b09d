"""With gradient accumulation, weights change in some steps alone: what follows from that.

Totals of replicas' sums leave the branch that makes them by a variable on each owner's device: what
a branch of `tf.cond` returns is put together on one device, whatever made it. New values travel
when there are any.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from kdist._compat import keras_optimizers
from kdist.optimizer.broadcast import send_values
from kdist.optimizer.local import LocalOptimizer
from kdist.optimizer.update_jobs import Jobs

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class DueAccumulator:
    """An accumulator of a device's optimizer, zero between steps, which hands a total on.

    Attributes:
        variable: The accumulator.
        device: Where it is.
    """

    variable: keras.Variable
    device: str

    def put(self, total: Any) -> None:
        """Takes a total."""
        with tf.device(self.device):
            self.variable.assign(total)

    def take(self) -> Any:
        """What it was given in this step, zeros if nothing; it is zero again."""
        with tf.device(self.device):
            value = tf.identity(self.variable.value)
            self.variable.assign(tf.zeros_like(value))
        return value


def held_by(local: Sequence[LocalOptimizer], numbers: Container[int]) -> dict[int, DueAccumulator]:
    """By number of a job, what hands its total on.

    Args:
        local: The local optimizers of one that accumulates.
        numbers: Of the jobs.
    """
    found = [(one, n, v) for one in local for n, v in zip(one.positions, one.variables)]
    kept = {
        n: (keras_optimizers.accumulator(one.optimizer, variable), one.device)
        for one, n, variable in found
        if n in numbers
    }
    return {n: DueAccumulator(one, device) for n, (one, device) in kept.items() if one is not None}


def is_due(leaf: Any, local: Sequence[LocalOptimizer]) -> Any:
    """Whether the step, which has not been counted yet, is one that updates weights."""
    step = tf.convert_to_tensor(local[0].iterations().value) + 1
    return step % leaf.gradient_accumulation_steps == 0


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Jobs whose values change in the steps that update alone.

    Attributes:
        due: Whether this step does.
        numbers: Of the jobs.
    """

    due: Any
    numbers: frozenset[int]


def waiting(leaf: Any, local: Sequence[LocalOptimizer]) -> Waiting:
    """The jobs of an optimizer that need not be sent in each step; before these are counted.

    Keras applies constraints, overwrites variables with their gradients, and weights with averages,
    in the steps between too. What a class of one's own does there is not known.
    """
    kind = keras_optimizers.own_class(leaf)
    known = kind.__module__.split(".")[0] in ("keras", "kdist")
    numbers: frozenset[int] = frozenset()
    if known and leaf.gradient_accumulation_steps and not leaf.ema_overwrite_frequency:
        found = [(n, v) for one in local for n, v in zip(one.positions, one.variables)]
        kept = {n for n, v in found if v.constraint is None and not v.overwrite_with_gradient}
        numbers = frozenset(kept)
    return Waiting(is_due(leaf, local) if numbers else None, numbers)


def send_what_changed(
    jobs: Jobs,
    numbers: Iterable[int],
    waits: Sequence[Waiting],
    one_by_one: bool,
    changed: Mapping[int, Any],
) -> None:
    """Sends new values: of jobs that wait, in the steps that change them.

    Args:
        jobs: The jobs.
        numbers: Of those that have updated something.
        waits: Of each optimizer.
        one_by_one: See `send_values`.
        changed: See `send_values`.
    """
    rest = set(numbers)
    for one in waits:
        mine = sorted(rest & one.numbers)
        rest -= one.numbers
        if mine:
            send = functools.partial(send_values, jobs, mine, one_by_one, changed)
            tf.cond(one.due, send, lambda: None)
    send_values(jobs, rest, one_by_one, changed)
