"""Where each part of each weight is, as rectangles: what a picture of a plan's layouts shows."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kdist.sharding.placement import HOST, Coordinate, Index, Placement

if TYPE_CHECKING:
    from kdist.plan.plan import Plan

_NUMBER = re.compile(r"\d+")

Box = tuple[float, float, float, float]
"""Left, top, width and height of a part, of a whole whose sides are 1."""


@dataclasses.dataclass(frozen=True)
class LayoutCell:
    """What one device has of a weight.

    Attributes:
        stored: The parts that it stores between steps.
        updated: The parts that it updates, and keeps optimizer state of.
    """

    stored: tuple[Box, ...]
    updated: tuple[Box, ...]


@dataclasses.dataclass(frozen=True)
class LayoutRow:
    """A weight, or several of one shape that every device has the same parts of.

    Attributes:
        name: Path of the weight; of several with the numbers in which they differ, as `{0-3}`, or
            `*` where they differ in more than one place.
        shape: Its shape.
        count: How many weights there are.
        nbytes: Bytes of all of them, whole.
        cells: Per device.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    nbytes: int
    cells: tuple[LayoutCell, ...]


def columns(plan: Plan) -> list[tuple[str, str]]:
    """Device, and its coordinates on the mesh; the host last, if something is on it."""
    topology = plan.topology
    staged, replicated = topology.num_stages > 1, topology.data_size > 1
    found = []
    for one in topology.slices:
        for k, device in enumerate(one.devices):
            at = [f"stage {one.stage}"] * staged + [f"replica {one.index}"] * replicated
            inner = k
            coordinates = []
            for name, size in reversed(topology.inner_axes):
                inner, coordinate = divmod(inner, size)
                coordinates.append(f"{name} {coordinate}")
            found.append((device.removeprefix("/device:"), "\n".join(at + coordinates[::-1])))
    return found + [("host", "")] * plan.uses_host


def rows(plan: Plan) -> list[LayoutRow]:
    """Weights in the model's order; those that are alike but for numbers in their paths as one."""
    places: list[Coordinate] = [
        (s, k) for s, one in enumerate(plan.topology.slices) for k in range(len(one.devices))
    ]
    places += [HOST] * plan.uses_host
    updated: dict[tuple[int, Coordinate], list[Index]] = {}
    for unit in plan.units:
        weight = plan.trainable[unit.variable]
        part = unit.index(plan.weights[weight])
        updated.setdefault((weight, unit.owner), []).append(part)
    alike: dict[tuple, list[Placement]] = {}
    for position, one in enumerate(plan.weights):
        stored = {at: [s.index for s in one.shards if at in s.holders] for at in places}
        parts = [(stored[at], updated.get((position, at), [])) for at in places]
        shown = _shown_dims(one.shape, (i for pair in parts for some in pair for i in some))
        cells = tuple(
            LayoutCell(*(tuple(_box(i, one.shape, shown) for i in some) for some in pair))
            for pair in parts
        )
        alike.setdefault((_NUMBER.sub("*", one.path), one.shape, cells), []).append(one)
    return [
        LayoutRow(
            name=_joint_name([one.path for one in weights]),
            shape=shape,
            count=len(weights),
            nbytes=sum(one.nbytes for one in weights),
            cells=cells,
        )
        for (_, shape, cells), weights in alike.items()
    ]


def _joint_name(paths: Sequence[str]) -> str:
    """One name for paths that differ in numbers alone."""
    numbers = list(zip(*map(_NUMBER.findall, paths)))
    differ = [len(set(some)) > 1 for some in numbers]
    if sum(differ) == 1:
        joint = [f"{{{_ranges(some)}}}" if d else some[0] for some, d in zip(numbers, differ)]
    else:
        joint = ["*" if d else some[0] for some, d in zip(numbers, differ)]
    following = iter(joint)
    return _NUMBER.sub(lambda _: next(following), paths[0])


def _ranges(numbers: Iterable[str]) -> str:
    """Numbers in short: `0-3,6`."""
    found: list[list[int]] = []
    for n in sorted(map(int, numbers)):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _shown_dims(shape: Sequence[int], parts: Iterable[Index]) -> tuple[int | None, int | None]:
    """The dims drawn from top to bottom and from left to right: those that are cut first."""
    cut = {d for part in parts for d, i in enumerate(part) if i.stop - i.start < shape[d]}
    dims = sorted([*sorted(cut), *(d for d in range(len(shape)) if d not in cut)][:2])
    if len(dims) == 2:
        return dims[0], dims[1]
    return None, dims[0] if dims else None


def _box(part: Index, shape: Sequence[int], shown: tuple[int | None, int | None]) -> Box:
    (top, height), (left, width) = (_side(part, shape, dim) for dim in shown)
    return left, top, width, height


def _side(part: Index, shape: Sequence[int], dim: int | None) -> tuple[float, float]:
    if dim is None or not math.prod(shape):
        return 0.0, 1.0
    return part[dim].start / shape[dim], (part[dim].stop - part[dim].start) / shape[dim]
