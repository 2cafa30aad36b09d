"""Several tensors, or rows of several variables, as one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kdist._compat import function_graphs, keras_trainer
from kdist.sharding.placement import Index
from kdist.storage.row_views import RowsBacking, part_shape
from kdist.storage.variables import become_view, make_local

import keras
import tensorflow as tf


def reshaped(tensor: Any, dims: Sequence[int]) -> Any:
    """A tensor in another shape, of which a graph has one node for all that take it."""
    return tf.reshape(tensor, function_graphs.shape_constant(dims))


def flat(tensors: Sequence[Any]) -> Any:
    """Tensors as one vector."""
    vectors = [t if len(t.shape) == 1 else reshaped(t, [-1]) for t in tensors]
    return vectors[0] if len(vectors) == 1 else tf.concat(vectors, 0)


def unflat(vector: Any, shapes: Sequence[Sequence[int]]) -> list[Any]:
    """The reverse of `flat`. What is a vector, as most of what is fused, stays as it is."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = [vector] if len(sizes) == 1 else tf.split(vector, sizes)
    return [p if len(s) == 1 else reshaped(p, s) for p, s in zip(parts, shapes)]


class FlatRows(RowsBacking):
    """Backing of a replica's vector of a bucket."""

    def joined(self, pieces: Sequence[Any]) -> Any:
        """See `RowsBacking`."""
        return flat(pieces)

    def write(self, value: Any) -> None:
        """See `RowsBacking`."""
        shapes = [part_shape(local, index) for local, index in self.parts]
        pieces = unflat(tf.cast(value, self.parts[0][0].dtype), shapes)
        for (local, index), piece in zip(self.parts, pieces):
            target = keras_trainer.tf_variable(local)
            (target if index is None else target[index]).assign(piece)


def flat_view(
    like: keras.Variable, parts: Sequence[tuple[keras.Variable, Index | None]]
) -> keras.Variable:
    """A variable that is a replica's vector of a bucket, on the device in scope.

    Args:
        like: A member, for its path.
        parts: See `RowsBacking`.
    """
    size = sum(math.prod(part_shape(local, index)) for local, index in parts)
    view = make_local(like, tf.zeros([size], parts[0][0].dtype))
    become_view(view, FlatRows(parts), None)
    return view


class Piece:
    """A part of a flat variable, in the shape of what it stands for.

    Args:
        flat: The variable.
        start: First element.
        shape: Shape of the part.
    """

    def __init__(self, flat: keras.Variable, start: int, shape: Sequence[int]) -> None:
        self.flat = flat
        self.start = start
        self.shape = tuple(shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the variable."""
        return self.flat.dtype

    @property
    def value(self) -> Any:
        """The part."""
        stop = self.start + math.prod(self.shape)
        return tf.reshape(tf.convert_to_tensor(self.flat.value)[self.start : stop], self.shape)

    def assign(self, value: Any) -> None:
        """Writes the part."""
        stop = self.start + math.prod(self.shape)
        whole = tf.convert_to_tensor(self.flat.value)
        middle = tf.reshape(tf.cast(value, whole.dtype), [-1])
        self.flat.assign(tf.concat([whole[: self.start], middle, whole[stop:]], 0))
