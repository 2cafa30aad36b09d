"""The logits of a model's outputs, which losses and metrics over gathered outputs start from.

Keras's cross-entropies take the logits that a softmax or a sigmoid was made of, where they know
them; probabilities alone are clipped. So programs return logits beside the outputs, and they are
put back on what is gathered. They travel with what a pipeline stage sends on, and are laid out as
the probabilities are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._compat import keras_logits

import keras

_OF = "/its logits/"


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


def changed(tensor: Any, change: Callable[[Any], Any]) -> Any:
    """The tensor after a change that keeps its values, with its logits, which change alike."""
    made, known = change(tensor), keras_logits.get_logits(tensor)
    if known is None or made is tensor:
        return made
    return keras_logits.with_logits(made, known[0], change(known[1]))


def sent_with(name: str, tensor: Any) -> dict[str, Any]:
    """What is sent on beside a tensor, under names of its own, so that its logits are known."""
    known = keras_logits.get_logits(tensor)
    return {} if known is None else {f"{name}{_OF}{known[0]}": known[1]}


def received(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by name, without what `sent_with` added, which is put back on them."""
    found = {name: tensor for name, tensor in sent.items() if _OF not in name}
    made: dict[int, Any] = {}  # a layer may return its input itself: one tensor, two names
    for marked, logits in sent.items():
        name, of, kind = marked.rpartition(_OF)
        if of:
            whose = found[name]
            if id(whose) not in made:
                made[id(whose)] = keras_logits.with_logits(whose, int(kind), logits)
            found[name] = made[id(whose)]
    return found
