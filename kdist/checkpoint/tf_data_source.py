"""A `tf.data.Dataset` as training data: its iterators are saved, and its shuffles go on."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdist.checkpoint.manifest import CheckpointError
from kdist.checkpoint.sources import DataSource
from kdist.display.warn import warn
from kdist.runtime.keras_contract import as_spec
from kdist.runtime.worker_data import FileIterator, WorkerIterator

import keras
import tensorflow as tf

STATE = "data-iterator"
"""Name of the files with the state of an iterator."""

MADE = "data-iterators-made"
"""Name of the file that says how many iterators had been made."""

READERS = "data-readers"
"""Name of the file that says how many processes read files of their own, where they do."""

SEEDS = b"num_random_samples"
"""What TensorFlow calls, in an iterator's state, how much a shuffle has drawn."""

_OF_EACH = "each process has an iterator of its own"


class Pipeline(DataSource):
    """A `tf.data.Dataset`.

    Every iterator that is made of a dataset draws the seeds of its shuffles from one sequence, so
    an epoch's order follows from how many there were before. That number is saved, and as many are
    made when a run goes on. Within an epoch the iterator's state is saved too, which says how far
    the sequence is, unless the last batches of the epoch wait in buffers: shuffles that have
    nothing left say nothing. Then is no moment to save; the end of the epoch is.

    Args:
        dataset: The user's.
        seed: See `DataSource`.
        one_iterator: Whether epochs share an iterator, as they do with `steps_per_epoch`. Its state
            is saved between epochs too.
    """

    def __init__(self, dataset: tf.data.Dataset, seed: int, one_iterator: bool = False) -> None:
        super().__init__(seed)
        self.spans_epochs = one_iterator
        self.made = 0
        self.dataset = self._counting(dataset)
        self._state: Mapping[str, bytes] = {}
        self._readers_before: int | None = None
        self._made_before = 0
        self._shuffles: int | None = None
        self._seen = 0
        self._cannot = False

    def _counting(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The same dataset, whose iterators are counted."""
        base: Any = type(dataset)

        def count(one: Any) -> Any:
            self.made += 1
            return base.__iter__(one)

        counted = copy.copy(dataset)
        counted.__class__ = type(base.__name__, (base,), {"__iter__": count})
        return counted

    @property
    def steps(self) -> int | None:
        """See `DataSource`."""
        size = int(self.dataset.cardinality())
        return size if size >= 0 else None

    def described(self) -> dict[str, Any]:
        """See `DataSource`."""
        return {
            "data": "a tf.data.Dataset",
            "batches": self.steps,
            "steps_per_epoch": self.given,
        }

    def example(self) -> Any:
        """See `DataSource`."""
        spec = self.dataset.element_spec
        return keras.tree.map_structure(as_spec, spec if isinstance(spec, tuple) else (spec,))

    def arguments(self) -> dict[str, Any]:
        """See `DataSource`."""
        return {"x": self.dataset}

    def resume(self, files: Mapping[str, bytes], total: int) -> None:
        """See `DataSource`."""
        super().resume(files, total)
        self._state = {name: files[name] for name in files if name.startswith(STATE + ".")}
        if self._state and hasattr(self.dataset, "read_by_workers"):
            self._state = {}  # of the one iterator there was
            self._tell(_OF_EACH)
        self._made_before = json.loads(files.get(MADE, b"0"))
        self._readers_before = json.loads(files[READERS]) if READERS in files else 1

    def start(self, epoch: int, skipped: int) -> None:
        """See `DataSource`."""
        super().start(epoch, skipped)
        self._seen = 0
        self.consumes = bool(skipped) and not self._state and not self.spans_epochs
        # The epoch's own comes after this.
        for _ in range(self._made_before - self.made - (1 if skipped else 0)):
            iter(self.dataset)
        self._made_before = 0

    def check(self, iterator: Any) -> None:
        """See `DataSource`."""
        before, now = self._readers_before, _readers(iterator)
        within = self.skipped or (self.spans_epochs and self.total)
        if not within or before in (None, now):
            return
        raise CheckpointError(
            "A run within an epoch goes on with the batches that the epoch had, and those of a "
            "tf.data.Dataset with AutoShardPolicy.FILE are others for each number of processes. "
            f"Start {before} process{'es' * (before != 1)}, go on from a checkpoint of the end of "
            "an epoch, or choose AutoShardPolicy.DATA, whose batches are the same for any number. "
            "Received: "
            f"{now} process{'es' * (now != 1)} to read now, and {before} before"
        )

    def take(self, iterator: Any) -> None:
        """See `DataSource`."""
        if self.spans_epochs and not self._state:
            for _ in range(self.total):
                next(iterator, None)
        if self._state:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in self._state.items():
                    (Path(folder) / name).write_bytes(content)
                tf.train.Checkpoint(iterator=iterator).read(f"{folder}/{STATE}")
            self._state = {}

    def see(self, iterator: Any) -> None:
        """See `DataSource`."""
        self._seen += 1
        if self._seen == 2 and self._shuffles is None and not self._cannot:
            self._shuffles = _shuffles(self._saved(iterator))

    def files(self, iterator: Any, within: bool) -> dict[str, bytes] | None:
        """See `DataSource`."""
        made = {MADE: json.dumps(self.made).encode()}
        if isinstance(iterator, FileIterator):
            made[READERS] = json.dumps(_readers(iterator)).encode()
        if self._cannot or not (within or self.spans_epochs):
            return made
        state = self._saved(iterator)
        if state and self._shuffles is not None and _shuffles(state) < self._shuffles:
            return None
        return {**state, **made}

    def _saved(self, iterator: Any) -> dict[str, bytes]:
        """The state of an iterator; {} if it has none that can be saved, which is told once."""
        if isinstance(iterator, WorkerIterator):
            self._tell(_OF_EACH)
            return {}
        with tempfile.TemporaryDirectory() as folder:
            try:
                tf.train.Checkpoint(iterator=iterator).write(f"{folder}/{STATE}")
            except tf.errors.OpError as error:
                self._tell(str(error.message).split("} ")[-1].split(" [Op")[0])
                return {}
            return {one.name: one.read_bytes() for one in Path(folder).iterdir()}

    def _tell(self, reason: str) -> None:
        if self._cannot:
            return
        self._cannot = True
        warn(
            "The position in this tf.data.Dataset cannot be saved. A run that goes on reads the "
            "epoch's batches once more and passes over them: it has to give the same ones in the "
            f"same order. Received: {reason}"
        )


def _readers(iterator: Any) -> int:
    """How many processes read files of their own; 1 where batches are those of one process."""
    return len(iterator.dataset.devices) if isinstance(iterator, FileIterator) else 1


def _shuffles(state: Mapping[str, bytes]) -> int:
    """Of how many shuffles a state says how much they have drawn."""
    return sum(content.count(SEEDS) for content in state.values())
