"""The search behind `kdist.plan.deal`, over arrays: all changes of a deal are judged at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Asks:
    """What each of several choices asks of the devices and of the host.

    Attributes:
        held: Bytes held, (choices, devices).
        read: Bytes read in a step, (choices, devices).
        host: What the host reads in a step, as much as devices would in that time, (choices,).
    """

    held: Any
    read: Any
    host: Any

    @classmethod
    def nothing(cls, choices: int, devices: int) -> Asks:
        """Zeros."""
        return cls(np.zeros((choices, devices)), np.zeros((choices, devices)), np.zeros(choices))

    @classmethod
    def joined(cls, parts: Sequence[Asks]) -> Asks:
        """The choices of all parts, in order."""
        held, read, host = zip(*((one.held, one.read, one.host) for one in parts))
        return cls(np.concatenate(held), np.concatenate(read), np.concatenate(host))

    def of(self, choices: Any) -> Asks:
        """Some of the choices, by their positions."""
        return Asks(self.held[choices], self.read[choices], self.host[choices])

    def sum(self) -> Asks:
        """All of them together, as one choice."""
        sums = (one.sum(0, keepdims=True) for one in (self.held, self.read, self.host))
        return Asks(*sums)

    def __add__(self, other: Asks) -> Asks:
        return Asks(self.held + other.held, self.read + other.read, self.host + other.host)

    def __sub__(self, other: Asks) -> Asks:
        return Asks(self.held - other.held, self.read - other.read, self.host - other.host)


class Search:
    """Looks for the choice of each table that leaves the fullest device least to do.

    Less is better: what does not fit, then the largest load, then how uneven loads are. A load of
    1 is an even share of the bytes and of the traffic of all tables.

    Args:
        options: Of each table, where it may go. The first is one device, whole.
        asks: Of each table, what these ask.
        capacity: Bytes that a device may hold; None for any number.
    """

    def __init__(
        self,
        options: Sequence[Sequence[Hashable]],
        asks: Sequence[Asks],
        capacity: int | None,
    ) -> None:
        self._capacity = capacity
        self._where = [{one: o for o, one in enumerate(given)} for given in options]
        self._options = options
        self._devices = asks[0].held.shape[1] if asks else 1
        sizes = [len(given) for given in options]
        self._first = np.cumsum([0, *sizes])
        # Behind all, a choice of nothing.
        self._asks = Asks.joined([*asks, Asks.nothing(1, self._devices)])
        whole = self._asks.of(self._first[:-1]).sum()
        self._bytes, self._traffic = max(1.0, whole.held.sum()), max(1.0, whole.read.sum())

    def greedy(self) -> list[int]:
        """The largest first, each where it does least harm."""
        whole = self._asks.of(self._first[:-1])
        sizes = whole.held.sum(1) + whole.read.sum(1)
        found = [0] * len(self._options)
        total = Asks.nothing(1, self._devices)
        for i in np.argsort(-sizes, kind="stable"):
            given = self._asks.of(slice(self._first[i], self._first[i + 1])) + total
            found[i] = self._least(given)
            total = given.of([found[i]])
        return found

    def improved(self, choices: list[int]) -> tuple[tuple[float, ...], list[int]]:
        """A deal after changes of one table, or of two at once, as long as they help.

        Args:
            choices: Of each table, the position of its choice.

        Returns:
            How good it is, less being better, and the choices.
        """
        while True:
            total = self._asks.of(self._first[:-1] + np.array(choices, np.int64)).sum()
            rank = self._ranks(total)[0]
            changes = self._changes(choices)
            if not len(changes):
                return tuple(rank), choices
            found = total
            for came, went in (changes[:, :2].T, changes[:, 2:].T):
                found = found + self._asks.of(came) - self._asks.of(went)
            k = self._least(found)
            if tuple(self._ranks(found)[k]) >= tuple(rank):
                return tuple(rank), choices
            choices = list(choices)
            for came in (changes[k, 0], changes[k, 2]):
                i = int(np.searchsorted(self._first, came, "right")) - 1
                if i < len(choices):
                    choices[i] = int(came - self._first[i])

    def _changes(self, choices: Sequence[int]) -> Any:
        """What may change: positions of what comes and goes for a table, and for another one."""
        first, nothing = self._first, self._first[-1]
        now = [first[i] + o for i, o in enumerate(choices)]
        found = [
            (first[i] + o, now[i], nothing, nothing)
            for i, given in enumerate(self._options)
            for o in range(len(given))
            if o != choices[i]
        ]
        what = [given[o] for given, o in zip(self._options, choices, strict=True)]
        for i, j in itertools.combinations(range(len(choices)), 2):
            if what[i] != what[j] and what[j] in self._where[i] and what[i] in self._where[j]:
                one, other = self._where[i][what[j]], self._where[j][what[i]]
                found.append((first[i] + one, now[i], first[j] + other, now[j]))
        return np.array(found, np.int64).reshape(-1, 4)

    def _ranks(self, asks: Asks) -> Any:
        """What does not fit, the largest load, and how uneven loads are, of each choice."""
        share = self._devices / 2
        loads = share * (asks.held / self._bytes + asks.read / self._traffic)
        loads = np.concatenate([loads, share * asks.host[:, None] / self._traffic], 1)
        over = np.zeros(len(loads))
        if self._capacity is not None:
            over = np.maximum(0.0, asks.held - self._capacity).sum(1)
        # Rounded, so that the search does not follow differences that are rounding.
        return np.round(np.stack([over, loads.max(1), (loads * loads).sum(1)], 1), 9)

    def _least(self, asks: Asks) -> int:
        """The first of the best."""
        over, cost, uneven = self._ranks(asks).T
        return int(np.lexsort((uneven, cost, over))[0])
