"""Warnings that show the user's own line."""

from __future__ import annotations

import sys
import warnings

_OURS = frozenset(
    ("kdist", "keras", "keras_hub", "tensorflow", "contextlib", "functools", "concurrent")
)
"""Packages through which a user's call comes here."""


def warn(text: str) -> None:
    """Warns at the line of the user's program that led here, `model.fit(...)` mostly.

    Args:
        text: What to say.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back and (frame.f_globals.get("__name__") or "").partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
