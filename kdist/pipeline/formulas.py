"""What the papers promise of each schedule; the tests hold the simulator to these."""

from __future__ import annotations

from fractions import Fraction

from kdist.pipeline.generators import warm_up
from kdist.pipeline.known_schedules import NAMES, get_schedule
from kdist.pipeline.schedule import Schedule


def bubble_formula(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Fraction | None:
    """Share of the stages' time in which they wait, for stages of equal cost and free transfers.

    - "gpipe", "1f1b": (p - 1) / (m + p - 1)
    - "interleaved": (p - 1) / (v m + p - 1) for m >= p, else 1 - v m / (v p + m - 1)
    - "zero_bubble": (p - 1) / (3 m + p - 1), for m >= 2 p - 1 and equal costs of forward, input
      gradient and weight gradient

    Args:
        name: Of the schedule.
        stages: p.
        micro_batches: m.
        chunks: v, per stage.

    Returns:
        The share as an exact fraction, None where there is no formula.

    Example:
    ```python
    from kdist.pipeline import bubble_formula

    bubble_formula("1f1b", stages=4, micro_batches=8)  # Fraction(3, 11)
    ```
    """
    p, m, v = stages, micro_batches, chunks
    if name in ("gpipe", "1f1b"):
        return Fraction(p - 1, m + p - 1)
    if name == "interleaved":
        return 1 - Fraction(v * m, (v - 1) * max(p, m) + m + p - 1)
    if name == "zero_bubble" and m >= 2 * p - 1:
        return Fraction(p - 1, 3 * m + p - 1)
    return None


def live_formula(
    name: str, stages: int, micro_batches: int, chunks: int = 1
) -> tuple[int, ...] | None:
    """Per stage, the most forwards whose intermediates are kept at a time.

    - "gpipe": m
    - "1f1b": min(p - s, m)
    - "interleaved": min(2 (p - s - 1) + (v - 1) g + 1, v m) chunks, each a v-th of a stage; g is p
      where p divides m, and the size of the largest group of micro-batches else
    - "zero_bubble": min(p, m), what 1F1B's first stage keeps

    Args:
        name: Of the schedule.
        stages: p; s is a stage's number from 0.
        micro_batches: m.
        chunks: v, per stage.

    Returns:
        One bound per stage, None where there is no formula.

    Example:
    ```python
    from kdist.pipeline import live_formula

    assert live_formula("1f1b", stages=4, micro_batches=8) == (4, 3, 2, 1)
    ```
    """
    p, m, v = stages, micro_batches, chunks
    if name == "gpipe":
        return (m,) * p
    if name == "1f1b":
        return tuple(min(p - s, m) for s in range(p))
    if name == "interleaved":
        return tuple(min(warm_up(p, m, v, s) + 1, v * m) for s in range(p))
    if name == "zero_bubble":
        return (min(p, m),) * p
    return None


def formula_of(schedule: Schedule) -> Fraction | None:
    """The bubble formula of a schedule that `get_schedule` made by name."""
    name, p, m, v = schedule.name, schedule.num_stages, schedule.micro_batches, schedule.chunks
    if name not in NAMES or (name != "interleaved" and v > 1) or (name == "interleaved" and v < 2):
        return None
    known = get_schedule(name, stages=p, micro_batches=m, chunks=v)
    return bubble_formula(name, p, m, v) if known == schedule else None
