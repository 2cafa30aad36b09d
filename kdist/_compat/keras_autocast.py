"""Keras internals for the scope in which variables say that they are of a layer's compute dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from keras.src.backend.common import global_state
from keras.src.backend.common.variables import get_autocast_scope


def without_autocast() -> AbstractContextManager:
    """Meanwhile, variables have the dtypes and values that they hold, whatever is being called."""
    return autocast_by(None)


def autocast_as_now(call: Callable) -> Callable:
    """A function, called with the autocast scope that runs now."""
    running = get_autocast_scope()

    def called(*args: Any, **kwargs: Any) -> Any:
        with autocast_by(running):
            return call(*args, **kwargs)

    return called


@contextlib.contextmanager
def autocast_by(scope: Any) -> Iterator[None]:
    """Sets the scope: in one that casts to None, Keras's variables say that they are of floatx."""
    before = get_autocast_scope()
    global_state.set_global_attribute("autocast_scope", scope)
    try:
        yield
    finally:
        global_state.set_global_attribute("autocast_scope", before)
