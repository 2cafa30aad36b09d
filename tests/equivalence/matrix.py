"""Meshes, and a way to write a matrix of which a spread runs by default."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

MESHES: Mapping[str, Mapping[str, int]] = {
    "data2": {"data": 2},
    "data4": {"data": 4},
    "data8": {"data": 8},
    "model2": {"model": 2},
    "model4": {"model": 4},
    "data2_model2": {"data": 2, "model": 2},
    "data2_model4": {"data": 2, "model": 4},
}

LEVELS = ("level0", "level1", "level2", "level3", "no_overlap")


def level_config(level: str) -> dict[str, Any]:
    """Options of `kdist.ParallelConfig`: optimizer parallelism of every parameter, or no overlap.

    Args:
        level: One of `LEVELS`.
    """
    import kdist

    if level == "no_overlap":
        return {"fusion": kdist.FusionConfig(overlap=False)}
    if level == "level0":
        return {}
    # Every parameter, however small: these models have no big ones.
    return {"optimizer": kdist.OptimizerConfig(level=int(level[-1]), threshold_kb=0)}


def spread(
    rows: Iterable[Sequence[Any]], default: Sequence[Sequence[Any]], quick: int = 2
) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`, in three tiers.

    Args:
        rows: All of them.
        default: Those that continuous integration runs; the others are marked long.
        quick: How many of these, from the front, everybody runs; the others are marked wide.

    Raises:
        ValueError: If a default row is not in the matrix (a renamed row must not vanish).
    """
    rows = [tuple(row) for row in rows]
    chosen = {tuple(row): n for n, row in enumerate(default)}
    if not set(chosen) <= set(rows):
        raise ValueError(
            f"default rows must be rows of the matrix. Received: {sorted(set(chosen) - set(rows))}"
        )
    found = []
    for row in rows:
        number = chosen.get(row)
        marks: tuple[Any, ...] = (pytest.mark.long,)
        if number is not None:
            marks = () if number < quick else (pytest.mark.wide,)
        found.append(pytest.param(*row, id="-".join(map(str, row)), marks=marks))
    return found


def product(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every combination."""
    return list(itertools.product(*factors))
