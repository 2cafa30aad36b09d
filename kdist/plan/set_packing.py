"""Which of several sets to take, so that none shares a member with another, and all weigh most."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence, Set

MOST_SEARCHED = 200_000
"""Sets that are looked at in all cases together; then the heaviest that is left is taken."""
DEEPEST = 100
"""Cases inside each other, likewise. A chain of n sets has some log2(n)."""


def heaviest(weighted: Sequence[tuple[float, Collection[Hashable]]]) -> list[int]:
    """Numbers of sets without common members, of the largest weight together.

    It is the largest indeed for chains and trees of sets, and for any few. (Weighted set packing:
    Garey and Johnson 1979, SP3.)

    Args:
        weighted: Sets, each with its weight, above 0.

    Returns:
        In the order of the sets; among equals, the first.
    """
    of_member: dict[Hashable, set[int]] = {}
    for number, (_, members) in enumerate(weighted):
        for member in members:
            of_member.setdefault(member, set()).add(number)
    rivals: list[set[int]] = [set() for _ in weighted]
    for numbers in of_member.values():
        for number in numbers:
            rivals[number] |= numbers - {number}
    search = _Search([weight for weight, _ in weighted], rivals)
    return sorted(search.best(frozenset(range(len(weighted)))))


class _Search:
    """By cases: with and without the set that most others exclude; apart where they fall apart.

    Args:
        weights: Of each set.
        rivals: For each, those that have a common member with it.
    """

    def __init__(self, weights: Sequence[float], rivals: Sequence[Set[int]]) -> None:
        self._weights, self._rivals = weights, rivals
        self._known: dict[frozenset[int], frozenset[int]] = {}
        self._searched = 0

    def best(self, numbers: frozenset[int], depth: int = 0) -> frozenset[int]:
        """The sets to take of some; `depth` counts the cases around."""
        found: frozenset[int] = frozenset()
        for component in self._components(numbers):
            found |= self._of_component(component, depth)
        return found

    def _of_component(self, numbers: frozenset[int], depth: int) -> frozenset[int]:
        if numbers in self._known:
            return self._known[numbers]
        self._searched += len(numbers)
        if self._searched > MOST_SEARCHED or depth > DEEPEST:
            return self._one_by_one(numbers)
        order = sorted(numbers)
        middle = len(order) // 2
        # The middle one of a chain, so that its two ends are looked at apart.
        number = max(order, key=lambda n: (len(self._rivals[n] & numbers), -abs(n - order[middle])))
        found = self.best(numbers - self._rivals[number] - {number}, depth + 1) | {number}
        if self._rivals[number] & numbers:
            without = self.best(numbers - {number}, depth + 1)
            found = max(found, without, key=self._key)
        self._known[numbers] = found
        return found

    def _one_by_one(self, numbers: frozenset[int]) -> frozenset[int]:
        found: set[int] = set()
        for number in sorted(numbers, key=lambda n: (-self._weights[n], n)):
            if not self._rivals[number] & found:
                found.add(number)
        return frozenset(found)

    def _key(self, numbers: frozenset[int]) -> tuple[float, list[int]]:
        """The weight; among equals, the first sets."""
        order = sorted(numbers)
        return float(f"{sum(self._weights[n] for n in order):.9g}"), [-n for n in order]

    def _components(self, numbers: frozenset[int]) -> Iterator[frozenset[int]]:
        left = set(numbers)
        while left:
            reached, waiting = set(), [min(left)]
            while waiting:
                number = waiting.pop()
                if number in left:
                    left.remove(number)
                    reached.add(number)
                    waiting += self._rivals[number] & left
            yield frozenset(reached)
