"""Which gradients travel compressed over the data axis: the declaration, and what it sends.

Three classes, as in DALL-E (Ramesh et al. 2021, arXiv:2102.12092): what is most sensitive is
summed in full precision, what stands a little noise in 16 bits, the rest as low-rank factors
(PowerSGD). Nothing here touches a device; the mathematics is in `kdist.optimizer.compressors`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kdist.config.unknown_fields import explains_fields
from kdist.display.warn import warn
from kdist.sharding.layout import closest_names, match_pattern

import tensorflow as tf

CASTS = ("fp16", "bf16")
SENSITIVE = re.compile("embed|norm", re.IGNORECASE)
"""Paths of matrices that the default leaves uncompressed; vectors are left in any case."""


@explains_fields
@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """Low-rank compression: the gradient matrix M travels as P = M Q and Q = M^T P.

    Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", arXiv:1905.13727.

    Raises:
        ValueError: For a rank that is no positive int, a seed that is no int, or a flag that is no
            bool.

    Example:
    ```python
    config = kdist.CompressionConfig(patterns={".*up/kernel": kdist.PowerSGD(rank=2)}, rest="bf16")
    ```
    """

    rank: int = 4
    """Columns of P and Q. More: closer to the gradient, more bytes."""

    warm_start: bool = True
    """Whether a step starts from the Q of the step before, which makes the factors follow the
    largest singular vectors. Otherwise every step draws a new Q."""

    error_feedback: bool = True
    """Whether each replica adds to its next gradient what this one lost. Costs a buffer of the
    gradient's size on each replica."""

    seed: int = 0
    """Of the first Q; the same on every replica."""

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ValueError(f"rank is an int of at least 1. Received: rank={self.rank!r}")
        for name in ("warm_start", "error_feedback"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"{name} is True or False. Received: {name}={getattr(self, name)!r}"
                )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed is an int. Received: seed={self.seed!r}")

    def __str__(self) -> str:
        off = [n for n in ("warm_start", "error_feedback") if not getattr(self, n)]
        return f"PowerSGD(rank={self.rank}{''.join(f', {n}=False' for n in off)})"


Compressor = Literal["none", "fp16", "bf16"] | PowerSGD
"""How a gradient travels: `"none"` is the plain all-reduce in the gradient's own dtype."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of the matrix that a tensor is seen as.

    The dims are cut into a first and a last group where rows + columns, and so the bytes of the
    factors, are fewest: (3, 3, 64, 128) is 576 x 128, (512, 8, 64) is 512 x 512. A vector is one
    column.
    """
    dims = [int(size) for size in shape]
    cut = matrix_cut(dims)
    return math.prod(dims[:cut]), math.prod(dims[cut:])


def matrix_cut(shape: Sequence[int]) -> int:
    """How many of a tensor's first dims are the rows of its matrix; see `matrix_shape`."""

    def cost(cut: int) -> tuple[int, int]:
        columns = math.prod(shape[cut:])
        return math.prod(shape[:cut]) + columns, columns

    return min(range(1, max(len(shape), 2)), key=cost)


def wire_bytes(shape: Sequence[int], itemsize: int, compressor: Compressor) -> int:
    """Bytes of the buffers that one replica gives to the all-reduce for a gradient.

    | compressor | bytes |
    | --- | --- |
    | `"none"` | elements * itemsize |
    | `"fp16"`, `"bf16"` | elements * 2 |
    | `PowerSGD(rank=r)` | r * (rows + columns) * max(itemsize, 4) |

    What an algorithm makes of a buffer (2 (p - 1) / p times its bytes for a ring) is the same for
    all. `"fp16"` also needs the largest value, one scalar for all that travel together.

    Args:
        shape: Shape of the gradient.
        itemsize: Bytes of one of its elements.
        compressor: How it travels.
    """
    elements = math.prod(int(size) for size in shape)
    if isinstance(compressor, PowerSGD):
        # Factors of half-precision gradients are computed, and sent, in float32.
        return compressor.rank * sum(matrix_shape(shape)) * max(itemsize, 4)
    return elements * (2 if compressor in CASTS else itemsize)


@dataclass(frozen=True, kw_only=True)
class VariableClass:
    """How the gradient of one variable travels.

    Attributes:
        path: Of the variable.
        shape: Of its gradient.
        itemsize: Bytes of an element.
        compressor: How it travels.
        why: The rule that chose it.
        asked: Whether that is a pattern.
    """

    path: str
    shape: tuple[int, ...]
    itemsize: int
    compressor: Compressor
    why: str
    asked: bool = False

    @property
    def full_bytes(self) -> int:
        """Bytes without compression."""
        return wire_bytes(self.shape, self.itemsize, "none")

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, as `wire_bytes` counts them."""
        return wire_bytes(self.shape, self.itemsize, self.compressor)


@dataclass(frozen=True)
class Classes:
    """What a `CompressionConfig` means for given variables; `print` shows it as a table."""

    entries: tuple[VariableClass, ...]

    def __getitem__(self, path: str) -> VariableClass:
        return next(e for e in self.entries if e.path == path)

    def compressors(self, without: Collection[int] = ()) -> tuple[Compressor, ...]:
        """The compressor of each variable.

        Args:
            without: Positions of variables that are not compressed after all.
        """
        return tuple("none" if n in without else e.compressor for n, e in enumerate(self.entries))

    def refuse_rows(self, rows: Collection[int]) -> None:
        """Says that gradients turned out to be rows of a table.

        Args:
            rows: Positions of their variables.

        Raises:
            ValueError: A pattern asks to compress one, and nothing else.
        """
        kept = [e for n, e in enumerate(self.entries) if n not in rows and e.compressor != "none"]
        for entry in (self.entries[n] for n in sorted(rows)):
            if entry.compressor == "none":
                continue
            if entry.asked and not any(e.why == entry.why for e in kept):
                raise ValueError(
                    "The rows of a table that a batch looks up travel as they are. Use 'none' "
                    f"for it. Received: {entry.compressor} for {entry.path!r} ({entry.why})"
                )
            warn(f"{entry.path}: the gradient is rows of a table, which travel as they are.")

    @property
    def full_bytes(self) -> int:
        """Bytes of all gradients without compression."""
        return sum(e.full_bytes for e in self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients on the wire."""
        return sum(e.nbytes for e in self.entries)

    def __str__(self) -> str:
        ratio = self.full_bytes / max(self.nbytes, 1)
        rows = [("variable", "shape", "travels as", "bytes", "of", "why")]
        rows += [
            (e.path, str(e.shape), str(e.compressor), str(e.nbytes), str(e.full_bytes), e.why)
            for e in self.entries
        ]
        rows.append(("all", "", f"{ratio:.1f} x less", str(self.nbytes), str(self.full_bytes), ""))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip((*row,), (*widths, 0))) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


@explains_fields
@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """How gradients travel over the data axis, by variable.

    A variable whose path a pattern matches takes that pattern's compressor. Of the others,
    vectors (at most one dim larger than 1), and matrices whose path contains "norm" or "embed",
    are not compressed; the rest takes `rest`, or `middle` where `rest` is low-rank but would not
    send fewer bytes than `middle`.

    Raises:
        ValueError: For a compressor that is not listed, a pattern that is no regular expression,
            or a low-rank `middle`. What depends on the variables is checked by `classes`.

    Example:
    ```python
    config = kdist.CompressionConfig(
        patterns={".*head/kernel": "bf16", ".*up/kernel": "none"}, rest=kdist.PowerSGD(rank=2)
    )
    print(config.classes(model.trainable_variables))  # how each gradient travels, and why
    kdist.ParallelConfig(mesh=kdist.mesh(data=4), compression=config)
    ```
    """

    patterns: Mapping[str, Compressor] = field(default_factory=dict)
    """Regex of a variable's whole path -> `"none"`, `"fp16"`, `"bf16"` or a `PowerSGD`. One
    pattern at most may match a path, or one equals it."""

    rest: Compressor = PowerSGD()
    """For matrices that are not sensitive and that no pattern matches."""

    middle: Literal["none", "fp16", "bf16"] = "bf16"
    """For those of the rest that are too small for low rank to pay."""

    def __post_init__(self) -> None:
        if not isinstance(self.patterns, Mapping):
            raise ValueError(
                "patterns is a dict from regex to 'none', 'fp16', 'bf16' or PowerSGD(rank=...). "
                f"Received: patterns={self.patterns!r}"
            )
        object.__setattr__(self, "patterns", dict(self.patterns))
        for pattern, compressor in self.patterns.items():
            _check_compressor(compressor, f"patterns[{pattern!r}]")
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"A pattern is a regular expression ({error}). Received: pattern={pattern!r}"
                ) from error
        _check_compressor(self.rest, "rest")
        _check_compressor(self.middle, "middle")
        if isinstance(self.middle, PowerSGD):
            raise ValueError(
                "middle is for matrices that low rank does not pay for: 'none', 'fp16' or 'bf16'. "
                f"Received: middle={self.middle!r}"
            )

    def classes(self, variables: Iterable[Any], tables: Collection[int] = ()) -> Classes:
        """How the gradient of each variable travels.

        Args:
            variables: Keras variables, or anything with `path`, `shape` and `dtype`.
            tables: Positions of those whose gradient is, or may be, rows: embeddings. They are
                not compressed.

        Raises:
            ValueError: For a pattern that matches no variable, a variable that several match, or a
                pattern that compresses none of its variables (tables, a rank too large to save
                bytes, a cast of what has 16 bits already).
        """
        variables = list(variables)
        entries, used = [], dict.fromkeys(self.patterns, False)
        saved = dict.fromkeys(self.patterns, False)
        for position, variable in enumerate(variables):
            pattern = match_pattern(self.patterns, variable.path)
            compressor, why = self._choose(variable, pattern)
            if getattr(variable, "overwrite_with_gradient", False) and compressor != "none":
                compressor, why = "none", f"{why}; it is overwritten by what travels"
            elif position in tables and compressor != "none":
                compressor, why = "none", f"{why}; the rows of a table travel as they are"
            entries.append(_entry(variable, compressor, why, pattern is not None))
            if pattern is not None:
                used[pattern] = True
                saved[pattern] |= entries[-1].compressor == self.patterns[pattern]
        for pattern, found in used.items():
            if not found:
                near = closest_names(pattern, [v.path for v in variables])
                raise ValueError(
                    "A pattern matches the whole path of at least one variable; the most similar "
                    f"paths are {near}. Received: patterns={{{pattern!r}: ...}}"
                )
            if not saved[pattern]:
                shapes = [e.shape for e in entries if match_pattern([pattern], e.path)]
                raise ValueError(
                    "A compressor sends fewer bytes than 'none' for at least one variable of its "
                    f"pattern; these have shapes {shapes[:3]}. Use a smaller rank, or 'none' "
                    "(as for tables, whose rows travel as they are). "
                    f"Received: patterns={{{pattern!r}: {self.patterns[pattern]}}}"
                )
        return Classes(tuple(entries))

    def _choose(self, variable: Any, pattern: str | None) -> tuple[Compressor, str]:
        if pattern is not None:
            return self.patterns[pattern], f"pattern {pattern!r}"
        shape, itemsize = _form(variable)
        if sum(size > 1 for size in shape) < 2:
            return "none", "a vector"
        if found := SENSITIVE.search(variable.path):
            return "none", f"path contains {found[0]!r}"
        middle = wire_bytes(shape, itemsize, self.middle)
        if isinstance(self.rest, PowerSGD) and wire_bytes(shape, itemsize, self.rest) >= middle:
            return self.middle, f"too small for rank {self.rest.rank}"
        return self.rest, "rest"

    def __str__(self) -> str:
        width = max(map(len, self.patterns), default=0)
        lines = ["CompressionConfig"]
        lines += [f"  {pattern:<{width}}  {value}" for pattern, value in self.patterns.items()]
        lines.append("  vectors, norms, embeddings: none")
        lines.append(f"  rest: {self.rest}; {self.middle} where that sends fewer bytes")
        return "\n".join(lines)


def _form(variable: Any) -> tuple[tuple[int, ...], int]:
    return tuple(int(s) for s in variable.shape), tf.as_dtype(variable.dtype).size


def _entry(variable: Any, compressor: Compressor, why: str, asked: bool) -> VariableClass:
    """The class of a variable; one that would not save bytes is not compressed."""
    shape, itemsize = _form(variable)
    full = wire_bytes(shape, itemsize, "none")
    if compressor != "none" and wire_bytes(shape, itemsize, compressor) >= full:
        why = f"{compressor} ({why}) sends no fewer bytes"
        compressor = "none"
    return VariableClass(
        path=variable.path,
        shape=shape,
        itemsize=itemsize,
        compressor=compressor,
        why=why,
        asked=asked,
    )


def _check_compressor(value: Any, name: str) -> None:
    if isinstance(value, PowerSGD) or (isinstance(value, str) and value in ("none", *CASTS)):
        return
    raise ValueError(
        f"A compressor is 'none', 'fp16', 'bf16' or PowerSGD(rank=...). Received: {name}={value!r}"
    )
