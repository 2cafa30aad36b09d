"""Slices of what is cut along the sequence, such as the features of the first token.

DTensor can neither slice a dim that is cut nor lay the gradient out so: it would fail, or move the
cut to the rows of the batch.
"""

from __future__ import annotations

from typing import Any

from kdist.dtensor.along_sequence import SEQUENCE
from kdist.dtensor.body import Body
from kdist.dtensor.rewrites import SLICE, SLICE_GRADIENT, spelled_out

from tensorflow.core.framework import node_def_pb2
from tensorflow.experimental import dtensor


def gather_for_slices(body: Body, mesh: dtensor.Mesh) -> int:
    """Makes whole what is sliced along the sequence, and what the gradient of a slice gives.

    Args:
        body: A traced function; changed.
        mesh: The mesh of a slice.

    Returns:
        How many slices.
    """
    before, count = list(body.nodes), 0
    for name in before:
        node = body.nodes[name]
        if node.op not in (SLICE, SLICE_GRADIENT):
            continue
        made = f"{name}:output:0"
        whole = node.input[0] if node.op == SLICE else made
        if not _is_sliced(body, node, whole):
            continue
        count += 1
        gathered = _gathered(body, mesh, whole, f"{name}/whole")
        if node.op == SLICE_GRADIENT:
            body.redirect({whole: gathered}, before)
            continue
        body.nodes[name] = copy = node_def_pb2.NodeDef()  # it alone reads that, and no result is it
        copy.CopyFrom(node)
        copy.input[0] = gathered
    return count


def _is_sliced(body: Body, node: Any, source: str) -> bool:
    """Whether a slice of a (batch, length, features...) takes a part of its length."""
    spec = body.specs.get(source)
    if spec is None or (spec.shape.rank or 0) < 3 or not spec.dtype.is_floating:
        return False
    found = spelled_out(body, node, None, 1, spec.shape.rank)
    return found is not None and not found.takes_all_of(SEQUENCE)


def _gathered(body: Body, mesh: dtensor.Mesh, source: str, name: str) -> str:
    """Adds a re-layout that leaves the cut of the rows alone."""
    spec = body.specs[source]
    layout = dtensor.Layout([dtensor.MATCH] + [dtensor.UNSHARDED] * (spec.shape.rank - 1), mesh)
    node = node_def_pb2.NodeDef(name=name, op="Relayout", input=[source])
    node.attr["T"].type = spec.dtype.as_datatype_enum
    node.attr["layout"].s = layout.to_string().encode()
    body.nodes[name] = node
    reference = f"{name}:output:0"
    body.note(reference, spec.shape, spec.dtype)
    return reference
