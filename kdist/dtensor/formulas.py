"""How a number follows from sizes, found from what it is in a few examples."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

Numbers = tuple[int, ...]
"""What a number is in each example."""


@dataclasses.dataclass(frozen=True)
class Formula:
    """A number: `scale` x product of `sizes` // `parts` + `offset`.

    Attributes:
        sizes: Each of them, in each example.
        scale: A factor.
        parts: What divides the product; nothing remains in any example.
        offset: What is added.
    """

    sizes: tuple[Numbers, ...]
    scale: int = 1
    parts: int = 1
    offset: int = 0


def find(numbers: Numbers, sizes: Sequence[Numbers]) -> Formula | None:
    """The simplest formula that gives a number in every example.

    Args:
        numbers: The number.
        sizes: Sizes that it may follow from, the preferred ones first.

    >>> find((24, 40), [(3, 5), (4, 4)])
    Formula(sizes=((3, 5),), scale=8, parts=1, offset=0)
    """
    return next(_found(numbers, sizes), None)


def _found(numbers: Numbers, sizes: Sequence[Numbers]) -> Iterator[Formula]:
    if numbers in sizes:
        yield Formula((numbers,))
    for count in (1, 2):
        for chosen in itertools.combinations_with_replacement(sizes, count):
            yield from _multiple(numbers, chosen)
    for size in sizes:
        yield from _shifted(numbers, size)
    for chosen in itertools.combinations_with_replacement(sizes, 3):
        yield from _multiple(numbers, chosen)


def _multiple(numbers: Numbers, chosen: tuple[Numbers, ...]) -> Iterator[Formula]:
    """A product of sizes times a factor, or in equal parts."""
    products = [math.prod(one) for one in zip(*chosen, strict=True)]
    if 0 in numbers or 0 in products:
        return
    scale, parts = numbers[0], products[0]
    shared = math.gcd(scale, parts)
    scale, parts = scale // shared, parts // shared
    if 1 in (scale, parts) and all(n * parts == p * scale for n, p in zip(numbers, products)):
        yield Formula(chosen, scale, parts)


def _shifted(numbers: Numbers, size: Numbers) -> Iterator[Formula]:
    """A multiple of a size, and something added."""
    i = next(i for i, one in enumerate(size) if one != size[0])
    scale, rest = divmod(numbers[i] - numbers[0], size[i] - size[0])
    offset = numbers[0] - scale * size[0]
    if not rest and all(scale * s + offset == n for s, n in zip(size, numbers, strict=True)):
        yield Formula((size,), scale, 1, offset)
