"""Gathers of which each device takes the part that it gave.

Where gradients are made whole before they are cut like their parameters, so that no cut moves from
one dim to another (`gather_first` in `kdist.dtensor.call`), most of them were cut so before. And a
re-layout may follow the one that it undoes. Nothing has to travel there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.dtensor.rewiring import Rewiring
from kdist.graphs.chunks import node_of

import numpy as np

_GATHER = "CollectiveGatherV2"


def undo_gathers(rewiring: Rewiring) -> bool:
    """Has what takes a device's own part of a gather take what the device gave.

    Args:
        rewiring: Of the program, after gathers are along the dim that is cut.

    Returns:
        Whether there was any. The rewiring does not know then what takes what.
    """
    found = [
        _undo(rewiring, name, begins)
        for name in rewiring.program.live
        if (begins := _begins(rewiring, name)) is not None
    ]
    return any(found)


def _begins(rewiring: Rewiring, name: str) -> Sequence[Sequence[int]] | None:
    """Where each device's part begins, if a node is a gather; None of anything else."""
    program, node = rewiring.program, rewiring.nodes[name]
    if name in program.begins:
        return program.begins[name]
    if node.op != _GATHER:
        return None
    shape = program.shape(rewiring.now(program.source(node)))
    if not shape.rank or shape[0] is None:
        return None
    found = [[0] * shape.rank for _ in range(program.program.size)]
    for members in program.groups(node):
        for place, k in enumerate(members):
            found[k][0] = shape[0] * place
    return found


def _undo(rewiring: Rewiring, name: str, begins: Sequence[Sequence[int]]) -> bool:
    source = rewiring.now(rewiring.program.source(rewiring.nodes[name]))
    users = rewiring.users.get(name, [])
    undone = [one for one in users if _takes_own(rewiring, one, source, begins)]
    for one in undone:
        rewiring.rename(f"{one}:output:0", source)
    if undone and len(undone) == len(users):
        rewiring.gone(name)
    return bool(undone)


def _takes_own(rewiring: Rewiring, name: str, source: str, begins: Sequence[Sequence[int]]) -> bool:
    """Whether a node is a slice that takes on each device what it gave."""
    program = rewiring.program
    part: Any = rewiring.nodes.get(name)
    if part is None or part.op != "Slice":
        return False
    taken = program.values.get(node_of(part.input[1]))
    given, size = program.shape(source), program.shape(f"{name}:output:0")
    if taken is None or given.rank is None or given.as_list() != size.as_list():
        return False
    return all(
        np.array_equal(np.ravel(one), begin) for one, begin in zip(taken, begins, strict=True)
    )
