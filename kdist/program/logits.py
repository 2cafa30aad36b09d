"""The logits of a model's outputs, which losses and metrics over gathered outputs start from.

Keras's cross-entropies take the logits that a softmax or a sigmoid was made of, where they know
them; probabilities alone are clipped. So programs return logits beside the outputs, and they are
put back on what is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdist._compat import keras_logits

import keras


def logits_of(outputs: Any) -> dict[int, Any]:
    """The logits of those flat outputs that have some, by position."""
    found = map(keras_logits.get_logits, keras.tree.flatten(outputs))
    return {i: logits for i, logits in enumerate(found) if logits is not None}


def with_logits(masks: Sequence[Any], logits: Mapping[int, Any]) -> list[Any]:
    """What lies on flat outputs: the mask of each, or None, and then its logits, or None."""
    return [*masks, *map(logits.get, range(len(masks)))]


def logits_among(marks: Sequence[Any]) -> dict[int, Any]:
    """The logits among what `with_logits` gave."""
    logits = marks[len(marks) // 2 :]
    return {i: one for i, one in enumerate(logits) if one is not None}


def attach_logits(outputs: Any, logits: Mapping[int, Any]) -> None:
    """Puts logits on the flat outputs of these positions."""
    flat = keras.tree.flatten(outputs)
    for i, one in logits.items():
        keras_logits.set_logits(flat[i], one)
