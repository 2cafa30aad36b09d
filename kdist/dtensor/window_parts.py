"""Operations of a lowered program that look at windows of parts, and must not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdist.dtensor.body import Body, data_inputs
from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.window_rules import RULES

from tensorflow.experimental import dtensor

if TYPE_CHECKING:
    from kdist.dtensor.lowering import LoweredProgram


def of_parts(body: Body, program: LoweredProgram) -> dict[str, str]:
    """Operations in the program of one device that are not of whole pictures and filters.

    DTensor refuses most of them; of depthwise convolutions it does not look at the filters.

    Args:
        body: The traced function.
        program: What DTensor made of it, a `LoweredProgram`, before `StandIns.put_back`.

    Returns:
        Those of the function by name, with the calls of functions that have some; and why.
    """
    found: dict[str, str] = {}
    inside: set[str] = set()
    for definition in (program.definition, *program.bodies.values()):
        nodes = {node.name: node for node in definition.node_def}
        signature = definition.signature.input_arg
        given = {one.name: definition.arg_attr[i].attr for i, one in enumerate(signature)}
        for node in definition.node_def:
            if node.op not in RULES:
                continue
            read, original = data_inputs(node), body.nodes.get(node.name)
            for position, dims in RULES[node.op].operands.items():
                name, _, index = read[position].partition(":")
                noted = nodes[name].attr if name in nodes else given[name]
                number = int(index.rpartition(":")[2]) if name in nodes else 0
                rows = 1 if dims.startswith("n") else 0  # of the batch, which may be parts
                if original is None and _cut(noted, number, rows):
                    inside.add(node.op)
                elif original is not None:
                    shape = body.specs[data_inputs(original)[position]].shape[rows:]
                    local = [dim.size for dim in noted[SHAPES].list.shape[number].dim][rows:]
                    if any(n not in (None, m) for n, m in zip(shape, local, strict=True)):
                        found[node.name] = f"{node.op} of parts of channels or pictures"
    for node in body.nodes.values() if inside else ():
        if any(one.op in inside for f in body.called(node) for one in f.node_def):
            found[node.name] = "a convolution inside a function, of parts"
    return found


def _cut(noted: Any, number: int, rows: int) -> bool:
    """Whether a tensor of a program is cut, but for its first dims; no if that is not noted."""
    layouts = noted["_layout"].list.s if "_layout" in noted else ()
    if number >= len(layouts):
        return False
    specs = dtensor.Layout.from_string(layouts[number].decode()).sharding_specs
    return any(spec != dtensor.UNSHARDED for spec in specs[rows:])
