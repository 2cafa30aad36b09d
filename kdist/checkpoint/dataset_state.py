"""What a `PyDataset` remembers from one epoch to the next: the order that it draws itself, say.

Keras's own examples shuffle indices in `on_epoch_end`. A run that goes on has to have them, and the
random numbers that are drawn next.
"""

from __future__ import annotations

import copy
import io
import json
import random
from typing import Any

from kdist.checkpoint import remembered
from kdist.display.warn import warn

import keras
import numpy as np

LARGE = 64 * 2**20
"""An attribute of more bytes is data: a checkpoint does not hold it."""

SAMPLE = 4096
"""Elements of it that are looked at, to see whether it changes."""

STATE = "__state__"
"""Name of the array that has all that is no array."""

BATCHES = "len()"
"""Beside names of attributes: how many batches there are."""


class DatasetState:
    """The state of a dataset, if it has one.

    It has one if its class has `get_state()` and `set_state(state)`, or an `on_epoch_begin` or
    `on_epoch_end` of its own. With the former it says itself what it remembers, in JSON's types.
    With the latter what `Remembered` says is kept, and the generators that NumPy and Python draw
    from by default.

    Args:
        dataset: As it is before training.
    """

    def __init__(self, dataset: keras.utils.PyDataset) -> None:
        self.dataset = dataset
        self._says = hasattr(dataset, "get_state")
        self._changes = _changes_between_epochs(dataset)
        self._told: set[str] = set()
        self._remembered: remembered.Remembered | None = None
        self._samples: dict[str, Any] = {}
        self._sizes: dict[str, Any] = {}
        if self._changes and not self._says:
            self._remembered = remembered.Remembered(dataset, _small)
            self._samples = _samples(_large(dataset))
            self._sizes = {BATCHES: str(dataset.num_batches)} | _shapes(self._remembered.before)
            self._tell_others()

    def save(self) -> bytes | None:
        """The state now; None if there is none."""
        if not (self._says or self._changes):
            return None
        arrays: list[np.ndarray] = []
        state: dict[str, Any] = {}
        if self._remembered is None:
            state["own"] = self.dataset.get_state()
        else:
            self._tell_large()
            state["changed"] = kept = self._remembered.save(arrays)
            state["sizes"] = {k: v for k, v in self._sizes.items() if k in (BATCHES, *kept)}
        if self._changes:
            state["python"] = remembered.encode(random.getstate(), arrays)
            state["numpy"] = remembered.encode(np.random.get_state(legacy=False), arrays)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        file = io.BytesIO()
        members: Any = {STATE: text} | {str(n): one for n, one in enumerate(arrays)}
        np.savez(file, **members)
        return file.getvalue()

    def others(self, content: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sizes of the dataset that are others than those of the one that was saved.

        Returns:
            Number of batches, and shapes of arrays, before training: now, and then.
        """
        then = _opened(content)[0].get("sizes", {})
        names = [k for k, v in self._sizes.items() if then.get(k, v) != v]
        return {k: self._sizes[k] for k in names}, {k: then[k] for k in names}

    def load(self, content: bytes) -> None:
        """Gives the dataset a state that was saved."""
        state, arrays = _opened(content)
        if "own" in state:
            self.dataset.set_state(state["own"])
        if self._remembered is not None:
            self._remembered.load(state.get("changed", {}), arrays)
        if "python" in state:
            random.setstate(remembered.decode(state["python"], arrays))
            np.random.set_state(remembered.decode(state["numpy"], arrays))

    def end(self, goes_on: bool) -> None:
        """The run ends; see `Remembered.end`."""
        if self._remembered is not None:
            self._remembered.end(goes_on)

    def _tell_large(self) -> None:
        now = _samples(_large(self.dataset))
        self._tell([*remembered.changed(now, self._samples)], f"changed, more than {LARGE} bytes")

    def _tell_others(self) -> None:
        self._tell(remembered.other_attributes(self.dataset, ()), "no plain data")

    def _tell(self, names: list[str], why: str) -> None:
        new = sorted({*names} - self._told)
        if new:
            self._told.update(new)
            warn(
                f"{type(self.dataset).__name__} has an on_epoch_begin or on_epoch_end, and "
                "attributes that a checkpoint does not hold. If those change, a run that goes on "
                "has other batches: keep an order in an array of indices, or give it get_state() "
                f"and set_state(state). Received: {new}: {why}"
            )


def _opened(content: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What was saved, and its arrays."""
    with np.load(io.BytesIO(content)) as file:
        arrays = [file[str(n)] for n in range(len(file.files) - 1)]
        return json.loads(file[STATE].tobytes()), arrays


def _shapes(values: dict[str, Any]) -> dict[str, list[int]]:
    """Of those that are arrays."""
    return {k: list(v.shape) for k, v in values.items() if isinstance(v, np.ndarray)}


def _changes_between_epochs(dataset: keras.utils.PyDataset) -> bool:
    own, base = type(dataset), keras.utils.PyDataset
    return (
        own.on_epoch_begin is not base.on_epoch_begin or own.on_epoch_end is not base.on_epoch_end
    )


def _small(dataset: Any) -> dict[str, Any]:
    """Attributes that can be kept."""
    plain = remembered.plain_attributes(dataset, ())
    return {k: v for k, v in plain.items() if _bytes(v) <= LARGE}


def _large(dataset: Any) -> dict[str, Any]:
    """Those that could be if they were smaller."""
    plain = remembered.plain_attributes(dataset, ())
    return {k: v for k, v in plain.items() if _bytes(v) > LARGE}


def _bytes(value: Any) -> int:
    """About how much a checkpoint would hold."""
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    if isinstance(value, str):
        return len(value)
    return int(np.asarray(value).nbytes) if hasattr(value, "dtype") else 8


def _samples(values: dict[str, Any]) -> dict[str, Any]:
    """Some elements of each, so that nothing large is copied."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if hasattr(value, "dtype"):
            array = np.asarray(value)
            found[name] = array.flat[:: max(1, array.size // SAMPLE)]
        else:
            rows = list(value.values()) if isinstance(value, dict) else list(value)
            found[name] = copy.deepcopy(rows[:: max(1, len(rows) // SAMPLE)])
    return found
