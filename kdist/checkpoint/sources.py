"""Where training data comes from, so that a run can go on in the middle of an epoch.

Each source knows how to give an epoch from any of its batches on. Keras's own order of shuffled
arrays cannot be known before, or repeated: here it follows from a seed and the epoch alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from kdist.checkpoint.array_rows import as_array, gathered, none_of, spec_of
from kdist.checkpoint.dataset_state import DatasetState
from kdist.checkpoint.manifest import CheckpointError
from kdist.display.warn import warn
from kdist.runtime.keras_contract import as_spec

import keras
import numpy as np
import tensorflow as tf

DATASET = "data-set"
"""Name of the file with what a `PyDataset` remembers."""


class DataSource:
    """The training data of one `fit`.

    Attributes:
        seed: What the order of shuffled epochs follows from.
        epoch: The epoch that is given now.
        skipped: Batches of it that have been trained on before.
        total: Batches that had been trained on before this `fit`.
        consumes: Whether steps that are passed over take a batch, an empty one.
        spans_epochs: Whether a position counts the batches of all epochs.
    """

    consumes = False
    spans_epochs = False

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.epoch = self.skipped = self.total = 0

    def arguments(self) -> dict[str, Any]:
        """What `fit` gets instead of its own data."""
        raise NotImplementedError

    def example(self) -> Any:
        """Specs of a batch: (x,), (x, y) or (x, y, sample_weight)."""
        raise NotImplementedError

    @property
    def steps(self) -> int | None:
        """Batches of an epoch, None if nobody knows."""
        raise NotImplementedError

    def described(self) -> dict[str, Any]:
        """What a position is one of: batches of other data are others."""
        raise NotImplementedError

    @property
    def given(self) -> str:
        """Whether epochs end where `steps_per_epoch` says, in words."""
        return "given" if self.spans_epochs else "not given"

    def start(self, epoch: int, skipped: int) -> None:
        """The next epoch, and how many of its batches are passed over."""
        self.epoch, self.skipped = epoch, skipped

    def resume(self, files: Mapping[str, bytes], total: int) -> None:
        """Goes on where another run stopped.

        Args:
            files: What `files` returned there.
            total: Batches that had been trained on.
        """
        self.total = total

    def check(self, iterator: Any) -> None:
        """Gets the first iterator, before the first step, passed over or not.

        Raises:
            CheckpointError: It does not give what the run that goes on had before.
        """

    def take(self, iterator: Any) -> None:
        """Gets the first iterator, before the first step that is not passed over."""

    def see(self, iterator: Any) -> None:
        """Gets the iterator of the present epoch, before each step."""

    def files(self, iterator: Any, within: bool) -> dict[str, bytes] | None:
        """State that is saved beside the arrays, if there is any.

        Args:
            iterator: Of the present epoch.
            within: Whether a run would go on within the epoch, not after it.

        Returns:
            Name -> content; None if this is no moment to save, and the end of the epoch is.
        """
        return {}

    def end(self, goes_on: bool) -> None:
        """The run ends, also by an error.

        Args:
            goes_on: Whether it went on where another stopped.
        """


def other_data(now: Mapping[str, Any], before: Mapping[str, Any]) -> CheckpointError:
    """The error of a run that would go on among the batches of data that are others."""
    return CheckpointError(
        "A run that stopped among the batches of its data goes on with the next of them. Give fit "
        "the data, batch_size, shuffle and steps_per_epoch that it had; or begin an epoch with "
        "others: kdist.checkpoint.restore(model, directory), then fit without resume=True. "
        f"Received: {listed(now)}; before: {listed(before)}"
    )


def listed(values: Mapping[str, Any]) -> str:
    """As keyword arguments."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


class Arrays(DataSource):
    """Arrays in memory, cut into batches in an order of their own for each epoch."""

    consumes = True

    def __init__(
        self, data: tuple[Any, ...], batch_size: int, shuffle: Any, endless: bool, seed: int
    ) -> None:
        super().__init__(seed)
        self.data = keras.tree.map_structure(as_array, data)
        self.rows = int(keras.tree.flatten(self.data)[0].shape[0])
        self.batch_size = batch_size
        self.shuffle = shuffle if isinstance(shuffle, str) else bool(shuffle)
        self.consumes = not endless
        self.spans_epochs = endless

    @property
    def steps(self) -> int | None:
        """See `DataSource`."""
        return None if self.spans_epochs else math.ceil(self.rows / self.batch_size)

    def described(self) -> dict[str, Any]:
        """See `DataSource`."""
        kept = {"rows": self.rows, "batch_size": self.batch_size, "shuffle": self.shuffle}
        return {"data": "arrays", **kept, "steps_per_epoch": self.given}

    def example(self) -> Any:
        """See `DataSource`."""
        return keras.tree.map_structure(spec_of, self.data)

    def arguments(self) -> dict[str, Any]:
        """See `DataSource`."""
        numbers = tf.data.Dataset.from_generator(
            self._batches, output_signature=tf.TensorSpec([None], tf.int64)
        )
        rows = numbers.map(
            lambda n: keras.tree.map_structure(lambda t: gathered(t, n), self.data),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        size = tf.data.INFINITE_CARDINALITY if self.steps is None else self.steps
        rows = rows.apply(tf.data.experimental.assert_cardinality(size))
        data = {"x": rows.prefetch(tf.data.AUTOTUNE), "y": None, "sample_weight": None}
        return {**data, "shuffle": False}

    def _batches(self) -> Iterator[np.ndarray]:
        """Row numbers of each batch; none of rows for those that are passed over."""
        if self.spans_epochs:
            per_pass = math.ceil(self.rows / self.batch_size)
            for n in itertools.count(self.total):
                yield self.batch(*divmod(n, per_pass))
        assert self.steps is not None
        for n in range(self.steps):
            yield self.batch(self.epoch, n)[: 0 if n < self.skipped else None]

    def batch(self, epoch: int, number: int) -> np.ndarray:
        """The rows of a batch."""
        start = number * self.batch_size
        return self._order(epoch)[start : start + self.batch_size]

    def _order(self, epoch: int) -> np.ndarray:
        """The order of an epoch's rows; that of the last one is kept."""
        if getattr(self, "_known", (None,))[0] != epoch:
            self._known = epoch, self._shuffled(epoch)
        return self._known[1]

    def _shuffled(self, epoch: int) -> np.ndarray:
        rows = np.arange(self.rows)
        draw = np.random.default_rng((self.seed, epoch))
        if self.shuffle == "batch":
            whole = self.rows // self.batch_size * self.batch_size
            batches = draw.permutation(rows[:whole].reshape(-1, self.batch_size))
            return np.concatenate([batches.ravel(), rows[whole:]])
        return draw.permutation(rows) if self.shuffle else rows


class Indexed(DataSource):
    """A `keras.utils.PyDataset`, whose batches have numbers.

    Args:
        dataset: With a length, or endless.
        shuffle: Whether each pass over a dataset with a length has an order of its own.
        endless: Whether one pass follows the other, whatever the epoch.
        seed: See `DataSource`.
    """

    def __init__(
        self, dataset: keras.utils.PyDataset, shuffle: bool, endless: bool, seed: int
    ) -> None:
        super().__init__(seed)
        self.dataset, self.shuffle = dataset, shuffle
        self.spans_epochs = endless or dataset.num_batches is None
        self.consumes = not self.spans_epochs
        batches = dataset.num_batches  # an epoch's end may change it
        self._batches = None if batches is None else int(batches)
        self._first = dataset[0]
        self._state = DatasetState(dataset)
        self._saved: bytes | None = None
        self._of_epoch: bytes | None = None

    @property
    def steps(self) -> int | None:
        """See `DataSource`."""
        return None if self.spans_epochs else self.dataset.num_batches

    def described(self) -> dict[str, Any]:
        """See `DataSource`."""
        kept = {"batches": self._batches, "shuffle": self.shuffle}
        return {"data": "a PyDataset", **kept, "steps_per_epoch": self.given}

    def resume(self, files: Mapping[str, bytes], total: int) -> None:
        """See `DataSource`."""
        super().resume(files, total)
        self._saved = files.get(DATASET)

    def start(self, epoch: int, skipped: int) -> None:
        """See `DataSource`."""
        super().start(epoch, skipped)
        if self._saved is not None and self._is_of_these_data(self._saved):
            self._state.load(self._saved)
        if not skipped:
            self._saved = None

    def _is_of_these_data(self, saved: bytes) -> bool:
        """Whether it is; else it stays what it is, and the epoch that begins is one of its own."""
        now, before = self._state.others(saved)
        if now and (self.skipped or (self.spans_epochs and self.total)):
            raise other_data(now, before)
        if now:
            warn(
                f"{type(self.dataset).__name__} has other sizes than that of the run before: it "
                "begins with the order that it has now. "
                f"Received: {listed(now)}; before: {listed(before)}"
            )
        return not now

    def begin_epoch(self) -> None:
        """Keras begins an epoch; in one that goes on, it has been begun by the run before."""
        self.dataset.on_epoch_begin()
        if self._saved is not None:
            self._state.load(self._saved)
            self._saved = None
        self._of_epoch = self._state.save()

    def files(self, iterator: Any, within: bool) -> dict[str, bytes] | None:
        """See `DataSource`."""
        state = self._of_epoch if within else self._state.save()
        return {} if state is None else {DATASET: state}

    def end(self, goes_on: bool) -> None:
        """See `DataSource`."""
        self._state.end(goes_on)

    def example(self) -> Any:
        """See `DataSource`."""
        first = self._first if isinstance(self._first, list | tuple) else (self._first,)
        return keras.tree.map_structure(as_spec, tuple(first))

    def arguments(self) -> dict[str, Any]:
        """See `DataSource`."""
        return {"x": Ordered(self), "shuffle": False}

    def __getitem__(self, number: int) -> Any:
        """A batch of the present epoch; an empty one in place of those that are passed over."""
        per_pass = self.dataset.num_batches
        if per_pass is None:
            return self.dataset[number + self.total]
        if self.spans_epochs:
            epoch, number = divmod(number + self.total, per_pass)
            return self.dataset[int(self.order(epoch)[number])]
        if number < self.skipped:
            return keras.tree.map_structure(none_of, self._first)
        return self.dataset[int(self.order(self.epoch)[number])]

    def order(self, epoch: int) -> np.ndarray:
        """The order of the batches of an epoch, or of a pass."""
        numbers = np.arange(self.dataset.num_batches)
        draw = np.random.default_rng((self.seed, epoch))
        return draw.permutation(numbers) if self.shuffle else numbers


class Ordered(keras.utils.PyDataset):
    """The batches of an indexed source, in its order."""

    def __init__(self, source: Indexed) -> None:
        inner = source.dataset
        super().__init__(inner.workers, inner.use_multiprocessing, inner.max_queue_size)
        self.source = source

    def __getitem__(self, index: int) -> Any:
        """See `keras.utils.PyDataset`."""
        return self.source[index]

    @property
    def num_batches(self) -> int | None:
        """See `keras.utils.PyDataset`."""
        return self.source.steps

    def on_epoch_begin(self) -> None:
        """See `keras.utils.PyDataset`."""
        self.source.begin_epoch()

    def on_epoch_end(self) -> None:
        """See `keras.utils.PyDataset`."""
        self.source.dataset.on_epoch_end()


class Generated(DataSource):
    """A generator: what it has given before is read once more and dropped."""

    spans_epochs = True

    def __init__(self, generator: Any, seed: int) -> None:
        super().__init__(seed)
        first = next(generator)
        self._first = first if isinstance(first, tuple) else (first,)
        self.generator = itertools.chain([first], generator)

    def described(self) -> dict[str, Any]:
        """See `DataSource`."""
        return {"data": "a generator"}

    @property
    def steps(self) -> int | None:
        """See `DataSource`."""
        return None

    def example(self) -> Any:
        """See `DataSource`."""
        return keras.tree.map_structure(as_spec, self._first)

    def arguments(self) -> dict[str, Any]:
        """See `DataSource`."""
        return {"x": (batch for batch in self.generator)}

    def resume(self, files: Mapping[str, bytes], total: int) -> None:
        """See `DataSource`.

        Raises:
            CheckpointError: It ends before.
        """
        super().resume(files, total)
        warn(
            f"A generator cannot be told where to begin: its first {total} batches are read once "
            "more and passed over. It has to give the same ones."
        )
        passed = sum(1 for _ in itertools.islice(self.generator, total))
        if passed < total:
            raise CheckpointError(
                "The generator ended before the batch at which training goes on. Give fit the "
                f"generator that the run began with. Received: {passed} batches of {total}"
            )
