"""Families of shapes of a batch: which dims change together, and examples of their sizes. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence

from kdist.dtensor.sizes import Multiples

import numpy as np

Shape = tuple[int, ...]
BatchShape = tuple[Shape, ...]
"""The shape of each tensor of a batch."""
Place = tuple[int, int]
"""A tensor of a batch, and a dim of it."""


WHATEVER = Multiples()


@dataclasses.dataclass(frozen=True)
class Changing:
    """Dims that change, always alike.

    Attributes:
        places: Of the dims.
        base: A size that they had.
        step: What other sizes differ by is a multiple of this.
    """

    places: tuple[Place, ...]
    base: int
    step: int = 1

    @property
    def is_rows(self) -> bool:
        """Whether they are the batch."""
        return self.places[0][1] == 0


@dataclasses.dataclass(frozen=True)
class Family:
    """Shapes of a batch that one program may serve.

    Attributes:
        first: One of them.
        changing: The dims that change.
        multiples: What sizes that change are multiples of.
        parts: Into how many the rows are cut before.
        examples: The sizes of each of `changing` in each example.
        bounded: Whether other sizes must lie between those of the examples.
    """

    first: BatchShape
    changing: tuple[Changing, ...]
    multiples: Multiples
    parts: int
    examples: tuple[tuple[int, ...], ...]
    bounded: bool = False

    def has(self, shapes: BatchShape) -> bool:
        """Whether a batch of such shapes is served."""
        sizes = [shapes[c.places[0][0]][c.places[0][1]] for c in self.changing]
        if self._with(sizes) != shapes:
            return False
        if self.bounded and not all(
            c.is_rows or min(tried) <= size <= max(tried)
            for c, size, tried in zip(self.changing, sizes, self.examples, strict=True)
        ):
            return False
        return fits(shapes, self.changing, self.multiples, self.parts)

    @property
    def fits_all(self) -> bool:
        """Whether sizes that change may be any."""
        each = all(one.step == 1 for one in self.changing) and self.multiples == WHATEVER
        return each and not self.bounded

    @property
    def but_for_rows(self) -> Family:
        """The same, if rows came in multiples only."""
        multiples = dataclasses.replace(self.multiples, rows=1)
        return dataclasses.replace(self, multiples=multiples)

    @property
    def general(self) -> tuple[tuple[int | None, ...], ...]:
        """The shapes, with None for dims that change."""
        return self._with([None] * len(self.changing))

    def tried(self, tensor: int) -> tuple[Shape, ...]:
        """The shape of a tensor in each example."""
        return tuple(self._with(sizes)[tensor] for sizes in zip(*self.examples, strict=True))

    def far(self, tensor: int) -> tuple[Shape, ...]:
        """The shape of a tensor at sizes far from the examples'."""
        far = [
            [2 * each, *(max(one) * n + n // 2 * each for n in (2, 5, 32))]
            for one, each in zip(self.examples, each_of(self.changing, self.multiples), strict=True)
        ]
        return tuple(self._with(sizes)[tensor] for sizes in zip(*far, strict=True))

    def _with(self, sizes: Sequence[int | None]) -> tuple[tuple, ...]:
        shapes: list[list[int | None]] = [list(shape) for shape in self.first]
        for changing, size in zip(self.changing, sizes, strict=True):
            for tensor, dim in changing.places:
                shapes[tensor][dim] = size
        return tuple(map(tuple, shapes))


def each_of(changing: Sequence[Changing], multiples: Multiples) -> list[int]:
    """What the sizes of dims that change are multiples of."""
    return [multiples.of(one.is_rows) for one in changing]


def fits(
    shapes: BatchShape, changing: Sequence[Changing], multiples: Multiples, parts: int
) -> bool:
    """Whether sizes that change are such as a family's; see `Family`."""
    for one, each in zip(changing, each_of(changing, multiples), strict=True):
        tensor, dim = one.places[0]
        size = shapes[tensor][dim]
        each = each * parts if one.is_rows and each > 1 else each
        if size < 1 or size % each or (size - one.base) % one.step:
            return False
    return True


def changing_dims(seen: Sequence[BatchShape]) -> list[Changing]:
    """The dims that differ between shapes of a batch, those together that are always alike."""
    groups: dict[tuple, list[Place]] = {}
    for tensor, shape in enumerate(seen[0]):
        for dim in range(len(shape)):
            sizes = tuple(one[tensor][dim] for one in seen)
            if len(set(sizes)) > 1:
                groups.setdefault((sizes, dim == 0), []).append((tensor, dim))
    return [Changing(tuple(places), sizes[-1]) for (sizes, _), places in groups.items()]


def families(
    seen: Sequence[BatchShape], multiples: Multiples = WHATEVER, parts: int = 1
) -> Iterator[Family]:
    """Families that the shapes of the batches so far may be of, the most general one first.

    What differs is the examples: a model may take no sizes but some, and small ones may be special
    cases. First those in the upper half between the sizes seen, then in all of it, then larger
    ones, then none but what was seen and lies as far apart.

    Args:
        seen: The shapes so far, the last one included in all families.
        multiples: See `Family`.
        parts: See `Family`.
    """
    changing = changing_dims(seen)
    if not changing or not fits(seen[-1], changing, multiples, parts):
        return
    count = len(changing) + 3
    sizes = [
        sorted({one[c.places[0][0]][c.places[0][1]] for one in seen} - {0, 1}) or [2]
        for c in changing
    ]
    each = each_of(changing, multiples)
    ranges = [(one[0], one[-1], n) for one, n in zip(sizes, each, strict=True)]
    upper = [_between((low + high) // 2, high, n, count) for low, high, n in ranges]
    between = [_between(low, high, n, count) for low, high, n in ranges]
    above = [_above(high, n, count) for _, high, n in ranges]
    for chosen in (upper, between, above):
        yield _family(seen[-1], changing, multiples, parts, chosen)
    steps = [math.gcd(*(size - one[-1] for size in one)) for one in sizes]
    if all(step == 1 for step in steps) or 0 in steps:
        return
    apart = [dataclasses.replace(c, step=step) for c, step in zip(changing, steps, strict=True)]
    if fits(seen[-1], apart, multiples, parts):
        far = [
            [one[-1] + math.lcm(step, n) * i for i in range(count)]
            for one, step, n in zip(sizes, steps, each, strict=True)
        ]
        yield _family(seen[-1], apart, multiples, parts, far)


def _family(
    first: BatchShape,
    changing: Sequence[Changing],
    multiples: Multiples,
    parts: int,
    chosen: Sequence[Sequence[int]],
) -> Family:
    return Family(first, tuple(changing), multiples, parts, _independent(chosen))


def _between(low: int, high: int, multiple: int, count: int) -> list[int]:
    """Sizes from a range, far apart, odd and even; from below, then above it, if it has too few."""
    low, high = max(2, -(-low // multiple)), max(2, high // multiple)
    inside = [*range(low, high + 1)]
    spread = [inside[len(inside) * i // count] for i in range(count)]
    wanted = [high, low, *spread, *reversed(inside), *range(low - 1, 1, -1)]
    wanted += range(high + 1, high + count + 1)
    found = [*dict.fromkeys(wanted)][:count]
    if len({size % 2 for size in found}) == 1 and len(inside) > count:
        found[-1] = next(size for size in inside if size % 2 != found[0] % 2)
    return [multiple * size for size in found]


def _above(high: int, multiple: int, count: int) -> list[int]:
    """Primes above the largest size, which are unlikely to be sizes of something else, too."""
    first = max(2, -(-high // multiple)) + 1
    primes = (n for n in itertools.count(first) if all(n % d for d in range(2, n)))
    return [multiple * size for size in itertools.islice(primes, count)]


def _independent(columns: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Orders sizes so that none follows from the others by products with numbers and sums."""
    chance = random.Random(0)
    ordered = [list(one) for one in columns]
    for _ in range(1000):
        table = np.array([[1] * len(ordered[0]), *ordered])
        pairs = itertools.combinations(range(1, len(table)), 2)
        if all(np.linalg.matrix_rank(table[[0, a, b]]) == 3 for a, b in pairs):
            break
        for one in ordered[1:]:
            chance.shuffle(one)
    return tuple(map(tuple, ordered))
