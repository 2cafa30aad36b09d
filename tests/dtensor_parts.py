"""DTensors made by hand, for the tests of what kdist does with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist import lowered, spmd
from kdist.mesh import Topology, mesh

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor


def inner_mesh(**axes: int) -> tuple[dtensor.Mesh, Topology]:
    """The DTensor mesh of the first slice, and the whole mesh."""
    topology = Topology.from_mesh(mesh(**axes))
    return spmd.make_mesh(topology.slices[0].devices, topology), topology


def cut(value: np.ndarray, over: dtensor.Mesh, *dims: str | None) -> Any:
    """An array as a DTensor; `dims` as in a layout, one axis a dim."""
    parts = []
    for place in np.ndindex(*over.shape()):
        part = value
        for dim, axis in enumerate(dims):
            if axis is not None:
                position = over.dim_names.index(axis)
                part = np.split(part, over.shape()[position], axis=dim)[place[position]]
        parts.append(tf.constant(part))
    return spmd.pack(parts, dtensor.Layout([axis or dtensor.UNSHARDED for axis in dims], over))


def whole(tensor: Any, mesh: dtensor.Mesh) -> np.ndarray:
    """The value of a DTensor, gathered."""
    gathered = dtensor.relayout(tensor, dtensor.Layout.replicated(mesh, tensor.shape.rank))
    return dtensor.unpack(gathered)[0].numpy()


def specs(tensor: Any) -> tuple[str | None, ...]:
    """The axis that cuts each dim of a DTensor."""
    return tuple(
        None if s == dtensor.UNSHARDED else s for s in dtensor.fetch_layout(tensor).sharding_specs
    )


def kinds(mesh: dtensor.Mesh, program: Callable, *inputs: Any) -> tuple[Any, list[str]]:
    """Result, and kinds of the collectives of the lowered program."""
    function = tf.function(program, autograph=False)
    with lowered.record() as recorder, dtensor.default_mesh(mesh):
        result = function(*inputs)
        tf.nest.map_structure(lambda t: dtensor.unpack(t)[0].numpy(), result)
    return result, [c.kind for c in lowered.collectives(recorder, mesh)]
