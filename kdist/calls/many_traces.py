"""Calls of a layer that share no trace, since something of Python differs from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import keras

MANY = 8
"""Traces of calls that are alike but for what is of Python, before that is told."""


class ManyTraces:
    """Counts them, and says once what differs.

    Args:
        tell: Tells the user something once.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._last: dict[Hashable, tuple[int, Any]] = {}

    def see(self, layers: Sequence[keras.Layer], kind: Hashable, python: Any) -> None:
        """Notes that a call is traced.

        Args:
            layers: The called layer, and those in it.
            kind: Equal for calls that are alike but for what is of Python.
            python: `CallArguments.python` of the call.
        """
        count, before = self._last.get(kind, (0, python))
        self._last[kind] = count + 1, python
        if count + 1 == MANY:
            name = layers[0].path or layers[0].name
            self._tell(
                f"Layer {name!r} has been traced {MANY} times, since "
                f"{_difference(layers, before, python)} differs from call to call: the first step "
                "takes as much longer. Make it a tensor that the call takes as an argument"
            )


def _difference(layers: Sequence[keras.Layer], one: Any, other: Any) -> str:
    """What differs first between two `CallArguments.python`."""
    (given, of_layers), (now_given, of_layers_now) = one, other
    if given != now_given:
        return "an argument that is no tensor"
    for layer, held, now in zip(layers, of_layers, of_layers_now):
        if held != now:
            changed = [name for name, _ in sorted({*held[1:]} ^ {*now[1:]}, key=_name)]
            where = f"of layer {layer.path or layer.name!r}"
            return f"attribute {changed[0]!r} {where}" if changed else f"what `call` {where} reads"
    return "what a layer in it is made of"


def _name(attribute: tuple[str, Any]) -> str:
    return attribute[0]
