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
    """The logits of those flat outputs that have some, by position in `with_logits`'s list."""
    flat = keras.tree.flatten(outputs)
    found = {}
    for i, tensor in enumerate(flat):
        known = keras_logits.get_logits(tensor)
        if known is not None:
            found[known[0] * len(flat) + i] = known[1]
    return dict(sorted(found.items()))


def with_logits(masks: Sequence[Any], logits: Mapping[int, Any]) -> list[Any]:
    """What lies on flat outputs: the mask of each, and its logits of each kind; None where not."""
    return [*masks, *map(logits.get, range(len(keras_logits.KINDS) * len(masks)))]


def logits_among(marks: Sequence[Any]) -> dict[int, Any]:
    """The logits among what `with_logits` gave."""
    logits = marks[len(marks) // (1 + len(keras_logits.KINDS)) :]
    return {i: one for i, one in enumerate(logits) if one is not None}


def attach_logits(outputs: Any, logits: Mapping[int, Any]) -> Any:
    """The outputs, or their equals, with these logits."""
    flat = keras.tree.flatten(outputs)
    for i, one in logits.items():
        kind, position = divmod(i, len(flat))
        flat[position] = keras_logits.with_logits(flat[position], kind, one)
    return keras.tree.pack_sequence_as(outputs, flat) if logits else outputs
