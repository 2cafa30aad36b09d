"""Reduce-scatters: sums of which each device needs its own part alone.

DTensor adds up a product of cut matrices on all devices, and cuts the result afterwards if its
layout says so: an all-reduce, and a slice on each device. Each part is added up where it is needed
instead, which sends half of what an all-reduce does. Sequence parallelism lives on it (Korthikanti
et al. 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.dtensor.collectives import COLLECTIVES
from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.partial_sums import is_sum
from kdist.dtensor.rewiring import PASSED, Rewiring
from kdist.graphs.chunks import node_of

import numpy as np

_SCATTER = "CollectiveReduceScatterV2"
_KEEP_SHAPE = frozenset({"Identity", "BiasAdd"})


def scatter(rewiring: Rewiring) -> None:
    """Makes reduce-scatters of sums of which devices need parts.

    Args:
        rewiring: Of the program. What stitches it learns along which dim each of them cuts.
    """
    for name in rewiring.program.live:
        _scatter(rewiring, rewiring.nodes[name])


def _scatter(rewiring: Rewiring, node: Any) -> None:
    """Puts a reduce-scatter in the place of an all-reduce and the slice of its result."""
    program = rewiring.program
    if node.op not in COLLECTIVES or not is_sum(node) or node.name in program.begins:
        return
    between, last = rewiring.passed(rewiring.only_user(node.name), PASSED)
    biases, last = rewiring.passed(last, _KEEP_SHAPE)
    if last is None or last.op != "Slice":
        return
    dim = _dim(rewiring, last, program.groups(node))
    if dim is None or (biases and dim == program.shape(rewiring.now(last.input[0])).rank - 1):
        return
    source = program.source(node)
    if between:  # summands are reshaped as their sum was
        rewiring.own(between[0].name).input[0] = source
        source = f"{between[-1].name}:output:0"
    rewiring.collective(node, last, _SCATTER, source, "output")
    program.cut_dims[last.name] = dim
    if biases:
        _add_after(rewiring, last.name, biases)


def _add_after(rewiring: Rewiring, scattered: str, biases: Sequence[Any]) -> None:
    """Adds a bias to the parts of a sum, and not to the whole."""
    part, users = rewiring.nodes[scattered], rewiring.users
    for one in biases:
        if SHAPES in part.attr:
            rewiring.own(one.name).attr[SHAPES].CopyFrom(part.attr[SHAPES])
    first, last = biases[0].name, biases[-1].name
    rewiring.own(first).input[0] = f"{scattered}:data:0"
    rewiring.rename(f"{scattered}:output:0", f"{last}:output:0")
    users[last], users[scattered] = users[scattered], [first]


def _dim(rewiring: Rewiring, part: Any, groups: Sequence[Sequence[int]]) -> int | None:
    """Along which dim a slice takes the parts of a group's members, one after the other.

    None if it takes others: DTensor cuts equally, in the order of the axis.
    """
    program = rewiring.program
    begins = program.values.get(node_of(part.input[1]))
    if begins is None:
        return None
    table = np.array([np.ravel(begin) for begin in begins])
    cut = np.flatnonzero(table.any(0))
    size, whole = program.shape(f"{part.name}:output:0"), program.shape(rewiring.now(part.input[0]))
    if len(cut) != 1 or size.rank is None or whole.rank is None:
        return None
    dim = int(cut[0])
    count, width = len(groups[0]), size[dim]
    if width is None or whole[dim] != count * width:
        return None
    wanted = width * np.arange(count)
    right = all(np.array_equal(table[list(members), dim], wanted) for members in groups)
    return dim if right else None
