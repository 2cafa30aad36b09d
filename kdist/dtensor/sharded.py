"""A tensor of a slice: one part per device, and the layout that says what they are parts of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist.dtensor import sizes
from kdist.dtensor.sizes import Examples
from kdist.sharding.placement import Index
from kdist.storage.parts import assemble

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor


@dataclasses.dataclass(frozen=True, eq=False)
class Sharded:
    """Parts of one tensor in a graph; what programs over inner axes, and stages, take and give.

    Attributes:
        parts: One per device of the slice, in the order of the mesh.
        layout: How they make up the whole; None of one part that is the whole.
        examples: What the whole may be, if the step is traced without knowing its shape.
    """

    parts: tuple[Any, ...]
    layout: dtensor.Layout | None = None
    examples: Examples | None = None

    @property
    def dtype(self) -> tf.DType:
        """Of the elements."""
        return tf.as_dtype(self.parts[0].dtype)

    @property
    def shape(self) -> tf.TensorShape:
        """Of the whole."""
        part = self.parts[0].shape
        if self.layout is None:
            return part
        counts = self.layout.num_shards
        known = [None if n is None else n * counts(d) for d, n in enumerate(part)]
        return tf.TensorShape(known)

    def whole(self, device: str) -> Any:
        """The tensor as one, on a device that alone needs it."""
        if self.layout is None:
            return self.parts[0]
        with tf.device(device):
            return tf.identity(self.joined())

    def joined(self) -> Any:
        """The tensor as one, put together in the device scope that is active."""
        if self.layout is None or self.layout.is_fully_replicated():
            return self.parts[0]
        return assemble(list(self._distinct(self.layout).values()))

    def _distinct(self, layout: dtensor.Layout) -> dict[tuple[int, ...], tuple[Index, Any]]:
        """Parts at different places, by where they begin."""
        mesh = layout.mesh
        found: dict[tuple[int, ...], tuple[Index, Any]] = {}
        for part, where in zip(self.parts, np.ndindex(*mesh.shape()), strict=True):
            index = []
            for axis, size in zip(layout.sharding_specs, part.shape, strict=True):
                # Where a size is not known, which part it is tells their order.
                size = 1 if size is None else size
                start = 0 if axis == dtensor.UNSHARDED else where[mesh.dim_names.index(axis)] * size
                index.append(slice(start, start + size))
            found.setdefault(tuple(i.start for i in index), (tuple(index), part))
        return found


def replicate(tensor: Any, mesh: dtensor.Mesh) -> Sharded:
    """The same value on every device."""
    tensor = tf.convert_to_tensor(tensor)
    layout = dtensor.Layout.replicated(mesh, tensor.shape.rank)
    return Sharded((tensor,) * mesh.size, layout, sizes.examples(tensor))


def each(function: Callable, devices: Sequence[str], first: Sharded, *others: Sharded) -> Sharded:
    """Applies a function to the parts on every device.

    Args:
        function: Of parts that are on one device; the result has the shape of the first.
        devices: Of the slice.
        first: A tensor.
        *others: Tensors that are laid out as it is.
    """
    parts = []
    for device, *there in zip(devices, first.parts, *(one.parts for one in others)):
        with tf.device(device):
            parts.append(function(*there))
    return dataclasses.replace(first, parts=tuple(parts))
