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
class TraceFacts:
    """Facts of a program's traces, in training or not.

    Attributes:
        connected: Positions of trainable variables that get a gradient.
        rows: Trainable variables whose gradient is rows, and how these are looked up.
        updated: Positions in `ModelState.written` that the forward pass writes.
        adders: The layer that added each `add_loss` value of `Program.collect`; None for one
            outside.
        counts_by_data: Whether some loss of a batch counts by a mask or weights: shares need a pass
            that counts.
    """

    connected: list[int] = dataclasses.field(default_factory=list)
    rows: dict[int, sparse.LookUp] = dataclasses.field(default_factory=dict)
    updated: list[int] = dataclasses.field(default_factory=list)
    adders: list[keras.Layer | None] = dataclasses.field(default_factory=list)
    counts_by_data: bool = False
    _of: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )

    def as_of(self, trace: Any) -> None:
        """Goes back to what a trace taught, or keeps that if it is the one that was made last.

        Which weights a loss reaches, and which state is written, may depend on the batch: on which
        inputs it has, or whether it has weights. So each call of a trace comes after this.

        Args:
            trace: The concrete function.
        """
        facts = self.connected, self.rows, self.updated, self.adders, self.counts_by_data
        facts = self._of.setdefault(trace, facts)
        self.connected, self.rows, self.updated, self.adders, self.counts_by_data = facts

    def note_counts(self, terms: Iterable[SharedLoss | CountedLoss]) -> None:
        """Notes whether what losses count depends on the data."""
        self.counts_by_data = any(term.counts_by_data for term in terms)
