"""Functions of TensorFlow that are known as wholes, since what they consist of says too little."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from kdist.rows.values import Const, Mixed, Rows, Value

Known = Callable[[Any, Sequence[Value]], "Value | None"]
_NUMBER = re.compile(r"_\d+$")


def known_function(op: Any) -> Known | None:
    """What is known of the function of which an operation is the end; None for others.

    A function with a gradient of its own ends with an `IdentityN` of its results and arguments, in
    its own scope.
    """
    scope = op.name.rpartition("/")[0].rpartition("/")[2]
    return _FUNCTIONS.get(_NUMBER.sub("", scope)) if op.type == "IdentityN" else None


def _ctc_loss(op: Any, values: Sequence[Value]) -> Value | None:
    """The loss of each row, of its own scores, labels and lengths.

    `op` gives the losses, and what they are of: scores (time first), labels, their lengths, those
    of the scores.
    """
    arguments = list(zip(values[1:], (1, 0, 0, 0), strict=False))
    if len(values) != 5 or [t.shape.rank for t in op.inputs] != [1, 3, 2, 1, 1]:
        return None
    for value, _ in arguments:
        if isinstance(value, Mixed):
            return value
    rows = [(v, dim) for v, dim in arguments if isinstance(v, Rows)]
    constants = [(v, dim) for v, dim in arguments if isinstance(v, Const)]
    apart = all(v == Rows(dim) for v, dim in rows)
    alike = all(v.is_flat(dim) and v.power == 0 for v, dim in constants)
    known = rows and apart and alike and len(rows) + len(constants) == len(arguments)
    return Rows(0) if known else None


_FUNCTIONS: dict[str, Known] = {"ctc_loss_dense": _ctc_loss}
