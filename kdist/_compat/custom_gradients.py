"""TensorFlow internals for functions with a gradient of their own.

`tf.custom_gradient` looks for the variables that a function reads, and asks its gradient for
theirs. What runs it, in a graph and op by op, can be replaced for a while.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.python.ops import custom_gradient

Run = Callable[[Callable, Any, Any], Any]
"""Calls a function, with arguments and those by name, so that its gradient is its own."""

_MODES = ("_graph_mode_decorator", "_eager_mode_decorator")


@contextlib.contextmanager
def run_by(instead: Callable[[Run, Callable, Any, Any], Any]) -> Iterator[None]:
    """Meanwhile, functions with a gradient of their own are run by another function.

    Args:
        instead: Takes what ran them so far, the function, its arguments, and those by name.
    """
    before = {name: getattr(custom_gradient, name) for name in _MODES}

    def replaced(run: Run) -> Run:
        return lambda function, args, kwargs: instead(run, function, args, kwargs)

    for name, run in before.items():
        setattr(custom_gradient, name, replaced(run))
    try:
        yield
    finally:
        for name, run in before.items():
            setattr(custom_gradient, name, run)


def is_of_library(function: Callable) -> bool:
    """Whether a function is TensorFlow's or Keras's own: these take all that they read."""
    return (function.__module__ or "").partition(".")[0] in ("tensorflow", "keras")
