"""Layers that take rows of their tables from the scope that they are called in.

While programs are traced, a class stands between the class of an embedding and Keras's `Embedding`:
a `call` of the user's own runs as it is, and where it calls `super().call(ids)`, gets rows that
were fetched. What else reads the table is refused by name.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.storage.variables import backing_of

import keras
import tensorflow as tf
from keras import ops

_tables: contextvars.ContextVar[Any] = contextvars.ContextVar("tables", default=None)


@contextlib.contextmanager
def looking_up(layers: Sequence[keras.layers.Embedding], tables: Any = None) -> Iterator[None]:
    """Has layers take the rows of their tables from elsewhere than the variable.

    Within another such block it does nothing.

    Args:
        layers: The layers.
        tables: Has `look_up(layer, ids)`; by default what the scope has that they are called in.
    """
    fresh = [one for one in layers if not backing_of(one.embeddings).by_rows]
    before: list[Any] = [
        (type(one), one.__dict__.pop("call", None), one.embeddings.regularizer) for one in fresh
    ]
    for layer, (kind, _, _) in zip(fresh, before, strict=True):
        backing_of(layer.embeddings).by_rows = True
        # Of all rows; see `kdist.runtime.table_penalties`.
        layer.embeddings.regularizer = None
        object.__setattr__(layer, "__class__", _with_rows(kind))
    outer = _tables.set(tables) if fresh else None
    try:
        yield
    finally:
        if outer is not None:
            _tables.reset(outer)
        for layer, (kind, call, penalty) in zip(fresh, before, strict=True):
            backing_of(layer.embeddings).by_rows = False
            layer.embeddings.regularizer = penalty
            object.__setattr__(layer, "__class__", kind)
            layer.__dict__.pop("call", None)
            if call is not None:
                object.__setattr__(layer, "call", call)


@functools.cache
def _with_rows(kind: type) -> type:
    """A class of embeddings, with `_RowsOfScope` between it and Keras's."""
    bases = (_RowsOfScope,) if kind is keras.layers.Embedding else (kind, _RowsOfScope)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return types.new_class(kind.__name__, bases, exec_body=lambda body: body.update(named))


class _RowsOfScope(keras.layers.Embedding):
    """Looks up what the running scope has for it."""

    def call(self, inputs: Any) -> Any:
        """Rows that were fetched for these indices."""
        if isinstance(inputs, tf.SparseTensor | tf.RaggedTensor):
            raise ValueError(
                "A table on the host, or split by hand, is looked up with dense indices. Make them "
                "dense, with to_dense() or to_tensor(). "
                f"Received: layer {self.name!r} called with {inputs}"
            )
        _check_columns(self, inputs)
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else ops.cast(inputs, "int32")
        tables = _tables.get() or keras_trainer.running_scope().tables
        rows = tables.look_up(self, ids)
        return ops.cast(rows, self.compute_dtype)


def _check_columns(layer: keras.layers.Embedding, ids: Any) -> None:
    """Refuses ids without a column for each part, where each part looks up its own."""
    columns = backing_of(layer.embeddings).local_columns
    if columns is not None and (not ids.shape or ids.shape[-1] != columns):
        raise ValueError(
            "With local_columns the last dim of the ids has a column for each part of the table: "
            f"{columns}. Received: layer {layer.name!r} called with ids of shape {ids.shape}"
        )
