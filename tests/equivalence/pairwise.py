"""A small pairwise (all-pairs) covering generator.

Every pair of values of two factors that some allowed row can hold appears in at least one row. The
greedy idea is that of AETG (Cohen, Dalal, Fredman and Patton, 1997): build one row at a time around
an uncovered pair, giving every other factor the value that covers the most uncovered pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """The pairs of (factor, value) that a (possibly partial) row holds."""
    return set(itertools.combinations(row.items(), 2))


def _complete(
    partial: Row,
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    wanted: set[Pair],
) -> Row | None:
    """Extends `partial` to an allowed row, most uncovered pairs first; None when impossible."""
    missing = [name for name in factors if name not in partial]
    if not missing:
        return {name: partial[name] for name in factors}
    name = missing[0]

    def gain(value: Any) -> int:
        row = {**partial, name: value}
        ordered = {n: row[n] for n in factors if n in row}
        return len(pairs_of(ordered) & wanted)

    for value in sorted(factors[name], key=gain, reverse=True):
        row = {**partial, name: value}
        if allowed(row):
            done = _complete(row, factors, allowed, wanted)
            if done is not None:
                return done
    return None


def cover(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Rows that cover every feasible pair of values of two factors.

    Args:
        factors: Factor name -> its values (hashable).
        allowed: Whether a row is legal. It is asked about partial rows too, and must judge only
            the factors present.

    Returns:
        A list of rows, each a dict with every factor. Deterministic.

    Example:
        >>> rows = cover({"a": (0, 1), "b": (0, 1), "c": (0, 1)})
        >>> len(rows) < 8
        True
    """
    wanted = set(_ordered_pairs(factors))
    rows: list[Row] = []
    for pair in _ordered_pairs(factors):
        if pair not in wanted:
            continue
        partial = dict(pair)
        row = _complete(partial, factors, allowed, wanted) if allowed(partial) else None
        if row is None:
            wanted.discard(pair)
            continue
        rows.append(row)
        wanted -= pairs_of(row)
    return rows


def spanning(
    rows: Sequence[Row], cost: Callable[[Row], float], held: Sequence[Row] = ()
) -> list[Row]:
    """A cheap choice of rows in which every value of every factor appears at least once.

    Greedy weighted set cover (Chvatal, 1979): again and again the row with the most new values for
    its cost; then rows that others made superfluous are dropped, dear ones first.

    Args:
        rows: Rows of `cover`.
        cost: Relative cost of a row, positive.
        held: Further rows that are chosen anyway.

    Returns:
        Some of the rows, in their order. Deterministic.
    """
    given = {item for row in held for item in row.items()}
    missing = {item for row in rows for item in row.items()} - given
    chosen: list[int] = []
    while missing:
        best = max(
            range(len(rows)), key=lambda i: len(missing & set(rows[i].items())) / cost(rows[i])
        )
        chosen.append(best)
        missing -= set(rows[best].items())
    for i in sorted(chosen, key=lambda i: -cost(rows[i])):
        others = {item for j in chosen if j != i for item in rows[j].items()}
        if set(rows[i].items()) <= others | given:
            chosen.remove(i)
    return [rows[i] for i in sorted(chosen)]


def _ordered_pairs(factors: Mapping[str, Sequence[Any]]) -> list[Pair]:
    pairs: list[Pair] = []
    for (name_a, values_a), (name_b, values_b) in itertools.combinations(factors.items(), 2):
        pairs.extend(((name_a, a), (name_b, b)) for a in values_a for b in values_b)
    return pairs
