"""Which of a step's calls of a layer are differentiated again: those from one place in its code."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from types import CodeType


def call_site(step: CodeType) -> Hashable:
    """The place in the Python code from which something is called, with who calls that.

    A step that is traced again comes by the same places; a loop comes by one of them many times.

    Args:
        step: Code of the function at which a step begins.
    """
    found, frame = [], inspect.currentframe()
    while frame is not None and frame.f_code is not step:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


class Again:
    """The calls that are differentiated again, by layer.

    A second place from which a layer is called so stands for all calls of the layer: each place
    that is found takes one more trace of the step.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[str, Hashable]] = {}

    def add(self, layer: object, site: Hashable, reason: str) -> None:
        """Notes that a call is.

        Args:
            layer: The layer.
            site: From where it was called.
            reason: By what it is differentiated.
        """
        self._found[id(layer)] = (reason, None if id(layer) in self._found else site)

    def reason(self, layer: object, site: Hashable) -> str:
        """By what a call is differentiated again, "" if it is not."""
        reason, only = self._found.get(id(layer), ("", None))
        return reason if only in (None, site) else ""
