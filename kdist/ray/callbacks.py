"""What `fit` tells Ray Train: metrics, and checkpoints from which a run goes on."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from kdist.callbacks import ShardedCheckpoint as _ShardedCheckpoint
from kdist.checkpoint.store import Compression

import keras
import ray.train


class Report(keras.callbacks.Callback):
    """Reports the metrics of each epoch to Ray Train; `ShardedCheckpoint` reports them too.

    Example:
        >>> model.fit(x, y, epochs=10, callbacks=[kdist.ray.Report()])
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """See `keras.callbacks.Callback`."""
        ray.train.report(_numbers(logs) | {"epoch": epoch + 1})


class ShardedCheckpoint(_ShardedCheckpoint):
    """`kdist.callbacks.ShardedCheckpoint` whose checkpoints are Ray's.

    Each is written on the machine of process 0, in the background, then reported with the metrics
    of its step: Ray keeps it in the run's storage, as many as `ray.train.CheckpointConfig` says.
    `fit` goes on from the checkpoint that `ray.train.get_checkpoint` gives, on any number of
    workers. `kdist.checkpoint.restore(model, directory)` takes the directory of one.

    Args:
        every_steps: Training steps from one checkpoint to the next, and one at the end of the last
            epoch, if its loss is finite; None for one at the end of each epoch.
        asynchronous: Write and report in the background.
        compression: See `kdist.checkpoint.save`.

    Example:
        >>> saver = kdist.ray.ShardedCheckpoint(every_steps=500)
        >>> model.fit(x, y, epochs=10, callbacks=[saver])
    """

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        asynchronous: bool = True,
        compression: Compression = "none",
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kdist-ray-")
        super().__init__(
            self._folder.name,
            every_steps=every_steps,
            keep=1,
            asynchronous=asynchronous,
            resume=True,
            compression=compression,
        )

    def arrange(self, parallel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """See `kdist.callbacks.ShardedCheckpoint`."""
        newest = ray.train.get_checkpoint()
        if newest is not None:
            newest.to_directory(self._folder.name)
        return super().arrange(parallel, arguments)

    def on_saved(self, folder: Path, step: int, logs: dict[str, Any]) -> None:
        """See `kdist.callbacks.ShardedCheckpoint`."""
        ray.train.report(
            _numbers(logs) | {"step": step},
            checkpoint=ray.train.Checkpoint.from_directory(self._folder.name),
        )


def _numbers(logs: dict[str, Any] | None) -> dict[str, Any]:
    return {name: float(value) for name, value in (logs or {}).items()}
