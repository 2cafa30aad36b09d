"""Programs that cannot be expanded as they were traced: not at all, or not before another trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist._compat.pass_through import PassesThrough

import tensorflow as tf


class CannotExpand(PassesThrough):
    """The program cannot run over the inner axes; carries what of it.

    Args:
        what: It.
        of_batch: Whether it is about one kind of batch, and others may do.
    """

    def __init__(self, what: str, *, of_batch: bool = False) -> None:
        super().__init__(what)
        self.of_batch = of_batch


class Retrace(PassesThrough):
    """The program must be traced again.

    Args:
        gather_first: Whether with gradients gathered before they are cut.
    """

    def __init__(self, *, gather_first: bool = True) -> None:
        super().__init__()
        self.gather_first = gather_first


class Settled:
    """A `tf.function` that is made and traced anew as often as `Retrace` says.

    Nothing that was written into a graph that was given up ever runs. What raises `Retrace` sees to
    it that the next is another.

    Args:
        function: What to trace.
    """

    def __init__(self, function: Callable) -> None:
        self._function = function
        self._traced: Any = None

    def __call__(self, *args: Any) -> Any:
        """Calls it."""
        return self._use(lambda traced: traced(*args))

    def get_concrete_function(self, *specs: Any) -> Callable:
        """See `tf.function`."""
        concrete: Callable = self._use(lambda traced: traced.get_concrete_function(*specs))
        return concrete

    def _use(self, use: Callable[[Any], Any]) -> Any:
        while True:
            if self._traced is None:  # a new one, which may make variables
                self._traced = tf.function(self._function, autograph=False)
            try:
                return use(self._traced)
            except Retrace:
                self._traced = None
