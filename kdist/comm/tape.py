"""A gradient tape for collectives across processes.

A backward pass sends messages, so every process must run the backward passes of the same
collectives, in the same order. A plain tape runs those that its loss depends on: a process that
gave its value away, and got no result, would run none. Here a *thread*, a zero that counts for
nothing, goes into and out of each collective of a tape. It ties all of them to every loss, and
backwards each one waits for the one after it. (ChainerMN's delegate variables, and mpi4jax's
tokens, are threaded by hand.)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from kdist.comm import processes

import tensorflow as tf


class _Active(threading.local):
    """The tapes that record in this Python thread, the innermost last."""

    def __init__(self) -> None:
        self.tapes: list[tuple[Any, GradientTape]] = []


_active = _Active()


class GradientTape(tf.GradientTape):
    """A `tf.GradientTape` that sees through every collective between processes.

    Every process makes one around the same collectives, in the same graph as them (eagerly, or
    inside the `tf.function`), and asks it for a gradient; the target is its own part of the loss,
    None where it has none. What a process gets is the gradient of the sum of all parts.

    Args:
        persistent: As of `tf.GradientTape`.
        watch_accessed_variables: As of `tf.GradientTape`.

    Example:
        >>> mesh, value = kdist.mesh(data=1), tf.constant([1.0, 2.0])  # or one of all processes
        >>> with kdist.comm.GradientTape() as tape:
        ...     tape.watch(value)
        ...     (total,) = kdist.comm.reduce([value], mesh, "data", root=0)
        ...     loss = None if total is None else tf.reduce_sum(total**2)
        >>> tape.gradient(loss, value).numpy().tolist()  # in all processes
        [2.0, 4.0]
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        super().__init__(persistent, watch_accessed_variables)
        self._begin: tf.Tensor | None = None
        self.thread: tf.Tensor | None = None

    def __enter__(self) -> GradientTape:
        super().__enter__()
        if self._begin is None:
            self._start()
        _active.tapes.append((_graph(), self))
        return self

    def __exit__(self, *error: Any) -> None:
        _active.tapes.remove((_graph(), self))
        super().__exit__(*error)

    def _start(self) -> None:
        around = thread()
        self._begin = self.thread = tf.zeros(()) if around is None else tf.identity(around)
        self.watch(self._begin)

    def reset(self) -> None:
        """As of `tf.GradientTape`."""
        super().reset()
        self._start()

    @contextlib.contextmanager
    def stop_recording(self) -> Iterator[None]:
        """As of `tf.GradientTape`; collectives inside have no backward pass."""
        kept = list(_active.tapes)
        _active.tapes.remove((_graph(), self))
        try:
            with super().stop_recording():
                yield
        finally:
            _active.tapes[:] = kept

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """As of `tf.GradientTape`; call it in every process.

        Args:
            target: This process's part of the loss, None where it has none.
            sources: As of `tf.GradientTape`.
            output_gradients: As of `tf.GradientTape`.
            unconnected_gradients: As of `tf.GradientTape`.

        Returns:
            Gradients of the sum of all processes' parts.

        Raises:
            PeerError: Eagerly, if another process does not take part.
        """
        targets = tf.nest.flatten(target)
        weights = [None] * len(targets)
        if output_gradients is not None:
            weights = tf.nest.flatten(output_gradients)
        pairs = [
            (part, tf.ones_like(part) if weight is None else weight)
            for part, weight in zip(targets, weights, strict=True)
            if part is not None
        ]
        # Backwards the thread is a zero again: that of the tape around, if there is one.
        around = thread()
        pairs.append((self.thread, tf.zeros(()) if around is None else around))
        eager = tf.executing_eagerly()
        with processes.named_errors() if eager else contextlib.nullcontext():
            found, back = super().gradient(
                [pair[0] for pair in pairs],
                [sources, self._begin],
                [pair[1] for pair in pairs],
                unconnected_gradients,
            )
        advance(back)
        return found


def thread() -> tf.Tensor | None:
    """The thread of the innermost tape that records in this graph."""
    here = _graph()
    return next((tape.thread for graph, tape in _active.tapes[::-1] if graph is here), None)


def advance(thread: tf.Tensor | None) -> None:
    """Goes on from here with the thread of all tapes that record in this graph."""
    here = _graph()
    for graph, tape in _active.tapes if thread is not None else ():
        if graph is here:
            tape.thread = thread


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
