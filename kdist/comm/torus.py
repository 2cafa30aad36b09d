"""All-reduce over a torus of two dims: along rows, along columns, along rows again; pure.

The p ranks lie in b rows of a: rank i·a + j is the j-th of row i. Rows reduce-scatter, so that each
column has one a-th of every row's sum; columns all-reduce that; rows all-gather. Where a row is a
process, what leaves it is an a-th of the value per device, and there are 2(b - 1) rounds of that
instead of 2(p - 1). (Mikami et al., arXiv:1811.05233; Jouppi et al., ISCA 2023, for its machines.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from kdist.comm.messages import Message, Rounds

TORUS = "torus"
_SIDES = re.compile(r"torus:(\d+)x(\d+)")


def is_torus(algorithm: str) -> bool:
    """Whether an algorithm is `"torus"`, or names its sides: `"torus:4x2"` is 2 rows of 4."""
    return isinstance(algorithm, str) and algorithm.partition(":")[0] == TORUS


def sides(algorithm: str, size: int) -> tuple[int, int]:
    """Length of a row, and number of rows.

    Args:
        algorithm: `"torus"`: as near to a square as the size allows; `"torus:AxB"`: as it says.
        size: Number of devices.

    Raises:
        ValueError: For sides that are not those of a torus of this size.
    """
    if algorithm == TORUS:
        a = next(a for a in range(math.isqrt(size), 0, -1) if size % a == 0)
        return size // a, a
    found = _SIDES.fullmatch(algorithm)
    if found is None or math.prod(map(int, found.groups())) != size:
        raise ValueError(
            "A torus has B rows of A devices, written 'torus:AxB', and A times B is the number of "
            f"devices. Use 'torus' for the sides nearest to a square. Received: "
            f"algorithm={algorithm!r}, size={size}"
        )
    return int(found[1]), int(found[2])


def of_processes(processes: Sequence[Any]) -> str:
    """The torus whose rows are processes.

    Args:
        processes: The process of each rank.

    Raises:
        ValueError: If the ranks of each process are not as many, or not next to each other.
    """
    a, distinct = processes.count(processes[0]), list(dict.fromkeys(processes))
    if list(processes) != [one for one in distinct for _ in range(a)]:
        counts = [processes.count(one) for one in distinct]
        raise ValueError(
            "The rows of a torus are processes: each has as many ranks, next to each other. Make a "
            "mesh in which the axis goes through process after process, or name the sides, as in "
            f"'torus:AxB', or use another algorithm. Received: ranks per process {counts}"
        )
    return f"{TORUS}:{a}x{len(distinct)}"


def rounds(scatter: Rounds, across: Rounds, gather: Rounds, a: int, b: int) -> Rounds:
    """Puts the messages of rows and columns together.

    Args:
        scatter: Reduce-scatter among a ranks.
        across: All-reduce among b ranks, of b pieces.
        gather: All-gather among a ranks.
        a: Length of a row.
        b: Number of rows.

    Returns:
        Messages among a·b ranks, of a·b pieces: b for the first of a row, b for the second, ...
    """

    def along_rows(given: Rounds) -> Rounds:
        return tuple(
            tuple(
                Message(
                    i * a + m.source,
                    i * a + m.target,
                    tuple(c * b + k for c in m.chunks for k in range(b)),
                    m.combine,
                )
                for i in range(b)
                for m in messages
            )
            for messages in given
        )

    columns = tuple(
        tuple(
            Message(
                m.source * a + j, m.target * a + j, tuple(j * b + c for c in m.chunks), m.combine
            )
            for j in range(a)
            for m in messages
        )
        for messages in across
    )
    return along_rows(scatter) + columns + along_rows(gather)
