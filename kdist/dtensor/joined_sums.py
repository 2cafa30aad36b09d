"""One collective for the sum of what several add up, in the place of a sum of sums.

What several cut kernels take (query, key and value; the two products of a gated unit) has a
gradient to which each gives a sum over devices, and a block whose branches are added gives one for
each branch. Summands are added up first, on every device, and sent once, as in Megatron-LM (Shoeybi
et al. 2019, arXiv:1909.08053), which has one kernel there. So are sums that are scattered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from kdist.dtensor.collectives import COLLECTIVES
from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.partial_sums import is_sum
from kdist.dtensor.rewiring import PASSED, Rewiring, by_channel
from kdist.graphs.chunks import node_of

from tensorflow.core.framework import node_def_pb2

_RESULTS = {"Add": "z", "AddV2": "z", "AddN": "sum", "BiasAdd": "output"}
"""Additions, and what they call their result."""


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A sum over devices, of which nothing but an addition is made.

    Attributes:
        node: The collective.
        between: Nodes that hand on what it gives, reshaped perhaps.
        kind: What sums have in common that can be one.
    """

    node: str
    between: tuple[str, ...]
    kind: Any


@dataclasses.dataclass
class _Tree:
    """An addition with the additions that it takes, and nothing else does.

    Attributes:
        root: The node that adds last.
        terms: References of what is added, all of one shape.
        spread: Nodes that add something of another shape, each with the number of that input.
    """

    root: str
    terms: list[str] = dataclasses.field(default_factory=list)
    spread: list[tuple[str, int]] = dataclasses.field(default_factory=list)


def join_sums(rewiring: Rewiring) -> None:
    """Lets one collective send what several would whose results are added.

    Args:
        rewiring: Of the program, after sums of which devices need parts are scattered.
    """
    absorbed: set[str] = set()
    trees = []
    for name in reversed(rewiring.program.live):
        if name not in absorbed and _adds(rewiring, name):
            trees.append(tree := _Tree(name))
            _grow(rewiring, name, tree, absorbed)
    for tree in reversed(trees):
        _join(rewiring, tree)


def _adds(rewiring: Rewiring, name: str) -> bool:
    """Whether a node adds tensors, one of which at least has the shape of the result."""
    node = rewiring.nodes[name]
    return node.op in _RESULTS and not by_channel(node) and any(_followed(rewiring, name))


def _followed(rewiring: Rewiring, name: str) -> list[bool]:
    """Of each input of an addition, whether it is spread over no dim."""
    node = rewiring.nodes[name]
    if node.op in ("AddN", "BiasAdd"):
        return [i == 0 or node.op == "AddN" for i in range(len(node.input))]
    shapes = [rewiring.program.shape(rewiring.now(one)) for one in (f"{name}:z:0", *node.input)]
    if any(shape.rank is None for shape in shapes):
        return [False, False]
    result, *given = [shape.as_list() for shape in shapes]
    return [one == result for one in given]


def _grow(rewiring: Rewiring, name: str, tree: _Tree, absorbed: set[str]) -> None:
    """Adds what an addition takes to a tree, innermost additions first."""
    followed = _followed(rewiring, name)
    for follows, reference in zip(followed, rewiring.nodes[name].input, strict=True):
        inner = node_of(rewiring.now(reference))
        if follows and rewiring.users.get(inner) == [name] and _is_addition(rewiring, inner):
            absorbed.add(inner)
            _grow(rewiring, inner, tree, absorbed)
        elif follows:
            tree.terms.append(reference)
    tree.spread += [(name, i) for i, follows in enumerate(followed) if not follows]


def _is_addition(rewiring: Rewiring, name: str) -> bool:
    inside = name in rewiring.nodes and name not in rewiring.program.inputs
    return inside and _adds(rewiring, name)


def _join(rewiring: Rewiring, tree: _Tree) -> None:
    """Joins sums of a tree that are alike, if there are several."""
    alike: dict[Any, list[tuple[str, _Sum]]] = {}
    kept = []
    for reference in tree.terms:
        one = _sum(rewiring, reference)
        if one is None:
            kept.append(reference)
        else:
            alike.setdefault(one.kind, []).append((reference, one))
    if all(len(some) == 1 for some in alike.values()):
        return
    for (reference, one), *others in alike.values():
        kept.append(_joined(rewiring, [one, *(s for _, s in others)]) if others else reference)
    _replace(rewiring, tree, kept)


def _sum(rewiring: Rewiring, reference: str) -> _Sum | None:
    """The sum that a tensor is, if nothing else takes it."""
    program, between = rewiring.program, list[str]()
    while True:
        name = node_of(rewiring.now(reference))
        node = rewiring.nodes.get(name)
        if node is None or name in program.inputs or len(rewiring.users.get(name, ())) != 1:
            return None
        if node.op not in PASSED:
            break
        between.insert(0, name)
        reference = node.input[0]
    scattered = name in program.cut_dims
    if scattered and between or not scattered and not _is_plain_sum(rewiring, node):
        return None
    groups = tuple(map(tuple, program.groups(node)))
    return _Sum(name, tuple(between), (groups, program.cut_dims.get(name)))


def _is_plain_sum(rewiring: Rewiring, node: Any) -> bool:
    return node.op in COLLECTIVES and is_sum(node) and node.name not in rewiring.program.begins


def _joined(rewiring: Rewiring, sums: Sequence[_Sum]) -> str:
    """One collective of the sum of what several take; a reference to what it gives."""
    program, first = rewiring.program, sums[0]
    sources = [*_sources(rewiring, sums)]
    total = _addition(rewiring, f"{first.node}/summands", sources)
    node = rewiring.own(first.node)
    node.input[0] = program.sources[first.node] = total
    if first.between:  # they hand summands on now
        del node.attr[SHAPES].list.shape[:]
        node.attr[SHAPES].list.shape.append(program.shape(sources[0]).as_proto())
    rewiring.part_of(first.node, [one.node for one in sums[1:]])
    for one in sums[1:]:
        program.cut_dims.pop(one.node, None)
    return f"{first.node}:data:0"


def _sources(rewiring: Rewiring, sums: Sequence[_Sum]) -> Iterator[str]:
    """What sums take, handed on as they are."""
    for one in sums:
        source = rewiring.program.source(rewiring.nodes[one.node])
        if one.between:
            rewiring.own(one.between[0]).input[0] = source
            source = f"{one.between[-1]}:output:0"
        yield source


def _addition(rewiring: Rewiring, name: str, terms: Sequence[str]) -> str:
    """A new addition; a reference to what it gives."""
    program = rewiring.program
    made = node_def_pb2.NodeDef(name=name, op="AddN", input=terms)
    made.attr["N"].i = len(terms)
    made.attr["T"].type = program.dtype(rewiring.now(terms[0]))
    made.attr[SHAPES].list.shape.append(program.shape(rewiring.now(terms[0])).as_proto())
    rewiring.nodes[name] = made
    return f"{name}:sum:0"


def _replace(rewiring: Rewiring, tree: _Tree, terms: Sequence[str]) -> None:
    """Adds other terms in the place of a tree, and what is spread over their sum."""
    total, users = terms[0], rewiring.users.get(tree.root, [])
    if len(terms) > 1:
        total = _addition(rewiring, f"{tree.root}/joined", terms)
    for name, i in tree.spread:
        rewiring.users[node_of(rewiring.now(total))] = [name]
        node = rewiring.own(name)
        node.input[1 - i] = total
        total = f"{name}:{_RESULTS[node.op]}:0"
    root = f"{tree.root}:{_RESULTS[rewiring.nodes[tree.root].op]}:0"
    if total != root:
        rewiring.rename(root, total)
        rewiring.users[node_of(rewiring.now(total))] = users
