"""Warnings that show the user's own line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_OURS = frozenset(
    ("kdist", "keras", "keras_hub", "tensorflow", "optree", "contextlib", "functools", "concurrent")
)
"""Packages through which a user's call comes here."""
_CONVERTED = "__autograph_generated_file"
"""In the names of files of what AutoGraph made of a user's function: gone when the program ends."""


def warn(text: str) -> None:
    """Warns at the line of the user's program that led here, `model.fit(...)` mostly.

    Args:
        text: What to say.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back and not _of_user(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _of_user(frame: FrameType) -> bool:
    package = (frame.f_globals.get("__name__") or "").partition(".")[0]
    return package not in _OURS and _CONVERTED not in frame.f_code.co_filename
