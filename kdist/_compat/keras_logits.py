"""What a softmax or a sigmoid made a tensor of: Keras's cross-entropies start from there.

Keras keeps it in a private attribute of the tensor, or finds it by the operation that made that.
Neither survives where a tensor is put together from parts, and probabilities are clipped then;
`tests/_compat/test_keras_logits.py` fails by name when one of them moves.
"""

from __future__ import annotations

from typing import Any

from kdist._compat.custom_gradients import standing_for

import tensorflow as tf

_LOGITS = "_keras_logits"
_MADE_BY = {"Softmax": tf.nn.softmax, "Sigmoid": tf.nn.sigmoid}
KINDS = (_LOGITS, *_MADE_BY)
"""How Keras knows logits. Each loss looks for one operation, and takes any that are kept."""


def get_logits(tensor: Any) -> tuple[int, Any] | None:
    """How a tensor's logits are known, an index into `KINDS`, and they; None if it has none."""
    kept = getattr(tensor, _LOGITS, None)
    if kept is not None:
        return 0, kept
    if not tf.is_symbolic_tensor(tensor) or tensor.op.type not in _MADE_BY:
        return None
    return KINDS.index(tensor.op.type), tensor.op.inputs[0]


def with_logits(tensor: Any, kind: int, logits: Any) -> Any:
    """The tensor, or its equal, for which Keras finds these logits in this way.

    Op by op Keras finds none by operation. A gradient of the equal is one of the tensor, as on one
    device: somebody may ask for that, and the logits get what comes to themselves.
    """
    if kind:
        if not tf.is_symbolic_tensor(tensor):
            return tensor
        return standing_for(tensor, lambda: _MADE_BY[KINDS[kind]](logits))
    setattr(tensor, _LOGITS, logits)
    return tensor
