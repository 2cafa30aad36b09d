"""Rows that look into themselves: indices that begin with the row's own number.

`tf.gather_nd(x, tf.stack([tf.range(rows), last], axis=1))` takes from row i what row i chose. The
numbers of rows are a constant that differs along the batch, so that, where they meet the choice,
rows seem to meet; followed by the look-up they do not.
"""

from __future__ import annotations

from typing import Any

from kdist.rows.numbers import fixed

import numpy as np

MOST = 2**20
"""Numbers of rows that are looked at."""


def choice_after_own_number(indices: Any, batch: int) -> tuple[Any, list[Any]] | None:
    """Of indices, what joined the rows' own numbers and a choice, and the parts of the choice.

    Args:
        indices: A tensor, of `GatherNd`; its last dim is what joins.
        batch: The batch's size B.

    Returns:
        The operation and the other tensors that it joins; None where indices are made otherwise, or
        something else reads what is joined.
    """
    op = indices.op
    while op.type in ("Cast", "Identity") and len(op.outputs[0].consumers()) == 1:
        op = op.inputs[0].op
    rank = op.outputs[0].shape.rank if op.type in ("Pack", "ConcatV2") else None
    if not rank or len(op.outputs[0].consumers()) != 1:
        return None
    parts = list(op.inputs)
    if op.type == "Pack":
        axis = op.get_attr("axis")
    else:
        found = fixed(parts.pop())
        axis = None if found is None else int(found)
    if axis not in (-1, rank - 1) or not _are_row_numbers(parts[0], op.type, batch):
        return None
    return op, parts[1:]


def _are_row_numbers(tensor: Any, joined_by: str, batch: int) -> bool:
    """Whether all that stands at dim 0's place i is the number i."""
    shape = tensor.shape
    if not shape.rank or shape[0] != batch or (joined_by == "ConcatV2" and shape[-1] != 1):
        return False
    numbers = fixed(tensor, most=MOST)
    if numbers is None:
        return False
    own = np.arange(batch).reshape(-1, *[1] * (shape.rank - 1))
    return bool(np.all(numbers == own))
