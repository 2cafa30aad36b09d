"""TensorFlow internals for shapes that `tf.Tensor.set_shape` alone knows.

- `tf.Tensor.set_shape` is wrapped meanwhile: what it adds stays with the tensor of the graph, and
  not with what is written of the graph, from which a rebuilt one infers its shapes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_NOTE = "_kdist_said_shapes"
_lock = threading.Lock()
_users = 0
_plain = tf.Tensor.set_shape


def _set_shape(tensor: Any, shape: Any) -> None:
    """`set_shape`, noting the shape that a tensor of a graph had before, if that said less."""
    if not hasattr(tensor, "graph"):
        return _plain(tensor, shape)
    before = tensor.shape
    _plain(tensor, shape)
    if _dims(before) != _dims(tensor.shape):
        _note(tensor, before)
    return None


def _dims(shape: tf.TensorShape) -> list[int | None] | None:
    """Comparable, which shapes with unknown sizes are not; None for an unknown rank."""
    return None if shape.rank is None else shape.as_list()


def _note(tensor: Any, before: tf.TensorShape) -> None:
    if not hasattr(tensor.graph, _NOTE):
        setattr(tensor.graph, _NOTE, {})
    noted(tensor.graph).setdefault((tensor.op.name, tensor.value_index), before)


def carry(tensor: Any, copy: Any) -> None:
    """Gives the copy of a tensor in another graph its shape, said of it if it was of the tensor.

    Of what follows from that, the copy knows as little; it was inferred, and will be again.
    """
    _plain(copy, tensor.shape)
    before = noted(tensor.graph).get((tensor.op.name, tensor.value_index))
    if before is not None:
        _note(copy, before)


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Meanwhile, graphs note which shapes of their tensors `set_shape` has said."""
    global _users
    with _lock:
        _users += 1
        tf.Tensor.set_shape = _set_shape
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                tf.Tensor.set_shape = _plain


def noted(graph: Any) -> dict[tuple[str, int], tf.TensorShape]:
    """What was known before: by name of an operation, and number of its output."""
    found: dict[tuple[str, int], tf.TensorShape] = getattr(graph, _NOTE, {})
    return found
