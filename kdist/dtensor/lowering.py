"""Expanding a traced function for a mesh, without devices and without running it.

A mesh can name devices that are not there. DTensor then expands a function that is called on it
into the program that each device would run, registers that program, and leaves it at that. The
program is the same for every slice, and no memory is taken for what it would compute on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist._compat import dtensor_internals, keras_trainer
from kdist.display.notices import without_notices
from kdist.dtensor import lowered
from kdist.dtensor.collective_dtypes import narrow
from kdist.dtensor.lowered_program import Argument, Function, LoweredProgram
from kdist.dtensor.mended_moves import mend
from kdist.graphs.chunks import node_of

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

NOWHERE = 9999
"""Task of the devices of an abstract mesh: one that no cluster has."""
LAID_OUT = "kdist_laid_out_"
"""Begins the names of the inputs of a function, by number, in the layouts in which they come."""
_TAG = "_kdist_"


def abstract_mesh(axes: Mapping[str, int]) -> dtensor.Mesh:
    """A mesh without devices: what is called on it is expanded, and not run.

    Its devices are called CPUs whatever runs the programs, so that they are the same everywhere.

    Args:
        axes: Names and sizes of its axes.
    """
    sizes = list(axes.values())
    count = math.prod(sizes)
    devices = [f"/job:localhost/replica:0/task:{NOWHERE}/device:CPU:{i}" for i in range(count)]
    numbers = np.arange(count).reshape(sizes)
    return dtensor.Mesh(list(axes), numbers, [], [], "kdist", global_devices=devices)


def lower(
    function: Function,
    mesh: dtensor.Mesh,
    layouts: Sequence[dtensor.Layout],
    layers: Sequence[str] = (),
) -> LoweredProgram:
    """Has DTensor expand a traced function.

    Args:
        function: The function.
        mesh: From `abstract_mesh`.
        layouts: Of each flat input, on that mesh.
        layers: Paths of the model's layers, to say which of them causes a collective.

    Raises:
        tf.errors.OpError, ValueError: DTensor cannot expand it; see `limits.explain`.
        CannotStitch: It has an all-to-all that may be wrong; see `mended_moves`.
    """
    with dtensor_internals.unobserved():
        tagged = _tagged(function, layouts)
    # What DTensor is called with is eager, wherever this is called.
    with dtensor_internals.unobserved(), tf.init_scope():
        given = _placeholders(mesh, tagged.inputs, layouts)
        with (
            without_notices(),
            dtensor_internals.messages_as_they_are(),
            lowered.record() as recorder,
            dtensor.default_mesh(mesh),
        ):
            flat = keras_trainer.call_flat(tagged, given, [])
        results = [t for t in tf.nest.flatten(flat) if t is not None]
        found = tuple(map(dtensor.fetch_layout, results))
    ((definition, *bodies),) = recorder.programs.values()
    mend(definition)
    narrow(definition)
    return LoweredProgram(
        definition=definition,
        bodies={one.signature.name: one for one in bodies},
        axes=dict(zip(mesh.dim_names, mesh.shape())),
        arguments=tuple(_arguments(tagged, definition, layouts)),
        results=tuple(_results(definition, found)),
        layouts=found,
        structure=positions(tagged.structured_outputs),
        collectives=tuple(lowered.collectives(recorder, mesh, layers)),
    )


def positions(structure: Any) -> Any:
    """A structure of tensors with their positions as leaves; None stays None."""
    numbers = itertools.count()
    return tf.nest.map_structure(lambda t: None if t is None else next(numbers), structure)


def _tagged(function: Function, layouts: Sequence[dtensor.Layout]) -> Any:
    """A function that calls another one, and tags its inputs and results with their numbers.

    DTensor orders the parameters of a program by their first use, and drops unused ones; it orders
    results anew, and gives nodes new names. Tags stay, and keep results apart that are equal.

    The copies of inputs keep their layouts: left to itself, DTensor lays a copy out as those who
    use it like best, and a gradient that is to be laid out like an input would follow.
    """

    def call(*inputs: Any) -> Any:
        copies = _each(inputs, "input")
        given = [
            one
            if one.dtype == tf.string
            else dtensor.relayout(one, layout, name=f"{LAID_OUT}{number}")
            for number, (one, layout) in enumerate(zip(copies, layouts, strict=True))
        ]
        return _each(function.call(given), "result")

    # Not a `tf.function`: it would copy results once more.
    return tf.compat.v1.wrap_function(call, list(function.specs))


def _each(tensors: Any, kind: str) -> Any:
    """The tensors of a structure, each tagged with its number; None stays None."""
    if isinstance(tensors, tuple):
        tensors = list(tensors)
    numbers = itertools.count()

    def copy(tensor: Any) -> Any:
        if tensor is None:
            return None
        number = next(numbers)
        made = tf.identity(tensor, name=f"kdist_{kind}_{number}")
        dtensor_internals.tag(made, f"{_TAG}{kind}", number)
        return made

    return tf.nest.map_structure(copy, tensors)


def _placeholders(
    mesh: dtensor.Mesh, inputs: Sequence[Any], layouts: Sequence[dtensor.Layout]
) -> list[Any]:
    """DTensors of given shapes and layouts, with no memory behind them.

    One stands for all inputs that are alike, such as the weights of a model's blocks: what makes
    them is expanded too.
    """
    keys = [(tuple(t.shape), t.dtype, layout.to_string()) for t, layout in zip(inputs, layouts)]
    kinds = {key: (t, layout) for key, t, layout in zip(keys, inputs, layouts, strict=True)}

    def make() -> list[Any]:
        return [
            dtensor.relayout(
                tf.fill(t.shape, "") if t.dtype == tf.string else tf.zeros(t.shape, t.dtype), layout
            )
            for t, layout in kinds.values()
        ]

    if not inputs:  # DTensor runs no function that makes nothing
        return []
    with without_notices(), dtensor.default_mesh(mesh):
        made = tf.function(make, autograph=False).get_concrete_function()()
    found = dict(zip(kinds, made, strict=True))
    return [found[key] for key in keys]


def _arguments(
    tagged: Any, definition: Any, layouts: Sequence[dtensor.Layout]
) -> Iterator[Argument]:
    """What each parameter takes: known by the tags, and checked by shape and dtype.

    DTensor may keep a parameter that nothing reads, without its tag (in a backward pass, a table of
    which only the size counts). Any input of its shape and dtype will do there.
    """
    local = {
        one.name: (_sizes(definition.arg_attr[j]), tf.as_dtype(one.type))
        for j, one in enumerate(definition.signature.input_arg)
    }
    wanted = [
        (list(layout.local_shape_from_global_shape(list(tensor.shape))), tensor.dtype)
        for tensor, layout in zip(tagged.inputs, layouts, strict=True)
    ]
    taken: dict[str, int] = {}
    for position, names in _tagged_inputs(definition, set(local)).items():
        # A cut made before the tag looks at the device's number, a scalar, too.
        found = [name for name in names if len(names) == 1 or local[name][0]]
        if len(found) != 1 or found[0] in taken:
            raise _unreadable(f"input {position} is one of {sorted(names)}")
        taken[found[0]] = position
    read = {node_of(one) for node in definition.node_def for one in node.input}
    for name in local.keys() - taken.keys() - read:
        rest = [j for j, one in enumerate(wanted) if one == local[name] and j not in taken.values()]
        if rest:
            taken[name] = rest[0]
    if len(local) - len(taken) > 1:
        raise _unreadable(f"parameters {sorted(set(local) - set(taken))} are unknown")
    for name, given in local.items():
        number = taken.get(name)
        expected = ([], tf.int32) if number is None else wanted[number]
        if expected != given:
            raise _unreadable(f"parameter {name} is {given}, not {expected}")
        yield Argument(name, number, None if number is None else layouts[number])


def _tagged_inputs(definition: Any, parameters: set[str]) -> dict[int, set[str]]:
    """For each tagged input, the parameters that it is made of."""
    nodes = {node.name: node for node in definition.node_def}
    found: dict[int, set[str]] = {}
    for node in definition.node_def:
        if f"{_TAG}input" in node.attr:
            reached, waiting = set(), [node.name]
            while waiting:
                name = waiting.pop()
                if name in parameters:
                    reached.add(name)
                elif name in nodes:
                    waiting.extend(map(node_of, nodes[name].input))
            found[node.attr[f"{_TAG}input"].i] = reached
    return found


def _sizes(attributes: Any) -> list[int]:
    """Of a parameter's dims."""
    return [dim.size for dim in attributes.attr["_output_shapes"].list.shape[0].dim]


def _results(definition: Any, layouts: Sequence[dtensor.Layout]) -> Iterator[str]:
    """Which tensor of the program each flat result is: known by the tags."""
    nodes = {node.name: node for node in definition.node_def}
    made = {}
    for reference in definition.ret.values():
        node = nodes.get(node_of(reference))
        if node is None or f"{_TAG}result" not in node.attr:
            raise _unreadable(f"{reference} is none of the results")
        made[node.attr[f"{_TAG}result"].i] = reference
    for number, layout in enumerate(layouts):
        if number not in made:
            raise _unreadable(f"result {number} is not in {made}")
        noted = nodes[node_of(made[number])].attr["_layout"].list.s
        if noted and noted[0].decode() != layout.to_string():
            raise _unreadable(f"result {number} is {noted[0]!r}, not {layout}")
        yield made[number]


def _unreadable(what: str) -> RuntimeError:
    return RuntimeError(
        f"A program that DTensor made is not as expected: {what}. TensorFlow {tf.__version__} "
        "lowers in another way than the one kdist was written for."
    )
