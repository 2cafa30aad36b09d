"""Where an instruction of a pipeline begins and ends in the graph of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.storage.sparse import is_sparse

import tensorflow as tf

Ends = tuple[tf.Operation | None, tf.Operation | None]
"""The first and the last operation of an instruction, None where no graph computes it."""


def ends(tensors: Sequence[Any], sums: Sequence[Any] = ()) -> Ends:
    """The call that made some tensors, and what runs when they are there, and have been added.

    Args:
        tensors: Of one call.
        sums: The operations that add some of them to sums. The next call waits for these: a
            gradient is gone by then, and TensorFlow does not make one sum of all micro-batches',
            for which all would have to be there.
    """
    made = [(t.values if is_sparse(t) else t).parts for t in tensors if t is not None]
    if not made or tf.executing_eagerly():
        return None, None
    first = made[0][0].op
    return first, tf.group(first, *sums) if sums else first
