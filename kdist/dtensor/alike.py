"""Which tensors of a program are the same on devices that take part in a collective together.

Read from what they are made of. A tensor that cannot be told is taken for one that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdist._compat import dtensor_internals
from kdist.dtensor.collectives import COLLECTIVES
from kdist.graphs.chunks import node_of

import numpy as np

if TYPE_CHECKING:
    from kdist.dtensor.rewiring import Rewiring
    from kdist.dtensor.stitching import Stitcher

Groups = Sequence[Sequence[int]]
_MADE_WHOLE = frozenset({"CollectiveGatherV2", "CollectiveReduceV2"})


def are_alike(rewiring: Rewiring, reference: str, groups: Groups) -> bool:
    """Whether the members of each group have the same value of a tensor.

    Args:
        rewiring: Of the program.
        reference: The tensor.
        groups: Of devices, by their numbers.
    """
    seen: set[str] = set()
    waiting = [reference]
    while waiting:
        name = node_of(rewiring.now(waiting.pop()))
        if name in seen:
            continue
        seen.add(name)
        sources = _sources(rewiring, name, groups)
        if sources is None:
            return False
        waiting += sources
    return True


def _sources(rewiring: Rewiring, name: str, groups: Groups) -> Sequence[str] | None:
    """What has to be the same for a node's results to be; None if they may differ then, too."""
    program = rewiring.program
    if name in program.inputs:
        return None if _is_cut(program, name, groups) else ()
    if name in program.folded:
        values = program.values[name]
        same = all(np.array_equal(values[k], values[one[0]]) for one in groups for k in one)
        return () if same else None
    node = rewiring.nodes[name]
    if node.op in COLLECTIVES:
        joined = list(map(set, program.groups(node)))
        if node.op not in _MADE_WHOLE:
            return None
        whole = all(any(other.issuperset(one) for other in joined) for one in groups)
        return () if whole else [program.source(node)]
    return None if dtensor_internals.has_effects(node.op) else program.inputs_of(node)


def _is_cut(program: Stitcher, name: str, groups: Groups) -> bool:
    """Whether members of a group have different parts of an input, or it is their number."""
    one = program.program.arguments[program.inputs[name]]
    if one.position is None:
        return True
    axes = program.program.axes
    cut = () if one.layout is None else one.layout.sharding_specs
    places = [np.unravel_index(members, tuple(axes.values())) for members in groups]
    return any(np.ptp(place[list(axes).index(a)]) for a in cut if a in axes for place in places)
