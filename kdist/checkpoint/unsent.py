"""What compressed gradients have not sent yet, dealt to other replicas.

PowerSGD's step follows from the replicas' gradients and errors by their sum alone (every factor is
a sum over replicas, and so is what errors add up to afterwards): whoever holds which error,
training goes on the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kdist.checkpoint.manifest import SavedArray
from kdist.checkpoint.store import Reader

import numpy as np

ERRORS = "errors"
_PATH = re.compile(r"(.*)/slice(\d+)")

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
