"""Slices of what is cut along the sequence, such as the features of the first token.

DTensor can neither slice a dim that is cut nor lay the gradient out so: it would fail, or move the
cut to the rows of the batch. Between a product cut by columns and one by rows, sequences are whole
and features are cut: DTensor slices those as they are.
"""

from __future__ import annotations

from typing import Any

from kdist.dtensor.along_sequence import SEQUENCE
from kdist.dtensor.body import Body, data_inputs, topological
from kdist.dtensor.limits import LAYOUTS
from kdist.dtensor.rewrites import SLICE, SLICE_GRADIENT, spelled_out
from kdist.graphs.chunks import node_of

from tensorflow.core.framework import node_def_pb2
from tensorflow.experimental import dtensor

RELAYOUT, RELAYOUT_LIKE = LAYOUTS


def gather_for_slices(body: Body, mesh: dtensor.Mesh) -> int:
    """Makes whole what is sliced along the sequence, and what the gradient of a slice gives.

    What was computed from a sequence that was gathered is left as it is.

    Args:
        body: A traced function; changed.
        mesh: The mesh of a slice.

    Returns:
        How many slices.
    """
    before, count, known = list(body.nodes), 0, _known_whole(body)
    for name in before:
        node = body.nodes[name]
        if node.op not in (SLICE, SLICE_GRADIENT):
            continue
        made = f"{name}:output:0"
        whole = node.input[0] if node.op == SLICE else made
        if known[name] or not _is_sliced(body, node, whole):
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


def _known_whole(body: Body) -> dict[str, bool | None]:
    """By node, whether what it makes has all of the sequence; None where nothing says so."""
    found: dict[str, bool | None] = {}
    for name in topological(body.nodes):
        node = body.nodes[name]
        said = _says_whole(node) if node.op == RELAYOUT else None
        taken = data_inputs(node)[1:] if node.op == RELAYOUT_LIKE else data_inputs(node)
        states = {found.get(node_of(_original(body, one))) for one in taken}
        inherited = False if False in states else (True in states or None)
        found[name] = inherited if said is None else said
    return found


def _original(body: Body, reference: str) -> str:
    """What a tensor is a copy of: a gradient of one's own copies operands beside results."""
    while (node := body.nodes.get(node_of(reference))) is not None and node.op == "IdentityN":
        reference = node.input[int(reference.rpartition(":")[2])]
    return reference


def _says_whole(node: Any) -> bool | None:
    """Whether a re-layout leaves the sequence whole; None if it leaves it as it is."""
    specs = dtensor.Layout.from_string(node.attr["layout"].s.decode()).sharding_specs
    if len(specs) < 3 or specs[SEQUENCE] == dtensor.MATCH:
        return None
    return specs[SEQUENCE] == dtensor.UNSHARDED


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
    return body.lay_out(source, layout, name)
