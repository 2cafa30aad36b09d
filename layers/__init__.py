"""Parallel layers of kdist, imported as `kdist.layers`."""

from .host_embedding import HostEmbedding
from .relayout import Relayout

__all__ = ["HostEmbedding", "Relayout"]
