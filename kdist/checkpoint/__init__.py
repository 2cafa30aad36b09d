"""Sharded checkpoints that any mesh restores, imported as `kdist.checkpoint`."""

from kdist.checkpoint.checkpoints import Restored, latest, restore, save
from kdist.checkpoint.manifest import CheckpointError
from kdist.checkpoint.one_file import consolidate

__all__ = ["CheckpointError", "Restored", "consolidate", "latest", "restore", "save"]
