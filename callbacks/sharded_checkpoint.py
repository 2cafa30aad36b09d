"""`ShardedCheckpoint`: saves training as it runs, and lets `fit` go on where a run stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from kdist.api.fitted_model import ArrangeAgain
from kdist.api.own_steps import has_own_step
from kdist.api.parallelize import Parallel
from kdist.api.preprocessed import preprocessed_specs
from kdist.checkpoint import beside
from kdist.checkpoint import directory as directories
from kdist.checkpoint import snapshot as snapshots
from kdist.checkpoint.callback_state import CallbackStates
from kdist.checkpoint.checkpoints import (
    PathLike,
    Restored,
    first_whole,
    is_count,
    refuse_another,
    target_of,
    tell_damaged,
)
from kdist.checkpoint.keras_description import KnownPlaces
from kdist.checkpoint.manifest import DamagedError, Manifest
from kdist.checkpoint.monitored import Monitored
from kdist.checkpoint.position import (
    ResumingCallbacks,
    SavedPosition,
    can_begin_again,
    check_data,
    check_execution,
    source_of,
)
from kdist.checkpoint.store import Compression
from kdist.checkpoint.writer import BackgroundWriter, write
from kdist.display.warn import warn
from kdist.runtime.keras_contract import is_built

import keras
import numpy as np


class ShardedCheckpoint(keras.callbacks.Callback):
    """Saves a parallelized model's training, and goes on with it in the middle of an epoch.

    A checkpoint holds weights, optimizer, statistics, seeds, metrics, the history, the other
    callbacks' states and the position in the data; see `kdist.checkpoint.save` for how it is
    written. With `resume=True`, `fit` begins where the newest checkpoint of the directory was
    saved, on whatever mesh the model is now, and ends with the history, batches and learning rates
    of a run that never stopped; without a checkpoint it begins at the beginning. A `fit` that does
    not resume numbers its steps on from the newest checkpoint there, or from the optimizer's count.

    So that batches are the same ones, the order of shuffled arrays, and of a `PyDataset`, follows
    from a seed that is drawn once from NumPy and saved. What a `PyDataset` changes itself between
    epochs is kept as callbacks' states are. Iterators of `tf.data` are saved
    themselves; give `shuffle` a seed, or call `keras.utils.set_random_seed`, for the epochs after
    the present one. Generators, and `tf.data` with Python functions inside, are read once more
    from the beginning, which a line says.

    Args:
        directory: Of checkpoints.
        every_steps: Training steps from one checkpoint to the next, and one at the end of the last
            epoch, if its loss is finite; None for one at the end of each epoch.
        keep: How many of the newest stay; None for all.
        asynchronous: Write in the background: training waits for the copy to host memory alone.
        monitor: A name in the logs; the checkpoint with its best value stays too. For one that only
            the logs of epochs have, as `val_loss`, each epoch's end is saved as well.
        mode: Whether less of it is better, or more; "auto" decides by the name.
        resume: Go on from the newest checkpoint, if there is one.
        compression: See `kdist.checkpoint.save`.

    Raises:
        ValueError: For values without a meaning.
        CheckpointError: In `fit`: the newest checkpoint there is of another model.

    Example:
        >>> saver = kdist.callbacks.ShardedCheckpoint("checkpoints", every_steps=500, resume=True)
        >>> model.fit(x, y, epochs=2, callbacks=[saver])
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        every_steps: int | None = None,
        keep: int | None = 3,
        asynchronous: bool = True,
        monitor: str | None = None,
        mode: Literal["auto", "min", "max"] = "auto",
        resume: bool = False,
        compression: Compression = "none",
    ) -> None:
        super().__init__()
        if every_steps is not None and not is_count(every_steps):
            raise ValueError(
                "every_steps is a number of training steps, or None for the end of each epoch. "
                f"Received: every_steps={every_steps!r}"
            )
        self._monitored = Monitored(monitor, mode)
        self.target = target_of(directory, keep, compression)
        self.every_steps = every_steps
        self.asynchronous = asynchronous
        self.monitor = monitor
        self.resume = resume
        self.restored: Restored | None = None
        """The checkpoint that the last `fit` went on from."""
        self._writer = BackgroundWriter()
        self._position: SavedPosition | None = None
        self._others: list[keras.callbacks.Callback] = []
        self._states: CallbackStates | None = None
        self._due = False
        self._before = 0
        self._seed = 0
        self._checked = False
        self._known = KnownPlaces()
        self._files: dict[str, bytes] = {}
        self._damaged: set[Path] = set()

    @property
    def best(self) -> float | None:
        """The best value of what is monitored, of the checkpoints so far."""
        return self._monitored.best[1]

    def arrange(self, parallel: Parallel, arguments: dict[str, Any]) -> dict[str, Any]:
        """Called by `fit` of a parallelized model before all else.

        Args:
            parallel: Of the model.
            arguments: Of `fit`, by name.

        Returns:
            The arguments that `fit` goes on with.
        """
        model = parallel.model
        self.restored = self._find(can_begin_again(arguments))
        progress = {} if self.restored is None else dict(self.restored.progress)
        self._checked = False
        if self.restored is None and (model.built or is_built(model)):
            self._refuse_another(model)
        self._seed = int(progress.get("seed", np.random.randint(2**31)))
        self._monitored.begin(tuple(progress.get("best", self._monitored.best)))
        self._before = self._steps_before(model)
        source, arguments = source_of(arguments, self._seed)
        position = SavedPosition(source, total=progress.get("total", 0))
        steps = arguments.get("steps_per_epoch") or source.steps
        check_execution(progress.get("batch", 0), model.steps_per_execution, steps)
        epoch, batch = self._first(position, progress, arguments, steps)
        others = [c for c in _as_list(arguments.get("callbacks")) if c is not self]
        self._position = parallel.position = position
        verbose = arguments.get("verbose", "auto")
        arguments["initial_epoch"] = epoch
        callbacks = ResumingCallbacks(
            [*others, self],
            position,
            lambda within: self._load(parallel, within, (epoch, batch)),
            (epoch, batch),
            verbose != 0,
            model,
            verbose=verbose,
            epochs=arguments.get("epochs", 1),
            steps=steps,
        )
        self._others = [
            one
            for one in callbacks.callbacks
            if one is not self and not isinstance(one, keras.callbacks.ProgbarLogger)
        ]
        if self.restored is not None:
            for one in others:
                if isinstance(one, keras.callbacks.CSVLogger):
                    one.append = True  # else it would empty the file of the run before
        return {**arguments, "callbacks": callbacks}

    def _first(
        self,
        position: SavedPosition,
        progress: dict[str, Any],
        arguments: dict[str, Any],
        steps: Any,
    ) -> tuple[int, int]:
        """The epoch to begin with, and how many batches of it are done.

        Args:
            position: With the data of this `fit`; they get to know how many batches are done.
            progress: Of the checkpoint; empty without one.
            arguments: Of `fit`; "epochs" is changed where the run before has ended.
            steps: Batches of an epoch, None if nobody knows.
        """
        epoch = progress.get("epoch", arguments.get("initial_epoch", 0))
        batch = progress.get("batch", 0)
        check_data(position.source, progress.get("data", {}), batch, steps)
        if self.restored is not None:
            if arguments.get("initial_epoch", 0) > epoch:
                warn(
                    "A run that goes on begins in the epoch of its checkpoint, not in "
                    "initial_epoch. To leave epochs out, kdist.checkpoint.restore(model, "
                    "directory), and fit without resume=True. Received: "
                    f"initial_epoch={arguments['initial_epoch']}; the checkpoint is of {epoch}"
                )
            position.source.resume(self._files, position.total)
            if progress.get("stopped"):
                epoch = arguments["epochs"] = max(arguments.get("epochs", 1), epoch)
        # Where no epoch begins, nothing waits for one.
        return epoch, batch if epoch < arguments.get("epochs", 1) else 0

    def _refuse_another(self, model: keras.Model) -> None:
        """Refuses a directory of another model: numbers would go on, and `keep` remove its own."""
        if not self._checked:
            refuse_another(model, directories.folders(self.target.directory)[-1:])
        self._checked = True

    def _find(self, can_begin_again: bool) -> Restored | None:
        """The checkpoint to go on from: its arrays are checked as they are loaded, if they may."""
        if not self.resume or not directories.folders(self.target.directory):
            return None

        def read(folder: Path, manifest: Manifest) -> None:
            self._files = directories.read_files(folder, manifest)
            if not can_begin_again:
                snapshots.check(folder, manifest)

        return first_whole(self.target.directory, None, read, self._damaged)

    def _steps_before(self, model: keras.Model) -> int:
        """Steps that were trained before those that this run, and what it resumes, counts."""
        if self.restored is not None:
            return self.restored.step - int(self.restored.progress.get("total", 0))
        there = directories.folders(self.target.directory)
        newest = directories.step_of(there[-1]) if there else 0
        return max(newest, beside.steps_of(model))

    def _load(self, parallel: Parallel, within: bool, first: tuple[int, int]) -> None:
        """Gives model and callbacks their states, once what callbacks do at the start is done.

        Within an epoch that is after its beginning, of which the run before has had the effects.
        """
        assert self._position is not None
        if not within:
            self._states = CallbackStates(self._others)
        assert self._states is not None
        if self.restored is None or within != bool(first[1]):
            return
        example = preprocessed_specs(parallel.model, self._position.source.example())
        if has_own_step(parallel.model, "train"):
            parallel.prepare_own(parallel.model.train_step, example)
        else:
            parallel.prepare("train", example)
        folder, manifest = self.restored.folder, self.restored.manifest
        try:
            snapshots.load(parallel.model, folder, manifest, within)
            arrays = snapshots.kept_arrays(folder, manifest)
        except DamagedError as error:
            self._damaged.add(folder)
            there = directories.folders(self.target.directory)[::-1]
            tell_damaged(error, [one for one in there if one not in self._damaged])
            raise ArrangeAgain from error
        self._states.load(manifest.progress.get("callbacks", []), arrays)

    def on_train_begin(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`.

        Raises:
            ValueError: The model is a plain one.
        """
        if self._position is None:
            raise ValueError(
                "ShardedCheckpoint needs a model that went through kdist.parallelize; for one "
                "device, kdist.ParallelConfig(mesh=kdist.mesh(data=1)). Received: "
                f"model={self.model.name!r}"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        if self._position is None:
            return
        self._monitored.see_step(logs or {})
        position, steps, every = self._position, self.params.get("steps"), self.every_steps
        if every is not None and position.total // every > position.last // every:
            self._due = True
        if self._due and position.batch != steps:
            self._save(position.epoch, position.batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        self._monitored.see_epoch(logs or {})
        last = epoch + 1 == self.params.get("epochs") or self.model.stop_training
        last = last and np.isfinite((logs or {}).get("loss", 0.0))  # else `keep` loses what it was
        if self.every_steps is None or self._due or last or self._monitored.of_epochs:
            self._save(epoch + 1, 0, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        self._monitored.end()
        self._writer.wait()

    def finish(self) -> None:
        """Called by `fit` at its end, also one by an error: waits for what is being written."""
        goes_on = self.restored is not None
        if self._position is not None:
            self._position.source.end(goes_on)
        if self._states is not None:
            self._states.end(goes_on)
        self._position = self._states = None
        self._known = KnownPlaces()
        self._files, self._damaged = {}, set()
        self._writer.wait()

    def _save(self, epoch: int, batch: int, logs: Any) -> None:
        assert self._position is not None and self._states is not None
        position = self._position
        self._refuse_another(self.model)
        step = self._before + position.total
        files = position.source.files(position.iterator, within=batch > 0)
        stopped = bool(self.model.stop_training)
        # Again after the next step; of a run that stops within an epoch, with the epoch's logs.
        self._due = files is None or (stopped and batch > 0)
        if files is None:
            return
        self._monitored.judge(step, logs or {})
        arrays: list[np.ndarray] = []
        progress = {
            "epoch": epoch,
            "batch": batch,
            "total": position.total,
            "data": position.source.described(),
            "seed": self._seed,
            "stopped": stopped,
            "best": self._monitored.best,
            "callbacks": self._states.save(arrays),
        }
        snapshot = snapshots.snapshot(
            self.model,
            step,
            progress,
            files,
            arrays,
            known=self._known,
            directory=self.target.directory,
        )
        best, metrics = self._monitored.best[0], dict(logs or {})

        def work() -> Path:
            # Now: the best may have been under way when this one was due.
            there = directories.folders(self.target.directory)
            also = [one for one in there if directories.step_of(one) == best]
            folder = write(snapshot, self.target, also)
            self.on_saved(folder, step, metrics)
            return folder

        if self.asynchronous:
            self._writer.start(work)
        else:
            work()

    def on_saved(self, folder: Path, step: int, logs: dict[str, Any]) -> None:
        """Called when a checkpoint is whole, by the thread that wrote it; for subclasses.

        Args:
            folder: Its folder.
            step: Training steps until it.
            logs: Metrics at that time.
        """


def _as_list(callbacks: Any) -> list[keras.callbacks.Callback]:
    if callbacks is None:
        return []
    found = getattr(callbacks, "callbacks", callbacks)
    return list(keras.tree.flatten(found))
