"""What one run of a batch gave, by kind and name, and the comparison of two runs. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kdist.verification.tolerance import KINDS, Difference, Kind, Tolerance, compare, magnitude

import numpy as np

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """What a batch gave on one device, or over the mesh. Every field is name -> array.

    Attributes:
        output: Outputs in inference mode.
        loss: The loss, and each of its parts: see `kdist.program.loss_parts`.
        metric: Metrics after the batch, in training mode.
        gradient: Of each trainable weight that has one, by path; None where none can be had.
        state: Statistics, seeds and counters of layers after one training step, by path.
        weight: Trainable weights after one training step, by path; None where none was made.
        slot: The optimizer's variables after it; None where none was made.
        training_output: Outputs in training mode, rows in the order of the batch; None where the
            pass does not give them.
    """

    output: Arrays
    loss: Arrays
    metric: Arrays
    gradient: Arrays | None
    state: Arrays
    weight: Arrays | None = None
    slot: Arrays | None = None
    training_output: Arrays | None = None

    def of(self, kind: Kind) -> Arrays | None:
        """The arrays of a kind."""
        return getattr(self, kind)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs, compared.

    Attributes:
        differences: What is out of tolerance, worst first.
        compared: Number of arrays of each kind that were compared.
    """

    differences: tuple[Difference, ...]
    compared: Mapping[str, int]

    @property
    def ok(self) -> bool:
        """Whether everything is within tolerance."""
        return not self.differences


def compare_runs(one: Observed, mesh: Observed, tolerance: Tolerance) -> Comparison:
    """Compares a run on one device with a run over the mesh.

    Args:
        one: The run on one device.
        mesh: The run over the mesh.
        tolerance: How far they may be apart.
    """
    found: list[Difference] = []
    compared: dict[str, int] = {}
    undecided = _undecided(one, mesh, tolerance)
    for kind in KINDS:
        left, right = one.of(kind), mesh.of(kind)
        if kind not in tolerance.relative or left is None or right is None:
            continue
        compared[kind] = len(left)
        found += _compare_kind(kind, left, right, tolerance, undecided)
    found.sort(key=lambda d: -d.excess)
    return Comparison(tuple(found), compared)


def _compare_kind(
    kind: Kind, one: Arrays, mesh: Arrays, tolerance: Tolerance, undecided: Arrays
) -> list[Difference]:
    found = []
    floor = tolerance.floor * max((magnitude(a) for a in one.values()), default=0.0)
    for name in [*one, *(name for name in mesh if name not in one)]:
        if name not in one or name not in mesh:
            where = "one device" if name in one else "the mesh"
            value = magnitude(one[name] if name in one else mesh[name])
            text = f"there on {where} alone"
            found.append(Difference(kind, name, float("inf"), value, floor, text))
            continue
        allowed = max(tolerance.relative[kind] * magnitude(one[name]), floor)
        ignored = None
        if kind in ("weight", "slot"):
            ignored = _ignored(name, np.shape(one[name]), undecided)
        difference = compare(kind, name, one[name], mesh[name], allowed, ignored)
        if difference is not None:
            found.append(difference)
    return found


def _undecided(one: Observed, mesh: Observed, tolerance: Tolerance) -> Arrays:
    """Which elements of each gradient are rounding alone, on both sides; zeros on both are not."""
    if one.gradient is None:
        return {}
    least = tolerance.decided * max((magnitude(g) for g in one.gradient.values()), default=0.0)
    found = {}
    for path, gradient in one.gradient.items():
        other = (mesh.gradient or {}).get(path, gradient)
        if np.shape(other) == np.shape(gradient):
            largest = np.maximum(np.abs(gradient), np.abs(other))
            found[path] = (largest <= least) & (largest != 0.0)
    return found


def _ignored(name: str, shape: tuple[int, ...], undecided: Arrays) -> np.ndarray | None:
    """Elements of a weight, or of a slot of one, whose gradient is rounding alone."""
    if name in undecided:
        return undecided[name]
    for path in sorted(undecided, key=len, reverse=True):  # block_up/kernel before up/kernel
        mask = undecided[path]
        if path.replace("/", "_") in name.replace("/", "_") and mask.shape == shape:
            return mask
    return None
