"""Programs over inner axes made by hand, for the tests of what kdist does with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist.dtensor import relayout
from kdist.dtensor.expansion import expand
from kdist.dtensor.lowered_program import Function, LoweredProgram
from kdist.dtensor.lowering import lower
from kdist.dtensor.sharded import Sharded
from kdist.dtensor.signatures import tensor_spec
from kdist.dtensor.stitching import Stitcher
from kdist.sharding.mesh import Topology, mesh

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor


def inner_mesh(**axes: int) -> tuple[dtensor.Mesh, Topology]:
    """The DTensor mesh of a slice, and the whole mesh."""
    topology = Topology.from_mesh(mesh(**axes))
    return relayout.make_mesh(topology), topology


def cut(value: np.ndarray, over: dtensor.Mesh, *dims: str | None) -> Sharded:
    """An array in parts; `dims` as in a layout, one axis a dim."""
    parts = []
    for place in np.ndindex(*over.shape()):
        part = value
        for dim, axis in enumerate(dims):
            if axis is not None:
                position = over.dim_names.index(axis)
                part = np.split(part, over.shape()[position], axis=dim)[place[position]]
        parts.append(tf.constant(part))
    layout = dtensor.Layout([axis or dtensor.UNSHARDED for axis in dims], over)
    return Sharded(tuple(parts), layout)


def whole(tensor: Sharded) -> np.ndarray:
    """The value of a tensor in parts."""
    return tensor.whole("/device:CPU:0").numpy()


def laid_out(tensor: Any, mesh: dtensor.Mesh, *dims: str | None) -> Any:
    """A tensor of a program in another layout; `dims` as in `cut`."""
    return dtensor.relayout(
        tensor, dtensor.Layout([dim or dtensor.UNSHARDED for dim in dims], mesh)
    )


def specs(tensor: Sharded) -> tuple[str | None, ...]:
    """The axis that cuts each dim of a tensor in parts."""
    return tuple(None if s == dtensor.UNSHARDED else s for s in tensor.layout.sharding_specs)


def lowered_program(
    mesh: dtensor.Mesh,
    function: Callable,
    *inputs: Any,
    layers: Sequence[str] = (),
    islands: bool = True,
    channels: bool = False,
) -> LoweredProgram:
    """What becomes of a function for such inputs; without islands, what DTensor alone makes."""
    traced = tf.function(function, autograph=False)
    concrete = traced.get_concrete_function(*tf.nest.map_structure(tensor_spec, inputs))
    layouts = [t.layout for t in tf.nest.flatten(inputs)]
    with relayout.lowering(mesh):
        if not islands:
            return lower(Function.of(concrete), mesh, layouts, layers)
        return expand(concrete, mesh, layouts, layers, channels=channels)


def run(
    mesh: dtensor.Mesh,
    function: Callable,
    *inputs: Any,
    layers: Sequence[str] = (),
    channels: bool = False,
) -> tuple[Any, LoweredProgram]:
    """Calls a function with tensors in parts; returns its results in parts, and its program."""
    program = lowered_program(mesh, function, *inputs, layers=layers, channels=channels)
    devices = [f"/device:CPU:{k}" for k in range(mesh.size)]
    stitched = Stitcher(program).stitch(devices)
    flat = tf.nest.flatten(inputs)

    @tf.function(autograph=False)
    def step() -> Any:
        names = {one.name: one.position for one in program.arguments}
        taken = [flat[names[r]] for r in stitched.chunk.takes]
        return stitched([[t.parts[k] for t in taken] for k in range(mesh.size)])[1]

    parts = step()

    def result(position: int | None) -> Sharded | None:
        if position is None:
            return None
        return Sharded(tuple(mine[position] for mine in parts), program.layouts[position])

    return tf.nest.map_structure(result, program.structure), program


def kinds(mesh: dtensor.Mesh, function: Callable, *inputs: Any) -> tuple[Any, list[str]]:
    """Results, and kinds of the collectives of the lowered program."""
    result, program = run(mesh, function, *inputs)
    return result, [one.kind for one in program.collectives]
