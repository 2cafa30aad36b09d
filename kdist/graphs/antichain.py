"""The heaviest set of things of which none comes after another: an antichain of greatest weight.

By Dilworth's theorem with weights it is the total weight less a maximum flow between the two copies
of each element, and the minimum cut says which elements it has. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np


def heaviest_antichain(weights: Sequence[int], after: np.ndarray) -> list[int]:
    """Elements of an antichain of greatest total weight.

    Args:
        weights: Of each element, 0 or more.
        after: Of bool; in row i and column j, whether element j comes after element i. A strict
            order, with all that follows from it (transitively closed).

    Returns:
        Their positions, in order.

    Example:
        >>> after = np.array([[0, 1, 1], [0, 0, 0], [0, 0, 0]], bool)  # 0 comes before 1 and 2
        >>> heaviest_antichain([1, 2, 4], after)
        [1, 2]
    """
    live = [i for i, weight in enumerate(weights) if weight > 0]
    order = after[np.ix_(live, live)]
    groups = _alike(order)
    heads = [members[0] for members in groups]
    later = [np.flatnonzero(row).tolist() for row in order[np.ix_(heads, heads)]]
    total = [sum(weights[live[i]] for i in members) for members in groups]
    return sorted(live[i] for k in _uncovered(total, later) for i in groups[k])


def _alike(order: np.ndarray) -> list[list[int]]:
    """Elements that compare alike to all others together."""
    rows, columns = np.packbits(order, axis=1), np.packbits(order.T, axis=1)
    groups: dict[tuple[bytes, bytes], list[int]] = {}
    for i in range(len(order)):
        groups.setdefault((rows[i].tobytes(), columns[i].tobytes()), []).append(i)
    return list(groups.values())


def _uncovered(weights: Sequence[int], later: Sequence[Sequence[int]]) -> list[int]:
    """What a lightest cover of all comparable pairs leaves: the antichain."""
    flow = _Flow(weights, later)
    while flow.level():
        while flow.push():
            pass
    return [i for i in range(len(weights)) if flow.lefts[i] >= 0 and flow.rights[i] < 0]


class _Flow:
    """Maximum flow between left and right copies of elements (Dinic 1970).

    Attributes:
        lefts: Level of each left copy after the last search from the source; -1: not reached.
        rights: The same of right copies.
    """

    def __init__(self, weights: Sequence[int], later: Sequence[Sequence[int]]) -> None:
        self.supply = list(weights)
        self.demand = list(weights)
        self.later = later
        self.sent: list[dict[int, int]] = [{} for _ in weights]
        """`sent[j][i]`: flow from left i to right j."""
        self.lefts: list[int] = []
        self.rights: list[int] = []

    def level(self) -> bool:
        """Searches in breadth; whether a right copy with demand was reached."""
        count = len(self.supply)
        self.lefts = [0 if s else -1 for s in self.supply]
        self.rights = [-1] * count
        waiting = deque(i for i in range(count) if self.supply[i])
        found = False
        while waiting:
            i = waiting.popleft()
            for j in self.later[i]:
                if self.rights[j] >= 0:
                    continue
                self.rights[j] = self.lefts[i] + 1
                found = found or self.demand[j] > 0
                for back, amount in self.sent[j].items():
                    if amount and self.lefts[back] < 0:
                        self.lefts[back] = self.rights[j] + 1
                        waiting.append(back)
        self._start = 0
        self._next = [0] * count
        self._back = [list(self.sent[j]) for j in range(count)]
        return found

    def push(self) -> bool:
        """Sends flow along one path of rising levels; False if there is none."""
        # A left copy that no path begins at has none until the next search.
        for i in range(self._start, len(self.supply)):
            self._start = i
            path = self._path(i) if self.supply[i] else []
            if path:
                self._send(i, path)
                return True
        return False

    def _path(self, start: int) -> list[tuple[int, int]]:
        """(left, right) pairs to a right copy with demand, found in depth; empty if there is none.

        From a right copy the path goes on to a left one whose flow it takes back.
        """
        path: list[tuple[int, int]] = []
        i = start
        while True:
            if self._next[i] < len(self.later[i]):
                j = self.later[i][self._next[i]]
                if self.rights[j] == self.lefts[i] + 1:
                    if self.demand[j]:
                        return [*path, (i, j)]
                    back = self._back[j]
                    while back and not (
                        self.sent[j].get(back[-1], 0) and self.lefts[back[-1]] == self.rights[j] + 1
                    ):
                        back.pop()
                    if back:
                        path.append((i, j))
                        i = back[-1]
                        continue
                self._next[i] += 1
            elif path:
                i, j = path.pop()
                self._back[j].pop()
            else:
                return []

    def _send(self, start: int, path: list[tuple[int, int]]) -> None:
        taken = [(j, following[0]) for (_, j), following in zip(path, path[1:])]
        amount = min(self.supply[start], self.demand[path[-1][1]])
        amount = min([amount, *(self.sent[j][back] for j, back in taken)])
        self.supply[start] -= amount
        self.demand[path[-1][1]] -= amount
        for i, j in path:
            self.sent[j][i] = self.sent[j].get(i, 0) + amount
        for j, back in taken:
            self.sent[j][back] -= amount
