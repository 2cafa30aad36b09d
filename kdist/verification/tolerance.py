"""How far two correct runs may be apart, and the comparison of two arrays. Pure."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np

Kind = Literal["output", "training_output", "loss", "metric", "gradient", "state", "weight", "slot"]
KINDS: tuple[Kind, ...] = typing.get_args(Kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far two runs may be apart.

    Attributes:
        relative: Allowance for each kind of value, relative to the largest magnitude of the
            compared array. A kind that is missing is not compared.
        floor: Allowance relative to the largest magnitude of all arrays of the same kind, for
            arrays that only rounding moves away from zero.
        decided: A gradient element below this, relative to the largest of all gradients, is
            rounding alone. What an optimizer makes of it (Lion takes the sign) is not compared.
    """

    relative: Mapping[Kind, float]
    floor: float
    decided: float

    def __str__(self) -> str:
        by_size: dict[float, list[str]] = {}
        for kind, allowed in self.relative.items():
            by_size.setdefault(allowed, []).append(kind)
        if len(by_size) == 1:
            return f"{next(iter(by_size)):.0e} of each array's largest magnitude"
        parts = [f"{', '.join(kinds)} {allowed:.0e}" for allowed, kinds in by_size.items()]
        return f"relative to each array's largest magnitude: {'; '.join(parts)}"


def _half(bits: int) -> Tolerance:
    """For a policy that computes in a type with `bits` bits in the significand.

    A stored value is off by eps / 2 of itself, eps = 2 ** (1 - bits). The loss, a mean in float32,
    gathers about one eps a run, two between two runs. An output or a gradient element has passed
    through some more roundings, and no mean over examples cancels them. A metric that counts
    (accuracy) moves by an example that rounding decides. Weights after one update have no bound: an
    optimizer that normalises turns the sign of a rounding error into a whole step.
    """
    eps = 2.0 ** (1 - bits)
    relative: dict[Kind, float] = {
        "output": 16 * eps,
        "training_output": 16 * eps,
        "loss": 2 * eps,
        "metric": max(0.1, 2 * eps),
        "gradient": 32 * eps,
        "state": 16 * eps,
    }
    return Tolerance(relative=relative, floor=16 * eps, decided=32 * eps)


FLOAT64 = Tolerance(relative=dict.fromkeys(KINDS, 1e-9), floor=1e-12, decided=1e-12)
FLOAT32 = Tolerance(
    relative={
        "output": 1e-5,
        "training_output": 1e-5,
        "loss": 1e-5,
        "metric": 1e-3,
        "gradient": 1e-4,
        "state": 1e-5,
        "weight": 1e-5,
        "slot": 1e-4,
    },
    floor=1e-5,
    decided=1e-4,
)
TOLERANCES: Mapping[str, Tolerance] = {
    "float64": FLOAT64,
    "float32": FLOAT32,
    "mixed_float16": _half(11),
    "mixed_bfloat16": _half(8),
    "float16": _half(11),
    "bfloat16": _half(8),
}
"""By dtype policy."""


def unquantized(policy: str) -> str:
    """The name of the dtype policy that a quantized one came from; of others the name itself.

    >>> unquantized("int8_from_mixed_bfloat16")
    'mixed_bfloat16'
    """
    return policy.rpartition("_from_")[2]


def _rounds_as(policy: str) -> str:
    """The policy that rounds as one does: Keras's float8 rounds float32 biases to bfloat16."""
    source = unquantized(policy)
    return "mixed_bfloat16" if policy.startswith("float8") and source != "float64" else source


def widest(policies: Iterable[str]) -> Tolerance:
    """The widest tolerance of some dtype policies; those of no floating type do not count.

    >>> widest(["int64", "float32", "int8_from_mixed_bfloat16"]) is TOLERANCES["mixed_bfloat16"]
    True
    """
    names = [_rounds_as(one) for one in policies]
    found = [TOLERANCES[name] for name in names if name in TOLERANCES]
    return max(found, key=lambda one: one.relative["output"])


@dataclasses.dataclass(frozen=True)
class Difference:
    """One array that is out of tolerance.

    Attributes:
        kind: What it is: an output in inference or in training mode, the loss or a part of it, a
            metric, a gradient, a state of a layer, a weight or an optimizer slot after one update.
        name: Its name: path of a variable, key of the logs, name of an output or of a part of the
            loss.
        error: The largest absolute difference; infinite where one side has no such array, or one of
            another shape or dtype.
        scale: The largest magnitude on one device.
        allowed: The largest absolute difference allowed.
        text: Where it is and what both sides have there.
    """

    kind: Kind
    name: str
    error: float
    scale: float
    allowed: float
    text: str

    @property
    def relative(self) -> float:
        """The error relative to the scale."""
        return self.error / self.scale if self.scale else float("inf")

    @property
    def excess(self) -> float:
        """How many times the allowance the error is."""
        return self.error / self.allowed if self.allowed else float("inf")

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.relative:.1e} of its scale; {self.text}"


def magnitude(array: np.ndarray) -> float:
    """The largest finite absolute value; 0 without one."""
    values = np.abs(np.asarray(array, "float64"))
    values = values[np.isfinite(values)]
    return float(values.max()) if values.size else 0.0


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far two arrays that should be equal are apart.

    Attributes:
        error: The largest absolute difference; infinite where shape or dtype differ, or where one
            side has NaN or infinity and the other has not.
        scale: The largest finite magnitude of the first one.
        allowed: The largest absolute difference allowed.
        text: Where it is, and what both sides have there.
    """

    error: float
    scale: float
    allowed: float
    text: str


def gap(
    one: np.ndarray,
    other: np.ndarray,
    allowed: float,
    ignored: np.ndarray | None = None,
    names: tuple[str, str] = ("on one device", "over the mesh"),
) -> Gap | None:
    """Compares two arrays.

    Args:
        one: The array of the reference.
        other: The array under test.
        allowed: The largest absolute difference allowed. Integers, which nothing rounds, have to be
            equal.
        ignored: Boolean, in the arrays' shape: elements that are not compared.
        names: What the two are called in the text.

    Returns:
        How far they are apart, or None within the allowance. NaN equals NaN, infinity itself.
    """
    one, other = np.asarray(one), np.asarray(other)
    allowed = 0.0 if one.dtype.kind in "iub" else allowed
    scale = magnitude(one)
    for what in ("shape", "dtype"):
        left, right = getattr(one, what), getattr(other, what)
        if left != right:
            text = f"{what} {left} {names[0]}, {right} {names[1]}"
            return Gap(float("inf"), scale, allowed, text)
    differ = (one != other) & ~(np.not_equal(one, one) & np.not_equal(other, other))
    if ignored is not None:
        differ &= ~ignored
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(differ, np.abs(one.astype("float64") - other.astype("float64")), 0.0)
    # Not finite on one side; or integers that differ by less than float64 can tell.
    error = np.where(np.isnan(error), np.inf, np.where(differ & (error == 0), 1.0, error))
    worst = float(error.max()) if error.size else 0.0
    if worst <= allowed:
        return None
    at = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    where = f" at {list(at)}" if at else ""
    count = int((error > allowed).sum())
    more = f", {count} of {error.size} entries off" if error.size > 1 else ""
    text = f"{_number(one[at])} {names[0]}, {_number(other[at])} {names[1]}{where}{more}"
    return Gap(worst, scale, allowed, text)


def _number(value: np.generic) -> str:
    return f"{value:.12g}" if value.dtype.kind == "f" else str(value)


def compare(
    kind: Kind,
    name: str,
    one: np.ndarray,
    mesh: np.ndarray,
    allowed: float,
    ignored: np.ndarray | None = None,
) -> Difference | None:
    """Compares what one device and the mesh have; see `gap`.

    Args:
        kind: See `Difference`.
        name: See `Difference`.
        one: The array of one device.
        mesh: The array of the mesh.
        allowed: The largest absolute difference allowed.
        ignored: Boolean, in the array's shape: elements that are not compared.

    Returns:
        The difference, or None within the allowance.
    """
    found = gap(one, mesh, allowed, ignored)
    if found is None:
        return None
    return Difference(kind, name, found.error, found.scale, found.allowed, found.text)
