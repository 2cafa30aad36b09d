"""What a softmax or a sigmoid made a tensor of: Keras's cross-entropies start from there.

Keras keeps it in a private attribute of the tensor, or finds it by the operation that made that.
Neither survives where a tensor is put together from parts, and probabilities are clipped then;
`tests/_compat/test_keras_logits.py` fails by name when one of them moves.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_LOGITS = "_keras_logits"
_MADE_BY = ("Softmax", "Sigmoid")


def get_logits(tensor: Any) -> Any:
    """What Keras's cross-entropies take in the place of a tensor, or None."""
    known = getattr(tensor, _LOGITS, None)
    if known is not None or not tf.is_symbolic_tensor(tensor):
        return known
    return tensor.op.inputs[0] if tensor.op.type in _MADE_BY else None


def set_logits(tensor: Any, logits: Any) -> None:
    """Has Keras's cross-entropies take these in the place of a tensor."""
    setattr(tensor, _LOGITS, logits)
