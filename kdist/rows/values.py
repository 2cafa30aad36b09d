"""What is known about a tensor of a traced graph: how its values depend on the rows of the batch.

An abstract domain in the sense of abstract interpretation (Cousot and Cousot, 1977): every tensor
gets one of four values, and every operation has a rule from those of its inputs to those of its
outputs. A *power* follows the batch's size B: `2 * B` has power 1, a sum over rows divided by `B`
has power -1 (a mean), what does not depend on the number of rows has power 0.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence


class RowDependence(enum.Enum):
    """How an output of a function depends on the rows of its batch."""

    CONSTANT = "constant"
    """No row's value matters."""
    ROWS = "rows"
    """Dim 0 is the batch, and row i depends on row i alone."""
    MEAN = "mean"
    """The mean over rows of something computed row by row."""
    SUM = "sum"
    """The sum over rows of something computed row by row."""
    MIXED = "mixed"
    """Rows meet in any other way, or in one that is not known."""


@dataclasses.dataclass(frozen=True)
class Mixing:
    """An operation at which rows of the batch meet.

    Attributes:
        layer: Path of the Keras layer that it serves, or the name scope where layers are not known.
        operation: Its type; "Mean, then Sub" where a mean or sum over rows is used for more than
            a mean or sum.
        name: Its name in the traced graph.
    """

    layer: str
    operation: str
    name: str

    def __str__(self) -> str:
        return f"{self.operation} in layer {self.layer!r}" if self.layer else self.operation


@dataclasses.dataclass(frozen=True)
class Const:
    """No row's value matters.

    Attributes:
        flat: Tensor dims along which all values are equal (or equally distributed noise); None: all
            dims. Only a constant that is flat along the batch may be combined with rows one by one.
        power: The power of the batch's size; None if it depends on the size in another way.
    """

    flat: frozenset[int] | None = frozenset()
    power: int | None = 0

    def is_flat(self, dim: int) -> bool:
        """Whether all values along a tensor dim are equal."""
        return self.flat is None or dim in self.flat


@dataclasses.dataclass(frozen=True)
class Rows:
    """The batch is one tensor dim, or inside one: that dim's size is outer × B × inner.

    Attributes:
        dim: The tensor dim; of a list of tensors, of its elements.
        outer: How often the whole batch stands in the dim, one after the other.
        inner: How many neighbouring entries of the dim belong to one row.
        power: The power of the batch's size that values carry.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    power: int = 0

    @property
    def layout(self) -> tuple[int, int, int]:
        """Where the batch is."""
        return self.dim, self.outer, self.inner


@dataclasses.dataclass(frozen=True)
class Linear:
    """B to a power, times the sum over rows of something computed row by row.

    Attributes:
        power: 0 for a sum, -1 for a mean.
        origin: The operation that summed.
    """

    power: int
    origin: Mixing


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Rows have met.

    Attributes:
        cause: The first operation at which they did.
    """

    cause: Mixing


Apart = Const | Rows | Linear
"""What rules see: rows have not met yet."""
Value = Apart | Mixed


class RowsMeet(Exception):
    """Raised by the rule of an operation that does not keep rows apart."""


def join(a: Value, b: Value) -> Value:
    """What holds for a tensor that is either of two (branches, iterations of a loop).

    Raises:
        RowsMeet: Rows stand at different places, or values are of different kinds.
    """
    if a == b:
        return a
    for one in (a, b):
        if isinstance(one, Mixed):
            return one
    if isinstance(a, Const) and isinstance(b, Const):
        power = a.power if a.power == b.power else None
        return Const(common_flat(a.flat, b.flat), power)
    if isinstance(a, Rows) and isinstance(b, Rows) and a == b:
        return a
    if isinstance(a, Linear) and isinstance(b, Linear) and a.power == b.power:
        return a
    constant, other = (a, b) if isinstance(a, Const) else (b, a)
    if isinstance(constant, Const):
        if isinstance(other, Rows) and constant.is_flat(other.dim):
            if constant.power == other.power:
                return other
        elif isinstance(other, Linear) and constant.power == other.power + 1:
            return other
    raise RowsMeet


def common_flat(a: frozenset[int] | None, b: frozenset[int] | None) -> frozenset[int] | None:
    """Dims that are in both, where None is all dims."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def flow_of(value: Value) -> RowDependence:
    """The public name of what is known about an output."""
    if isinstance(value, Const):
        return RowDependence.CONSTANT
    if isinstance(value, Rows) and (value.dim, value.outer, value.power) == (0, 1, 0):
        return RowDependence.ROWS
    if isinstance(value, Linear) and value.power in (0, -1):
        return RowDependence.SUM if value.power == 0 else RowDependence.MEAN
    return RowDependence.MIXED


def powers(values: Sequence[Value]) -> list[int | None]:
    """Of each value."""
    return [None if isinstance(v, Mixed) else v.power for v in values]
