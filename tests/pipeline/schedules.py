"""What the tests of schedules share."""

from __future__ import annotations

from fractions import Fraction

from kdist.pipeline import NAMES, Schedule, get_schedule
from kdist.pipeline.instructions import KINDS

from hypothesis import strategies as st

SHAPES = [
    (name, p, m, v)
    for name, chunks in (
        ("gpipe", [1]),
        ("1f1b", [1]),
        ("interleaved", [2, 3]),
        ("zero_bubble", [1]),
    )
    for p in (1, 2, 3, 4, 7)
    for m in (1, 2, 3, 4, 5, 8, 13)
    for v in chunks
]
"""(name, stages, micro-batches, chunks), m above, below and not divisible by p among them."""


def build(name: str, p: int, m: int, v: int = 1) -> Schedule:
    return get_schedule(name, stages=p, micro_batches=m, chunks=v)


@st.composite
def named(draw: st.DrawFn) -> Schedule:
    """Any schedule that has a name."""
    name = draw(st.sampled_from(NAMES))
    v = draw(st.integers(2, 4)) if name == "interleaved" else 1
    return build(name, draw(st.integers(1, 6)), draw(st.integers(1, 12)), v)


def fractions(least: int = 0) -> st.SearchStrategy[Fraction]:
    return st.fractions(least, 9, max_denominator=6)


def schedule_of(*rows: str, name: str = "mine") -> Schedule:
    """A schedule from rows such as "0F0 0B0"."""
    stages = []
    for row in rows:
        stages.append([])
        for cell in row.split():
            letter = next(c for c in cell if c in KINDS)
            virtual, batch = map(int, cell.split(letter))
            chunk, stage = divmod(virtual, len(rows))
            stages[-1].append(KINDS[letter](stage, batch, chunk))
    return Schedule(name=name, stages=stages)
