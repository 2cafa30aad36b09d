"""What is asked of a collective, checked."""

from __future__ import annotations

import dataclasses
from typing import Any

from kdist.comm import algorithms
from kdist.comm.group import Group

import tensorflow as tf

REDUCTIONS = ("sum", "mean", "max", "min", "product")
DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
)
FLOATS = DTYPES[:4]
AUTO, RUNTIME = "auto", "runtime"
# What TensorFlow's own all-reduce takes.
RUNTIME_DTYPES = (*FLOATS, "int32", "int64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One collective, without its values.

    Attributes:
        operation: One of `algorithms.OPERATIONS`, `"send_recv"`, `"send"` or `"recv"`.
        group: The devices.
        algorithm: One of `algorithms.ALGORITHMS`, a torus, `"runtime"` or `"auto"`.
        reduction: One of `REDUCTIONS`.
        root: Rank of the root.
        dim: Tensor dim that is cut or joined; of all-to-all, cut.
        join_dim: Tensor dim that all-to-all joins.
        sizes: Lengths along `dim`, one per rank; of all-to-all, p rows of p: what each rank has
            for each. None: as equal as possible, or what the values have.
        join_sizes: Of all-to-all across processes, the length along `join_dim` of each rank's
            value; None: all have the same.
        by_group: The call for each group with a rank in this process, where a backward pass takes
            back what groups with lengths of their own gave.
        exclusive: Of scan, leave a rank's own value out.
        backwards: Of scan, from the last rank to the first.
        pairs: Of sends, (source, target) ranks.
    """

    operation: str
    group: Group
    algorithm: str = AUTO
    reduction: str = "sum"
    root: int = 0
    dim: int = 0
    join_dim: int = 0
    sizes: tuple[Any, ...] | None = None
    join_sizes: tuple[int, ...] | None = None
    by_group: tuple[Call, ...] = ()
    exclusive: bool = False
    backwards: bool = False
    pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        p = self.group.size
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"A reduction is one of {', '.join(REDUCTIONS)}. "
                f"Received: reduction={self.reduction!r}"
            )
        if self.algorithm == RUNTIME:
            self._check_runtime()
        elif self.algorithm != AUTO and self.operation != "send_recv":
            algorithms.check(self.operation, self.algorithm, p)
        if isinstance(self.root, bool) or not isinstance(self.root, int) or not 0 <= self.root < p:
            raise ValueError(
                f"The root is a rank along axis {self.group.axis!r}, an integer from 0 to {p - 1}. "
                f"Received: root={self.root!r}"
            )
        if not isinstance(self.exclusive, bool):
            raise ValueError(f"exclusive is True or False. Received: exclusive={self.exclusive!r}")
        self._check_pairs(p)
        if self.sizes is not None:
            self._check_sizes(p)

    def _check_runtime(self) -> None:
        if self.operation != "all_reduce" or not self.group.crosses_processes:
            raise ValueError(
                "algorithm='runtime' is TensorFlow's own all-reduce, for a group across "
                "processes. Use algorithm='auto' or one of "
                f"{', '.join(algorithms.ALGORITHMS)}. Received: algorithm='runtime' for "
                f"{self.operation} over {self.group}"
            )

    def _check_pairs(self, p: int) -> None:
        if not all(len(pair) == 2 and all(type(r) is int for r in pair) for pair in self.pairs):
            raise ValueError(
                f"A pair is two ranks, integers: (source, target). Received: pairs={self.pairs}"
            )
        sources = [source for source, _ in self.pairs]
        targets = [target for _, target in self.pairs]
        if len(set(sources)) < len(sources) or len(set(targets)) < len(targets):
            raise ValueError(
                f"In one {self.operation} a rank sends at most once and receives at most once. Use "
                f"two calls, or broadcast. Received: pairs={self.pairs}"
            )
        if not all(0 <= rank < p for rank in (*sources, *targets)):
            raise ValueError(
                f"A pair names ranks along axis {self.group.axis!r}, from 0 to {p - 1}. "
                f"Received: pairs={self.pairs}"
            )

    def _check_sizes(self, p: int) -> None:
        assert self.sizes is not None
        rows = self.sizes if self.operation == "all_to_all" else (self.sizes,)
        listed = isinstance(self.sizes, tuple) and all(isinstance(row, tuple) for row in rows)
        # Lengths that are not known before the run are tensors.
        whole = listed and all(
            tf.is_tensor(size) or (type(size) is int and size >= 0) for row in rows for size in row
        )
        if not whole or len(self.sizes) != p or any(len(row) != p for row in rows):
            shape = f"{p} rows of {p}" if self.operation == "all_to_all" else f"{p}"
            raise ValueError(
                f"The sizes of {self.operation} along axis {self.group.axis!r} are {shape} "
                f"integers of at least 0, one per rank. Received: sizes={self.sizes}"
            )

    @property
    def apart(self) -> bool:
        """Whether it is one side of a message, in which only the two processes take part."""
        return self.operation in ("send", "recv")

    def in_group(self, number: int) -> Call:
        """As it is for one of the groups with a rank in this process."""
        return self.by_group[number] if self.by_group else self

    def changed(self, **changes: Any) -> Call:
        """The same call with other attributes."""
        return dataclasses.replace(self, **changes)
