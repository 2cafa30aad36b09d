"""Views on parts of local variables, rows as a rule, which read and write them where they lie."""

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
    """Backing of a view on parts of local variables, which are read and written where they lie.

    What is assigned between `hold` and `release` is kept in the graph instead, for the caller to
    write: the update assigns whole variables in the end, and rows written before would be written
    twice, after a copy of a buffer that other replicas may share.

    Args:
        parts: Local variables, and what of each: slices of its first dims (None for all).
    """

    def __init__(self, parts: Sequence[tuple[keras.Variable, Index | None]]) -> None:
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


def part_shape(local: keras.Variable, index: Index | None) -> tuple[int, ...]:
    """Shape of what `RowsBacking` has of a local variable."""
    shape = tuple(int(n) for n in local.shape)
    index = index or ()
    return (*(one.stop - one.start for one in index), *shape[len(index) :])


class RowView(RowsBacking):
    """Backing of a view on a part of one local variable, in its shape.

    Args:
        local: A plain local variable.
        index: See `RowsBacking`.
    """

    def __init__(self, local: keras.Variable, index: Index) -> None:
        super().__init__([(local, index)])
        self.local = local
        self.index = index

    def joined(self, pieces: Sequence[Any]) -> Any:
        """See `RowsBacking`."""
        return pieces[0]

    def write(self, value: Any) -> None:
        """See `RowsBacking`."""
        target = keras_trainer.tf_variable(self.local)
        target[self.index].assign(tf.cast(value, target.dtype))

    def gather(self, indices: Any) -> Any:
        """Some of the rows, without reading the others."""
        if self.held:
            return tf.gather(self.whole(), indices)
        moved = indices + tf.cast(self.index[0].start, indices.dtype)
        rows = tf.gather(keras_trainer.tf_variable(self.local), moved)
        return rows[(slice(None), *self.index[1:])] if len(self.index) > 1 else rows

    def scatter(self, method: str, slices: tf.IndexedSlices) -> None:
        """Calls a scatter method of the variable with indices relative to these rows."""
        if self.held:
            self.assign(scattered(self.whole(), method, slices))
            return
        target = keras_trainer.tf_variable(self.local)
        moved = slices.indices + tf.cast(self.index[0].start, slices.indices.dtype)
        if len(self.index) == 1:
            getattr(target, method)(tf.IndexedSlices(slices.values, moved))
        else:
            spans = [tf.range(i.start, i.stop, dtype=moved.dtype) for i in self.index[1:]]
            elements = tf.stack(tf.meshgrid(moved, *spans, indexing="ij"), -1)
            getattr(target, method.replace("scatter", "scatter_nd"))(elements, slices.values)
        self.forget()


def scattered(value: Any, method: str, slices: tf.IndexedSlices) -> Any:
    """A tensor after what a scatter method of a variable does."""
    scatter = getattr(tf, f"tensor_{method}".replace("scatter", "scatter_nd"))
    return scatter(value, slices.indices[:, None], slices.values)


def rows_view(variable: keras.Variable, local: keras.Variable, index: Index) -> keras.Variable:
    """A variable that reads and writes a part of a local variable, on the device in scope.

    Args:
        variable: The logical variable, for its path.
        local: The local variable that holds a shard of it.
        index: See `RowsBacking`.
    """
    view = make_local(variable, tf.zeros(part_shape(local, index), local.dtype))
    become_view(view, RowView(local, index), None)
    return view
