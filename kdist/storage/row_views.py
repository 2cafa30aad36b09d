"""Views on rows of local variables, which read and write them where they lie."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.sharding.placement import Index
from kdist.storage.variables import become_view, make_local

import keras
import tensorflow as tf


class RowsBacking(abc.ABC):
    """Backing of a view on rows of local variables, which are read and written where they lie.

    What is assigned between `hold` and `release` is kept in the graph instead, for the caller to
    write: the update assigns whole variables in the end, and rows written before would be written
    twice, after a copy of a buffer that other replicas may share.

    Args:
        parts: Local variables, and the rows of each (None for all).
    """

    def __init__(self, parts: Sequence[tuple[keras.Variable, slice | None]]) -> None:
        self.parts = list(parts)
        self._held_in: Any = None
        self._known: tuple[Any, Any] | None = None

    @abc.abstractmethod
    def joined(self, pieces: Sequence[Any]) -> Any:
        """The value, from the rows of each part."""

    def read(self) -> Any:
        """The rows, from the variables."""
        return self.joined([one.value if r is None else one.value[r] for one, r in self.parts])

    @abc.abstractmethod
    def write(self, value: Any) -> None:
        """Writes the rows to the variables."""

    def whole(self) -> Any:
        """The rows. Within one graph they are put together once after each write."""
        if self._known is not None and self.is_known:
            return self._known[1]
        value = self.read()
        if not tf.executing_eagerly():
            self._known = _context(), value
        return value

    def assign(self, value: Any) -> None:
        """Writes the rows, or keeps their value while they are held."""
        if self.held:
            self._known = _context(), value
        else:
            self.write(value)
            self._known = None

    @property
    def is_known(self) -> bool:
        """Whether the rows have been put together in the graph of now."""
        return self._known is not None and self._known[0] is _context()

    @property
    def held(self) -> bool:
        """Whether what is assigned now is kept."""
        return self._held_in is not None and self._held_in is _context()

    def hold(self) -> None:
        """From now on, in the graph of now, keeps what is assigned."""
        self._held_in = _context()

    def release(self) -> None:
        """Forgets what was kept: the caller has written it, and more."""
        self._held_in = self._known = None

    def forget(self) -> None:
        """Others have written."""
        self._known = None


def _context() -> Any:
    """The graph that is being built; another constant when executing eagerly."""
    return RowsBacking if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class Rows(RowsBacking):
    """Backing of a view on some rows of one local variable, in their shape.

    Args:
        local: A plain local variable.
        start: First row.
        stop: Row after the last.
    """

    def __init__(self, local: keras.Variable, start: int, stop: int) -> None:
        super().__init__([(local, slice(start, stop))])
        self.local = local
        self.start, self.stop = start, stop

    def joined(self, pieces: Sequence[Any]) -> Any:
        """See `RowsBacking`."""
        return pieces[0]

    def write(self, value: Any) -> None:
        """See `RowsBacking`."""
        target = keras_trainer.tf_variable(self.local)
        target[self.start : self.stop].assign(tf.cast(value, target.dtype))

    def gather(self, indices: Any) -> Any:
        """Some of the rows, without reading the others."""
        if self.held:
            return tf.gather(self.whole(), indices)
        moved = indices + tf.cast(self.start, indices.dtype)
        return tf.gather(keras_trainer.tf_variable(self.local), moved)

    def scatter(self, method: str, slices: tf.IndexedSlices) -> None:
        """Calls a scatter method of the variable with indices relative to these rows."""
        if self.held:
            self.assign(scattered(self.whole(), method, slices))
            return
        target = keras_trainer.tf_variable(self.local)
        moved = slices.indices + tf.cast(self.start, slices.indices.dtype)
        getattr(target, method)(tf.IndexedSlices(slices.values, moved))
        self.forget()


def scattered(value: Any, method: str, slices: tf.IndexedSlices) -> Any:
    """A tensor after what a scatter method of a variable does."""
    scatter = getattr(tf, f"tensor_{method}".replace("scatter", "scatter_nd"))
    return scatter(value, slices.indices[:, None], slices.values)


def rows_view(variable: keras.Variable, local: keras.Variable, rows: Index) -> keras.Variable:
    """A variable that reads and writes rows of a local variable, on the device in scope.

    Args:
        variable: The logical variable, for its path.
        local: The local variable that holds a shard of it.
        rows: One slice, of dim 0 of the local variable.
    """
    (span,) = rows
    view = make_local(variable, tf.zeros([span.stop - span.start, *local.shape[1:]], local.dtype))
    become_view(view, Rows(local, span.start, span.stop), None)
    return view
