"""All-to-alls as they should be: DTensor 2.21 mixes values up at some ranks.

An all-to-all moves a cut from one dim to another. DTensor exchanges blocks of rows; with m the
lesser of the two dims it first turns dims round by m, and afterwards back. Back it turns them by
m + 1, and not by rank - m, which is the same for (batch, length, features) and not for (batch,
length, heads, features).

```
x: (b, l, h, d)  turned by 1: (l, h, d, b)  exchanged, turned by 3: (b, l, h, d); DTensor turns by 2
```
"""

from __future__ import annotations

from typing import Any

from kdist.dtensor.collectives import CannotStitch
from kdist.graphs.chunks import node_of

import numpy as np
import tensorflow as tf

_MOVE = "CollectiveAllToAllV2"
_ADDED = "/DTensorAllToAll"
"""In the names of the nodes that DTensor writes for one."""


def mend(definition: Any) -> None:
    """Corrects the all-to-alls of a lowered program, in place.

    Raises:
        CannotStitch: One is of another form than is known here.
    """
    moves = [node for node in definition.node_def if node.op == _MOVE]
    if moves:
        program = _Program(definition)
        for move in moves:
            program.mend(move)


class _Program:
    """A lowered program, indexed by names of nodes."""

    def __init__(self, definition: Any) -> None:
        self.definition = definition
        self.nodes = {node.name: node for node in definition.node_def}
        self.users: dict[str, list[Any]] = {}
        for node in definition.node_def:
            for reference in node.input:
                if not reference.startswith("^"):
                    self.users.setdefault(node_of(reference), []).append(node)

    def mend(self, move: Any) -> None:
        """Corrects one all-to-all."""
        before, back = self._turned_before(move), self._turned_after(move)
        if not before and back is None:
            return
        order = self._order(back)
        by, rank = _turn(order), len(order)
        if not before or by not in (before + 1, rank - before):
            raise CannotStitch(f"an all-to-all of a form that is not known ({move.name})")
        if by != rank - before:
            constant = self.definition.node_def.add()  # others may have the one that is there
            constant.CopyFrom(self.nodes[node_of(back.input[1])])
            constant.name = f"{back.name}/order"
            right = np.roll(np.arange(rank, dtype=order.dtype), before)
            constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(right))
            back.input[1] = f"{constant.name}:output:0"

    def _turned_before(self, move: Any) -> int:
        """By how much dims are turned round before it, if they are.

        Blocks of the dim that is split may be put first in between.
        """
        node = self._made(self._made(move, "Reshape"), "Transpose", move)
        if node is not None and not _turn(self._order(node)):
            node = self._made(self._made(node, "Reshape"), "Transpose", move)
        return _turn(self._order(node))

    def _turned_after(self, move: Any) -> Any:
        """What turns dims back; None if they are not."""
        users = self.users.get(move.name, [])
        if len(users) == 1 and users[0].op == "Reshape":
            users = self.users.get(users[0].name, [])
        nodes = [one for one in users if _scope(one) == _scope(move) and _turn(self._order(one))]
        return nodes[0] if nodes else None

    def _made(self, node: Any, op: str, move: Any = None) -> Any:
        """What a node takes, if it is of a kind and made for some all-to-all, or for this one.

        Reshapes that follow each other are one, of which the name tells little.
        """
        given = None if node is None else self.nodes.get(node_of(node.input[0]))
        if given is None or given.op != op or _scope(given) is None:
            return None
        return given if move is None or _scope(given) == _scope(move) else None

    def _order(self, node: Any) -> np.ndarray:
        """In which order a transposition takes dims; empty of anything else."""
        transposes = node is not None and node.op == "Transpose"
        order = self.nodes.get(node_of(node.input[1])) if transposes else None
        if order is None or order.op != "Const":
            return np.zeros(0, np.int32)
        return tf.make_ndarray(order.attr["value"].tensor)


def _scope(node: Any) -> str | None:
    """The operation for which DTensor wrote a node, of those for all-to-alls."""
    scope, added, _ = node.name.partition(_ADDED)
    return scope if added else None


def _turn(order: np.ndarray) -> int:
    """By how many places dims are turned round; 0 if they are in another order."""
    by = int(order[0]) if order.size else 0
    return by if np.array_equal(order, np.roll(np.arange(len(order)), -by)) else 0
