"""How strided slices index, dim by dim."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Indexing:
    """A strided slice without new axes and without an ellipsis, and the axes that come after it.

    Attributes:
        begin: Per dim of what is sliced.
        end: Per dim.
        strides: Per dim.
        masks: `begin_mask`, `end_mask` and `shrink_axis_mask`.
        new: Where the result has new axes, ascending.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    strides: tuple[int, ...]
    masks: Mapping[str, int]
    new: tuple[int, ...]

    @property
    def takes_all(self) -> bool:
        """Whether nothing but new axes is left of it."""
        return all(map(self.takes_all_of, range(len(self.begin))))

    def takes_all_of(self, dim: int) -> bool:
        """Whether a dim of what is sliced stays as it is."""
        begin, end, shrinks = (bool(mask >> dim & 1) for mask in self.masks.values())
        return begin and end and not shrinks and self.strides[dim] == 1


def indexing(
    attributes: Mapping[str, int], bounds: tuple[np.ndarray, np.ndarray, np.ndarray], rank: int
) -> Indexing:
    """Spells a strided slice out, dim by dim.

    Args:
        attributes: The operation's masks.
        bounds: `begin`, `end`, `strides`: one entry a dim, a new axis, or the ellipsis.
        rank: Of what is sliced.
    """
    begin, end, strides = bounds
    count = len(begin)
    bit = {key: [bool(mask >> i & 1) for i in range(count)] for key, mask in attributes.items()}
    named = sum(not n and not e for n, e in zip(bit["new_axis_mask"], bit["ellipsis_mask"]))
    left = rank - named
    rows: list[tuple[int, int, int]] = []
    masks = {"begin_mask": 0, "end_mask": 0, "shrink_axis_mask": 0}
    new, made = [], 0

    def whole(dims: int) -> int:
        for _ in range(dims):
            masks["begin_mask"] |= 1 << len(rows)
            masks["end_mask"] |= 1 << len(rows)
            rows.append((0, 0, 1))
        return dims

    for i in range(count):
        if bit["ellipsis_mask"][i]:
            made += whole(left)
            left = 0
        elif bit["new_axis_mask"][i]:
            new.append(made)
            made += 1
        else:
            for key in masks:
                masks[key] |= bit[key][i] << len(rows)
            rows.append((int(begin[i]), int(end[i]), int(strides[i])))
            made += not bit["shrink_axis_mask"][i]
    whole(left)
    begins, ends, steps = zip(*rows) if rows else ((), (), ())
    return Indexing(begins, ends, steps, masks, tuple(new))
