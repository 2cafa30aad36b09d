"""Parallel layers of kdist, imported as `kdist.layers`."""

from .relayout import Relayout

__all__ = ["Relayout"]
