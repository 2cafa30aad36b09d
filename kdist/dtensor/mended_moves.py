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
from kdist.dtensor.device_number import SHAPES
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
        before, blocks = self._turned_before(move)
        back = self._turned_after(move)
        if not before and back is None:
            return
        order = self._order(back)
        by, rank = _turn(order), len(order)
        if not before and by - 1 == rank - by and self._is_constant(move):
            return  # turned by one less before, in the constant: both ways back are the same
        if not before or by not in (before + 1, rank - before):
            raise CannotStitch(f"an all-to-all of a form that is not known ({move.name})")
        if by != rank - before:
            right = np.roll(np.arange(rank, dtype=order.dtype), before)
            self._change(back, "order", right)
            reshape = self.nodes[node_of(back.input[0])]
            shape = self._constant(reshape)
            if blocks is not None:
                # What follows may rely on a shape that came out right by chance.
                shape = self._exchanged(*blocks)
                self._change(reshape, "shape", shape)
            _note(reshape, shape)
            _note(back, shape[right])

    def _exchanged(self, blocks: Any, place: int) -> np.ndarray:
        """The shape, turned round, after an exchange of blocks of a dim, joined along the first.

        Args:
            blocks: The reshape before it, to blocks of the dim.
            place: Which dim they are of; their number comes before it.
        """
        shape = self._constant(blocks)
        after = np.delete(shape, place)
        after[0] *= shape[place]
        return after

    def _change(self, node: Any, what: str, value: np.ndarray) -> None:
        """Gives a node another constant: others may have the one that is there."""
        constant = self.definition.node_def.add()
        constant.CopyFrom(self.nodes[node_of(node.input[1])])
        constant.name = f"{node.name}/{what}"
        constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
        node.input[1] = f"{constant.name}:output:0"

    def _turned_before(self, move: Any) -> tuple[int, tuple[Any, int] | None]:
        """By how much dims are turned round before it, if they are; what makes blocks, and where.

        Blocks of the dim that is split may be put first in between.
        """
        node, made = self._made(self._made(move, "Reshape"), "Transpose", move), None
        if node is not None and not _turn(order := self._order(node)):
            blocks = self._made(node, "Reshape")
            made = None if blocks is None else (blocks, int(order[0]))
            node = self._made(blocks, "Transpose", move)
        return _turn(self._order(node)), made

    def _is_constant(self, move: Any) -> bool:
        """Whether it moves parts of a constant of one value, turned round while lowering."""
        given = self._made(move, "Reshape") or move
        source = self.nodes.get(node_of(given.input[0]))
        return source is not None and source.op == "Const"

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
        return self._constant(node) if transposes else np.zeros(0, np.int32)

    def _constant(self, node: Any) -> np.ndarray:
        """What a node takes beside the tensor; empty if that is not known."""
        given = self.nodes.get(node_of(node.input[1]))
        if given is None or given.op != "Const":
            return np.zeros(0, np.int32)
        return tf.make_ndarray(given.attr["value"].tensor)


def _scope(node: Any) -> str | None:
    """The operation for which DTensor wrote a node, of those for all-to-alls."""
    scope, added, _ = node.name.partition(_ADDED)
    return scope if added else None


def _note(node: Any, shape: np.ndarray) -> None:
    """Writes on a node which shape it gives."""
    del node.attr[SHAPES].list.shape[:]
    node.attr[SHAPES].list.shape.append(tf.TensorShape(shape).as_proto())


def _turn(order: np.ndarray) -> int:
    """By how many places dims are turned round; 0 if they are in another order."""
    by = int(order[0]) if order.size else 0
    return by if np.array_equal(order, np.roll(np.arange(len(order)), -by)) else 0
