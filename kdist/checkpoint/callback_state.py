"""What callbacks remember: attributes of theirs that training has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist._compat.keras_callbacks import GIVEN_BY_FIT, begin_clock, of_the_process
from kdist.checkpoint import remembered
from kdist.checkpoint.remembered import Remembered
from kdist.display.warn import warn

import keras
import numpy as np

NOT_STATE = {*GIVEN_BY_FIT, "min_delta"}
"""Attributes that `fit` gives to every callback; and the one whose sign Keras's callbacks turn when
they find out, once in each run, which way their monitor is better."""


class CallbackStates:
    """The states of a list of callbacks.

    A callback with `get_state()` and `set_state(state)` says itself what it remembers, in JSON's
    types. Of others, Keras's included, attributes that hold numbers, texts, arrays, generators of
    NumPy and Python, or lists and dicts of these are kept once they differ from what they were when
    training began.

    Args:
        callbacks: In the order of the user's list; as they are before training.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self.callbacks = list(callbacks)
        self._remembered = [Remembered(one, _plain_attributes) for one in self.callbacks]
        self._told: set[type] = set()

    def save(self, arrays: list[np.ndarray]) -> list[dict[str, Any]]:
        """The states, in JSON's types. Names, once, a callback that holds more than that.

        Args:
            arrays: Gets the arrays, such as the best weights that `EarlyStopping` keeps.
        """
        return [self._save(one, arrays) for one in self._remembered]

    def _save(self, one: Remembered, arrays: list[np.ndarray]) -> dict[str, Any]:
        callback, kind = one.owner, type(one.owner).__name__
        if hasattr(callback, "get_state"):
            return {"class": kind, "own": callback.get_state()}
        self._tell(callback)
        return {"class": kind, "changed": one.save(arrays)}

    def _tell(self, callback: Any) -> None:
        own = type(callback).__module__.split(".")[0]
        if own in ("keras", "kdist") or type(callback) in self._told:
            return
        rest = remembered.other_attributes(callback, NOT_STATE)
        if rest:
            self._told.add(type(callback))
            warn(
                f"{type(callback).__name__} holds what a checkpoint cannot keep: attributes "
                f"{rest}. They begin anew when training goes on. If they matter, give it "
                "get_state() and set_state(state)."
            )

    def load(self, states: Sequence[dict[str, Any]], arrays: Sequence[np.ndarray]) -> None:
        """Gives callbacks their states again: each that of the next one of its class."""
        left = list(states)
        missing = []
        for one in self._remembered:
            callback, kind = one.owner, type(one.owner).__name__
            state = next((s for s in left if s["class"] == kind), None)
            if state is None:
                missing.append(kind)
                continue
            left.remove(state)
            if "own" in state:
                callback.set_state(state["own"])
            else:
                one.load(state.get("changed", {}), arrays)
            begin_clock(callback)
        gone = [s["class"] for s in left if s.get("changed") or s.get("own")]
        if missing or gone:
            warn(
                "Callbacks differ from those of the run that goes on. "
                f"Without a saved state: {missing}; saved, and not there: {gone}"
            )

    def end(self, goes_on: bool) -> None:
        """The run ends; see `Remembered.end`."""
        for one in self._remembered:
            one.end(goes_on)


def _plain_attributes(callback: Any) -> dict[str, Any]:
    return remembered.plain_attributes(callback, NOT_STATE | of_the_process(callback))
