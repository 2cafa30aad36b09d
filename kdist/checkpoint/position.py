"""Where training is, epoch and batch, and how `fit` goes on from there.

Keras's loop always begins an epoch at its first batch. So the epoch in which a run stopped is
gone through from the start, and the steps that had been done are passed over: no callback hears
of them, nothing is computed, and no batch is read that need not be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kdist._compat import keras_trainer
from kdist.checkpoint.array_rows import as_array, between
from kdist.checkpoint.manifest import CheckpointError
from kdist.checkpoint.sources import Arrays, DataSource, Generated, Indexed, other_data
from kdist.checkpoint.tf_data_source import Pipeline

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass
class SavedPosition:
    """How far training has come; see `kdist.api.fitted_model`.

    Attributes:
        source: The training data.
        epoch: The present epoch.
        batch: Batches of it that have been trained on.
        total: Batches that have been trained on, in all epochs.
        last: As many before the last call of the train function.
        passed: Batches of this epoch that an earlier run had trained on.
        iterator: That of the data, once it has been seen.
    """

    source: DataSource
    epoch: int = 0
    batch: int = 0
    total: int = 0
    last: int = 0
    passed: int = 0
    iterator: Any = None
    _calls: int = 0
    _taken: bool = False

    def begin_epoch(self, epoch: int, passed: int) -> None:
        """A new epoch, some of whose batches are passed over."""
        self.epoch, self.batch, self.passed = epoch, passed, passed
        self._calls = 0
        self.source.start(epoch, passed)

    def advance(self, batch: int) -> None:
        """So many batches of the epoch have been trained on now."""
        self.last = self.total
        self.total += batch - self.batch
        self.batch = batch

    def passes(self, iterator: Any, batches: int) -> bool:
        """Whether a step is passed over; called by the train function at each step.

        Args:
            iterator: Of the data.
            batches: How many the step would take.
        """
        if self.iterator is None:
            self.source.check(iterator)
        self.iterator = iterator
        if self._calls < self.passed:
            self._calls += batches
            if self.source.consumes:
                for _ in range(batches):
                    next(iterator, None)
            return True
        if not self._taken:
            self._taken = True
            self.source.take(iterator)
        self.source.see(iterator)
        return False


class ResumingCallbacks(keras.callbacks.CallbackList):
    """The callbacks of a `fit` that may begin within an epoch.

    Args:
        callbacks: The user's, with the one that saves last.
        position: Where training is.
        begun: Called when `on_train_begin` has reached all, and when `on_epoch_begin` of the first
            epoch has; with whether it is the latter.
        first: Epoch and batch to begin with.
        add_progbar: See `keras.callbacks.CallbackList`.
        model: See there.
        params: See there.
    """

    def __init__(
        self,
        callbacks: list[keras.callbacks.Callback],
        position: SavedPosition,
        begun: Callable[[bool], None],
        first: tuple[int, int],
        add_progbar: bool,
        model: keras.Model,
        **params: Any,
    ) -> None:
        self.position, self._begun, self._first = position, begun, first
        self._passed: int | None = None
        super().__init__(callbacks, True, add_progbar, model, **params)
        # The one that saves comes after those that Keras added, so that it saves what they know.
        self.callbacks.append(self.callbacks.pop(len(callbacks) - 1))

    def on_train_begin(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        super().on_train_begin(logs)
        self._begun(False)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        passed = self._first[1] if epoch == self._first[0] and self._passed is None else 0
        self._passed = passed
        super().on_epoch_begin(epoch, logs)
        if passed:
            self._begun(True)
        # Last, as it makes iterators: whoever begins again has to find as many as there were.
        self.position.begin_epoch(epoch, passed)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        if batch >= self.position.passed:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        if batch < self.position.passed:
            return
        done = batch + 1 if self.position.source.steps is None else self._known(batch + 1)
        self.position.advance(done)
        super().on_train_batch_end(batch, logs)

    def _known(self, batches: int) -> int:
        """With several steps per call, the last call of an epoch may have fewer."""
        steps = self.params.get("steps")
        return batches if steps is None else min(batches, steps)


def source_of(arguments: Mapping[str, Any], seed: int) -> tuple[DataSource, dict[str, Any]]:
    """The training data of a call of `fit`, and the arguments to call it with.

    Args:
        arguments: Of `fit`, by name.
        seed: What the order of shuffled epochs follows from.

    Raises:
        CheckpointError: For data without positions.
    """
    changed = dict(arguments)
    x, y, weights = (changed.get(name) for name in ("x", "y", "sample_weight"))
    shuffle, steps = changed.get("shuffle", True), changed.get("steps_per_epoch")
    source: DataSource
    if isinstance(x, tf.data.Dataset):
        if changed.get("class_weight") is not None:
            # Iterators of what Keras would make of the dataset would not be counted.
            x = keras_trainer.class_weighted(x, changed["class_weight"])
            changed["class_weight"] = None
        source = Pipeline(x, seed, one_iterator=steps is not None)
    elif isinstance(x, keras.utils.PyDataset):
        source = Indexed(x, bool(shuffle), steps is not None, seed)
    elif hasattr(x, "__next__"):
        source = Generated(x, seed)
    else:
        source = _arrays(changed, x, y, weights, shuffle, steps, seed)
    changed |= source.arguments()
    return source, changed


def can_begin_again(arguments: Mapping[str, Any]) -> bool:
    """Whether the training data of `fit` is the same if it is asked for once more."""
    return not hasattr(arguments.get("x"), "__next__")


def _arrays(
    changed: dict[str, Any], x: Any, y: Any, weights: Any, shuffle: Any, steps: Any, seed: int
) -> Arrays:
    """Arrays; `changed` loses the batch size, which goes to the validation data, and the split."""
    # As tuples: what tf.data gets as a list is stacked to one tensor.
    packed = keras.utils.pack_x_y_sample_weight(x, y, weights)
    data = keras.tree.lists_to_tuples(packed)
    batch_size = int(changed.get("batch_size") or 32)
    share = changed.pop("validation_split", 0.0)
    if share and changed.get("validation_data") is None:
        data = keras.tree.map_structure(as_array, data)
        rows = int(keras.tree.flatten(data)[0].shape[0])
        at = int(np.floor(rows * (1 - share)))
        held_out = keras.tree.map_structure(lambda a: between(a, at, rows), data)
        changed["validation_data"] = held_out
        data = keras.tree.map_structure(lambda a: between(a, 0, at), data)
    by_class = changed.get("class_weight")
    if by_class is not None and y is not None and weights is None and not keras.tree.is_nested(y):
        # Of batches Keras would make them in float32, whatever the dtype.
        data = (*data, keras_trainer.weights_of_classes(data[1], by_class))
        changed["class_weight"] = None
    changed["batch_size"] = None
    changed["validation_batch_size"] = changed.get("validation_batch_size") or batch_size
    return Arrays(data, batch_size, shuffle, steps is not None, seed)


def check_execution(passed: int, per_call: int, steps: int | None) -> None:
    """Refuses to go on in the middle of what Keras computes in one call.

    Raises:
        CheckpointError: `steps_per_execution` differs from that of the run before.
    """
    if passed % per_call and passed != steps:
        raise CheckpointError(
            "The run was saved between steps that compile(steps_per_execution=...) now makes one "
            "call of. Compile as before, or with 1. Received: steps_per_execution="
            f"{per_call}, {passed} batches of the epoch done"
        )


def check_data(
    source: DataSource, before: Mapping[str, Any], batch: int, steps: int | None
) -> None:
    """Refuses to go on among the batches of other data than the run before had.

    Args:
        source: The data now.
        before: What `described` was of the data of the run before; empty if nobody knows.
        batch: Batches of the epoch that are done.
        steps: Batches of the epoch, None if nobody knows.

    Raises:
        CheckpointError: The position is among batches, and these are others now.
    """
    if not before or not (batch or source.spans_epochs):
        return
    now, was = source.described(), dict(before)
    if not batch:
        now.pop("steps_per_epoch", None)
    if now["data"] == was["data"]:
        both = [k for k in now if now[k] is not None and was.get(k) is not None]
        now, was = ({k: one[k] for k in both} for one in (now, was))
        if steps is not None and batch > steps:
            now["steps_per_epoch"], was["steps_per_epoch"] = steps, f"{batch} or more"
    others = {k: v for k, v in now.items() if was.get(k) != v}
    if others:
        raise other_data(others, {k: was.get(k) for k in others})
