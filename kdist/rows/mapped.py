"""Loops that do the same to each row, as `tf.map_fn` and `keras.ops.map` make them.

Such a loop takes element i out of lists, computes, and puts the result into another list at i. As
a loop, all rows pass through it, and nothing tells them apart; read as a whole it does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kdist._compat import function_graphs
from kdist.rows.numbers import fixed

SAME = ("Identity", "StopGradient", "Snapshot")


@dataclasses.dataclass(frozen=True)
class LoopMap:
    """What a loop maps.

    Attributes:
        loop: The operation.
        body: Its body, a graph.
        element: What is computed of each element: a tensor of the body.
        lists: Those that elements are taken from: operations that made them of a tensor.
        others: What else is read of them, by the body's name for it: tensors beside the loop.
    """

    loop: Any
    body: Any
    element: Any
    lists: tuple[Any, ...]
    others: dict[int, Any]


def mapped_by_loop(stacked: Any, batch: int) -> LoopMap | None:
    """What is mapped, of a list that is stacked; None if it was made otherwise.

    Args:
        stacked: A `TensorListStack`.
        batch: The batch's size B, so many elements the lists must have.
    """
    result = stacked.inputs[0]
    loop = result.op
    if loop.type not in ("While", "StatelessWhile"):
        return None
    readers = {op.type for out in loop.outputs for op in out.consumers()}
    body = function_graphs.function_graph(loop.graph, loop.get_attr("body").name)
    condition = function_graphs.function_graph(loop.graph, loop.get_attr("cond").name)
    if body is None or condition is None or readers != {stacked.type}:
        return None
    inside = _Body(loop, body)
    found = inside.found(result.value_index)
    return found if found is not None and _runs(loop, condition, inside.counters, batch) else None


class _Body:
    """The body of a loop.

    Attributes:
        counters: Positions of what begins at 0 and is raised by 1.
        read: Positions of lists that elements are taken from.
        used: Positions of what else an element's computation reads.
    """

    def __init__(self, loop: Any, body: Any) -> None:
        self.loop, self.body = loop, body
        self.positions = {id(t): n for n, t in enumerate(body.inputs)}
        self.counters = {n for n in range(len(body.inputs)) if self._counts(n)}
        self.read: set[int] = set()
        self.used: set[int] = set()

    def found(self, position: int) -> LoopMap | None:
        """What is mapped, if the list at a position gets one element from each of others."""
        put = _same(self.body.outputs[position]).op
        if put.type != "TensorListSetItem" or self._position(put.inputs[0]) != position:
            return None
        at = self._position(put.inputs[1])
        if at not in self.counters or _made_by(self.loop.inputs[position]) != "TensorListReserve":
            return None
        element, given = put.inputs[2], self.loop.inputs
        if not self._follow(element, at) or not self.read:
            return None
        lists = tuple(_same(given[n]).op for n in sorted(self.read))
        if any(one.outputs[0].consumers() != [self.loop] for one in lists):
            return None
        others = {id(self.body.inputs[n]): given[n] for n in sorted(self.used)}
        return LoopMap(self.loop, self.body, element, lists, others)

    def _position(self, tensor: Any) -> int | None:
        return self.positions.get(id(_same(tensor)))

    def _kept(self, position: int) -> bool:
        """Whether something is the same in every pass."""
        return self._position(self.body.outputs[position]) == position

    def _counts(self, position: int) -> bool:
        after = _same(self.body.outputs[position]).op
        if after.type not in ("Add", "AddV2") or self._position(after.inputs[0]) != position:
            return False
        first, step = fixed(self.loop.inputs[position]), fixed(after.inputs[1])
        return first is not None and step is not None and first == 0 and step == 1

    def _follow(self, element: Any, at: int | None) -> bool:
        """Whether an element follows from those of lists at its place, and from what is kept."""
        waiting, seen = [element], set()
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            position = self._position(tensor)
            if position is not None:
                if not self._kept(position) or _made_by(self.loop.inputs[position]).startswith(
                    "TensorList"
                ):
                    return False
                self.used.add(position)
            elif tensor.op.type == "TensorListGetItem":
                taken = self._position(tensor.op.inputs[0])
                if taken is None or not self._kept(taken):
                    return False
                if self._position(tensor.op.inputs[1]) != at:
                    return False
                if _made_by(self.loop.inputs[taken]) != "TensorListFromTensor":
                    return False
                self.read.add(taken)
            else:
                waiting.extend(tensor.op.inputs)
        return True


def _runs(loop: Any, condition: Any, counters: set[int], batch: int) -> bool:
    """Whether a loop makes as many passes as there are rows."""
    waiting, limits = [condition.outputs[0]], []
    while waiting:
        tensor = _same(waiting.pop())
        if tensor.op.type == "LogicalAnd":
            waiting.extend(tensor.op.inputs)
        elif tensor.op.type == "Less":
            limits.append(tensor.op.inputs)
        else:
            return False
    positions = {id(t): n for n, t in enumerate(condition.inputs)}
    for counter, limit in limits:
        end = positions.get(id(_same(limit)))
        number = fixed(limit if end is None else loop.inputs[end])
        if positions.get(id(_same(counter))) not in counters or number is None or number != batch:
            return False
    return bool(limits)


def _same(tensor: Any) -> Any:
    """What an identity is of."""
    while tensor.op.type in SAME:
        tensor = tensor.op.inputs[0]
    return tensor


def _made_by(tensor: Any) -> str:
    return _same(tensor).op.type
