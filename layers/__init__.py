"""Parallel layers of kdist, imported as `kdist.layers`."""

from .host_embedding import HostEmbedding
from .relayout import Relayout
from .split_embedding import SplitEmbedding

__all__ = ["HostEmbedding", "Relayout", "SplitEmbedding"]
