"""Parallel layers of kdist, imported as `kdist.layers`."""

from .distributed_embedding import DistributedEmbedding
from .host_embedding import HostEmbedding
from .relayout import Relayout
from .split_embedding import SplitEmbedding
from .tables import FeatureConfig, TableConfig

__all__ = [
    "DistributedEmbedding",
    "FeatureConfig",
    "HostEmbedding",
    "Relayout",
    "SplitEmbedding",
    "TableConfig",
]
