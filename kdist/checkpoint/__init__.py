"""Sharded checkpoints that any mesh restores, imported as `kdist.checkpoint`."""

from kdist.checkpoint.checkpoints import Restored, latest, restore, save
from kdist.checkpoint.manifest import CheckpointError

__all__ = ["CheckpointError", "Restored", "latest", "restore", "save"]
