"""What callbacks remember: attributes of theirs that training has changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

from kdist._compat.keras_callbacks import begin_clock, of_the_process

import keras
import numpy as np
import tensorflow as tf

NOT_STATE = {"_model", "model", "params", "validation_data", "min_delta"}
"""Attributes that `fit` gives to every callback; and the one whose sign Keras's callbacks turn when
they find out, once in each run, which way their monitor is better."""

PLAIN = (bool, int, float, str, type(None))


class CallbackStates:
    """The states of a list of callbacks.

    A callback with `get_state()` and `set_state(state)` says itself what it remembers, in JSON's
    types. Of others, Keras's included, attributes that hold numbers, texts, arrays, or lists and
    dicts of these are kept once they differ from what they were when training began.

    Args:
        callbacks: In the order of the user's list; as they are before training.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self.callbacks = list(callbacks)
        self._before = [copy.deepcopy(_plain_attributes(one)) for one in self.callbacks]
        self._told: set[type] = set()

    def save(self, arrays: list[np.ndarray]) -> list[dict[str, Any]]:
        """The states, in JSON's types. Names, once, a callback that holds more than that.

        Args:
            arrays: Gets the arrays, such as the best weights that `EarlyStopping` keeps.
        """
        return [self._save(*pair, arrays) for pair in zip(self.callbacks, self._before)]

    def _save(
        self, callback: Any, before: dict[str, Any], arrays: list[np.ndarray]
    ) -> dict[str, Any]:
        kind = type(callback).__name__
        if hasattr(callback, "get_state"):
            return {"class": kind, "own": callback.get_state()}
        now = _plain_attributes(callback)
        self._tell(callback)
        changed = {k: v for k, v in now.items() if k not in before or not _same(v, before[k])}
        return {"class": kind, "changed": {k: encode(v, arrays) for k, v in changed.items()}}

    def _tell(self, callback: Any) -> None:
        own = type(callback).__module__.split(".")[0]
        if own in ("keras", "kdist") or type(callback) in self._told:
            return
        plain = _plain_attributes(callback)
        rest = [k for k, v in vars(callback).items() if k not in plain | dict.fromkeys(NOT_STATE)]
        rest = [k for k in rest if not callable(vars(callback)[k])]
        if rest:
            self._told.add(type(callback))
            warnings.warn(
                f"{type(callback).__name__} holds what a checkpoint cannot keep: attributes "
                f"{rest}. They begin anew when training goes on. If they matter, give it "
                "get_state() and set_state(state).",
                stacklevel=2,
            )

    def load(self, states: Sequence[dict[str, Any]], arrays: Sequence[np.ndarray]) -> None:
        """Gives callbacks their states again: each that of the next one of its class."""
        left = list(states)
        missing = []
        for callback in self.callbacks:
            kind = type(callback).__name__
            state = next((one for one in left if one["class"] == kind), None)
            if state is None:
                missing.append(kind)
                continue
            left.remove(state)
            if "own" in state:
                callback.set_state(state["own"])
            for name, value in state.get("changed", {}).items():
                setattr(callback, name, decode(value, arrays))
            begin_clock(callback)
        gone = [one["class"] for one in left if one.get("changed") or one.get("own")]
        if missing or gone:
            warnings.warn(
                "Callbacks differ from those of the run that goes on. "
                f"Without a saved state: {missing}; saved, and not there: {gone}",
                stacklevel=2,
            )


def _plain_attributes(callback: Any) -> dict[str, Any]:
    apart = NOT_STATE | of_the_process(callback)
    return {k: v for k, v in vars(callback).items() if k not in apart and _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return isinstance(value, PLAIN) or _is_array(value)


def _is_array(value: Any) -> bool:
    kept = isinstance(value, np.ndarray | np.generic) and value.dtype != object
    return kept or (isinstance(value, tf.Tensor) and hasattr(value, "numpy"))


def _same(a: Any, b: Any) -> bool:
    of_a: list[np.ndarray] = []
    of_b: list[np.ndarray] = []
    alike = encode(a, of_a) == encode(b, of_b) and len(of_a) == len(of_b)
    return alike and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(of_a, of_b))


def encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """Plain data in JSON's types; arrays are added to `arrays`, and known by their number."""
    if _is_array(value):
        arrays.append(np.asarray(value))
        return {"array": len(arrays) - 1}
    if isinstance(value, dict):
        return {"dict": {k: encode(v, arrays) for k, v in value.items()}}
    if isinstance(value, tuple):
        return {"tuple": [encode(one, arrays) for one in value]}
    return [encode(one, arrays) for one in value] if isinstance(value, list) else value


def decode(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    """The reverse of `encode`."""
    if isinstance(value, list):
        return [decode(one, arrays) for one in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]][()]
    if "tuple" in value:
        return tuple(decode(one, arrays) for one in value["tuple"])
    return {k: decode(v, arrays) for k, v in value["dict"].items()}
