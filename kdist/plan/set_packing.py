"""Which of several sets to take, so that none shares a member with another, and all weigh most."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence, Set

MOST_SEARCHED = 20_000
"""Collections of sets that are looked at; then the heaviest that is left is taken each time."""


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

    def best(self, numbers: frozenset[int]) -> frozenset[int]:
        """The sets to take of some."""
        found: frozenset[int] = frozenset()
        for component in self._components(numbers):
            found |= self._of_component(component)
        return found

    def _of_component(self, numbers: frozenset[int]) -> frozenset[int]:
        if numbers in self._known:
            return self._known[numbers]
        if len(self._known) >= MOST_SEARCHED:
            number = max(numbers, key=lambda n: (self._weights[n], -n))
            return self.best(numbers - self._rivals[number] - {number}) | {number}
        order = sorted(numbers)
        middle = len(order) // 2
        # The middle one of a chain, so that its two ends are looked at apart.
        number = max(order, key=lambda n: (len(self._rivals[n] & numbers), -abs(n - order[middle])))
        found = self.best(numbers - self._rivals[number] - {number}) | {number}
        if self._rivals[number] & numbers:
            without = self.best(numbers - {number})
            found = max(found, without, key=self._key)
        self._known[numbers] = found
        return found

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
