"""What compressed gradients have not sent yet, dealt to other replicas.

PowerSGD's step follows from the replicas' gradients and errors by their sum alone (every factor is
a sum over replicas, and so is what errors add up to afterwards): whoever holds which error,
training goes on the same. With other inner axes errors are cut and joined as the weights are; then
factors, which belong to the parts of before, begin anew.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.checkpoint.manifest import SavedArray
from kdist.checkpoint.store import Reader
from kdist.sharding.placement import Index, overlap, relative, shape_of

import numpy as np

ERRORS = "errors"
_PATH = re.compile(r"(.*)/slice(\d+)")
_NAME = re.compile(r"(\d+)(\[.*\])/(\w+)")

Families = dict[str, dict[int, Any]]
"""What is kept, without the replica -> by replica."""


def families(named: Sequence[tuple[str, Any]]) -> Families:
    """Variables, or arrays, by their paths."""
    found: Families = {}
    for path, one in named:
        if (parts := _PATH.fullmatch(path)) is None:
            return {}
        found.setdefault(parts[1], {})[int(parts[2])] = one
    return {name: dict(sorted(kept.items())) for name, kept in found.items()}


def can_be_dealt(saved: Families, wanted: Families) -> bool:
    """Whether the same parts of the same gradients are compressed alike, by other replicas."""
    return (
        bool(saved)
        and saved.keys() == wanted.keys()
        and all(
            {tuple(one.shape) for one in saved[name].values()}
            == {tuple(one.shape) for one in kept.values()}
            for name, kept in wanted.items()
        )
    )


def deal(saved: Families, wanted: Families, reader: Reader) -> None:
    """Gives each replica the error of one; the first has those of all that are no more, too.

    Args:
        saved: Arrays of a checkpoint.
        wanted: The variables that get values.
        reader: Of the checkpoint.
    """
    for name, kept in wanted.items():
        arrays: list[SavedArray] = list(saved[name].values())
        for n, variable in enumerate(kept.values()):
            if not name.endswith(f"/{ERRORS}"):
                variable.assign(reader.read(arrays[0]))  # the same on all
            elif n >= len(arrays):
                variable.assign(np.zeros(arrays[0].shape))
            else:
                more = arrays[len(kept) :] if n == 0 else []
                variable.assign(sum((reader.read(one) for one in more), reader.read(arrays[n])))


def can_be_cut(saved: Families, wanted: Families, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether errors were kept of the same gradients, in whatever parts.

    Args:
        saved: Arrays of a checkpoint.
        wanted: The variables that get values.
        shapes: Of the model's trainable weights.
    """
    before, now = (_boxes(one, shapes) for one in (saved, wanted))
    return bool(before) and before.keys() == now.keys()


def cut(
    saved: Families, wanted: Families, shapes: Sequence[tuple[int, ...]], reader: Reader
) -> None:
    """Gives the first replica the sum of all errors, by the parts that there are now.

    Args:
        saved: Arrays of a checkpoint.
        wanted: The variables that get values; see `can_be_cut`.
        shapes: Of the model's trainable weights.
        reader: Of the checkpoint.
    """
    before = _boxes(saved, shapes)
    for position, boxes in _boxes(wanted, shapes).items():
        for name, box in boxes.items():
            total = np.zeros(shape_of(box))
            for other, there in before[position].items():
                if (both := overlap(box, there)) is None:
                    continue
                for array in saved[other].values():
                    part = reader.read(array).reshape(shape_of(there))
                    total[relative(both, box)] += part[relative(both, there)]
            for n, variable in enumerate(wanted[name].values()):
                value = total.reshape(variable.shape)
                variable.assign(value if n == 0 else np.zeros_like(value))


def _boxes(kept: Families, shapes: Sequence[tuple[int, ...]]) -> Mapping[int, Mapping[str, Index]]:
    """Position of a weight -> name of its errors -> the part of the weight that they are of.

    Empty if these are not parts of such weights. Parts lie in a grid: each goes on to where the
    next begins.
    """
    starts: dict[int, dict[str, tuple[int, ...]]] = {}
    for name in kept:
        if (parts := _NAME.fullmatch(name)) is not None and parts[3] == ERRORS:
            starts.setdefault(int(parts[1]), {})[name] = tuple(json.loads(parts[2]))
    found: dict[int, dict[str, Index]] = {}
    for position, by_name in starts.items():
        shape = shapes[position] if position < len(shapes) else ()
        if any(len(start) != len(shape) for start in by_name.values()):
            return {}
        edges = [[*sorted(set(along)), n] for along, n in zip(zip(*by_name.values()), shape)]
        found[position] = {
            name: tuple(
                slice(a, ends[ends.index(a) + 1]) for a, ends in zip(start, edges, strict=True)
            )
            for name, start in by_name.items()
        }
        for name, box in found[position].items():
            sizes = {math.prod(one.shape) for one in kept[name].values()}
            if sizes != {math.prod(shape_of(box))}:
                return {}
    return found
