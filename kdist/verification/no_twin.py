"""Why a model cannot be made again."""

from __future__ import annotations


class NoTwin(Exception):
    """The model cannot be made again; the message says why."""
