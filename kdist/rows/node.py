"""One operation of a graph as the rules see it, and the table of rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kdist.rows.numbers import fixed
from kdist.rows.values import Apart, Const, Linear, Mixing, Rows, RowsMeet, Value

import numpy as np
import tensorflow as tf

Shape = tuple[int | None, ...]


class Node:
    """An operation, what is known about its inputs, and what its rule may ask.

    Args:
        op: The operation.
        values: Of its inputs; none is `Mixed`.
        batch: The batch's size B.
    """

    def __init__(self, op: tf.Operation, values: Sequence[Apart], batch: int) -> None:
        self.op, self.values, self.batch = op, list(values), batch

    @property
    def constant(self) -> bool:
        """Whether no row's value matters to the inputs."""
        return all(isinstance(v, Const) for v in self.values)

    def shape(self, index: int) -> Shape:
        """Shape of an input; dims of unknown size are None.

        Raises:
            RowsMeet: Its rank is unknown.
        """
        return _shape(self.op.inputs[index])

    def out_shape(self, index: int = 0) -> Shape:
        """Shape of an output; see `shape`."""
        return _shape(self.op.outputs[index])

    def static(self, index: int) -> np.ndarray:
        """The value of an input that the graph fixes (an axis, a permutation).

        Raises:
            RowsMeet: It does not.
        """
        tensor = self.op.inputs[index]
        value = tf.get_static_value(tensor)
        value = fixed(tensor) if value is None else np.asarray(value)
        if value is None:
            raise RowsMeet
        return value

    def partial(self, index: int) -> list[int | None]:
        """An integer vector of which the graph may fix some entries only (`x[:, i]` in a loop)."""
        tensor = self.op.inputs[index]
        value = tf.get_static_value(tensor)
        if value is not None:
            return [int(v) for v in value.reshape(-1)]
        if tensor.op.type == "Pack":
            parts = [tf.get_static_value(t) for t in tensor.op.inputs]
            return [None if p is None else int(p) for p in parts]
        size = tensor.shape.num_elements()
        if size is None:
            raise RowsMeet
        return [None] * size

    def axes(self, index: int, rank: int) -> list[int]:
        """An input that names dims, as dims from 0 on."""
        return [int(a) % rank for a in self.static(index).reshape(-1)] if rank else []

    def attr(self, name: str) -> Any:
        """An attribute of the operation."""
        return self.op.get_attr(name)

    def is_zero(self, index: int) -> bool:
        """Whether the graph fixes an input to zeros."""
        value = tf.get_static_value(self.op.inputs[index])
        return value is not None and not np.any(value)

    def only_constants(self, *indices: int) -> None:
        """Raises `RowsMeet` if any of these inputs depends on rows, or on their number."""
        for i in indices:
            value = self.values[i]
            if not isinstance(value, Const):
                raise RowsMeet

    def linear(self, power: int) -> Linear:
        """The sum over rows that this operation makes, times B to a power."""
        return Linear(power, Mixing("", self.op.type, self.op.name))

    def is_batch_multiple(self, size: int | None) -> bool:
        """Whether a size may have the batch's size as a factor."""
        return size is None or (size > 0 and size % self.batch == 0)


def _shape(tensor: Any) -> Shape:
    shape = tensor.shape
    if shape.rank is None:
        raise RowsMeet
    return tuple(shape.as_list())


Rule = Callable[[Node], "Value | list[Value]"]
RULES: dict[str, Rule] = {}
R = TypeVar("R", bound=Rule)


def named(text: str) -> list[str]:
    """Types of operations, written with blanks between them."""
    return text.split()


def rule(*types: str) -> Callable[[R], R]:
    """Registers the rule of some types of operations.

    A rule returns one value for all outputs of its operation, or a list with one for each, and
    raises `RowsMeet` where rows do not stay apart.
    """

    def register(function: R) -> R:
        for name in types:
            if name in RULES:
                raise ValueError(f"There is a rule already. Received: type={name!r}")
            RULES[name] = function
        return function

    return register


def total_power(powers: Sequence[int | None]) -> int | None:
    """The power of a product."""
    known = [p for p in powers if p is not None]
    return sum(known) if len(known) == len(powers) else None


def aligned(node: Node, rank: int, indices: Sequence[int] | None = None) -> Rows | None:
    """Where the batch is after broadcasting inputs to a rank; None if none of them has rows.

    Raises:
        RowsMeet: Rows of one input would meet other rows of another, or a constant that differs
            from position to position in the batch.
    """
    chosen = range(len(node.values)) if indices is None else indices
    found: Rows | None = None
    for i in chosen:
        value = node.values[i]
        if isinstance(value, Rows):
            here = Rows(value.dim + rank - len(node.shape(i)), value.outer, value.inner)
            if found is not None and found != here:
                raise RowsMeet
            found = here
    if found is None:
        return None
    for i in chosen:
        value, shape = node.values[i], node.shape(i)
        if isinstance(value, Linear):
            raise RowsMeet
        dim = found.dim - (rank - len(shape))
        if isinstance(value, Const) and dim >= 0 and shape[dim] != 1 and not value.is_flat(dim):
            raise RowsMeet
    return found


def broadcast_flat(
    node: Node, rank: int, indices: Sequence[int] | None = None
) -> frozenset[int] | None:
    """The dims along which a broadcast of constants is flat."""
    chosen = list(range(len(node.values)) if indices is None else indices)
    constants = [(node.values[i], i) for i in chosen]
    if all(isinstance(v, Const) and (v.flat is None) for v, _ in constants):
        return None
    flat = set(range(rank))
    for value, i in constants:
        shape = node.shape(i)
        if isinstance(value, Const):
            for dim, size in enumerate(shape):
                if size != 1 and not value.is_flat(dim):
                    flat.discard(dim + rank - len(shape))
    return frozenset(flat)
