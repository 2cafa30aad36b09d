"""What tracing a program taught: facts that do not depend on values."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any

from kdist.program.loss import CountedLoss, SharedLoss
from kdist.storage import sparse

import keras


@dataclasses.dataclass
class Traced:
    """Facts of a program's traces, in training or not.

    Attributes:
        connected: Positions of trainable variables that get a gradient.
        rows: Trainable variables whose gradient is rows, and how these are looked up.
        updated: Positions in `ModelState.written` that the forward pass writes.
        adders: The layer that added each `add_loss` value of `Program.collect`; None for one
            outside.
    """

    connected: list[int] = dataclasses.field(default_factory=list)
    rows: dict[int, sparse.LookUp] = dataclasses.field(default_factory=dict)
    updated: list[int] = dataclasses.field(default_factory=list)
    adders: list[keras.Layer | None] = dataclasses.field(default_factory=list)
    _counts: dict[tuple[bool, ...], bool] = dataclasses.field(default_factory=dict)
    _of: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )

    def as_of(self, trace: Any) -> None:
        """Goes back to what a trace taught, or keeps that if it is the one that was made last.

        Which weights a loss reaches may depend on the batch: on whether it has weights, say.

        Args:
            trace: The concrete function.
        """
        facts = self.connected, self.rows, self.updated, self.adders
        facts = self._of.setdefault(trace, facts)
        self.connected, self.rows, self.updated, self.adders = facts

    def note_counts(self, sample_weight: Any, terms: Iterable[SharedLoss | CountedLoss]) -> None:
        """Notes, of batches with such weights, whether what losses count depends on the data."""
        self._counts[_given(sample_weight)] = any(term.counts_by_data for term in terms)

    def counts_by_data(self, sample_weight: Any) -> bool:
        """Whether some loss of a batch counts by a mask or weights: shares need a pass that counts.

        Args:
            sample_weight: The batch's, of which only is asked what is there.
        """
        return self._counts[_given(sample_weight)]


def _given(sample_weight: Any) -> tuple[bool, ...]:
    """Which weights of samples there are."""
    return tuple(leaf is not None for leaf in keras.tree.flatten(sample_weight))
