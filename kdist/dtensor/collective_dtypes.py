"""Collectives in the dtype of what they send.

DTensor has none of bfloat16, bool and small integers on CPU: it casts to a wider dtype before, and
back afterwards. What travels would be two to eight times as large, sums that follow each other or
are scattered would not be seen, and gathers would be sums of padded tensors. Here nothing depends
on which dtypes TensorFlow's own collectives have: `collectives.py` adds up bfloat16 in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdist.graphs.chunks import node_of

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

GATHER = "/DTensorAllGather"
"""What DTensor calls its gathers."""
_OF_PADDED = "TensorStridedSliceUpdate"
_HANDS_ON = frozenset({"Identity", "Reshape", "Slice"})


def narrow(definition: Any) -> None:
    """Takes casts away that stand around collectives.

    Args:
        definition: The function of one device, as DTensor made it; changed.
    """
    nodes = {node.name: node for node in definition.node_def}
    users: dict[str, list[Any]] = {}  # None: it is a result
    for node in definition.node_def:
        for reference in node.input:
            if not reference.startswith("^"):  # which orders collectives alone
                users.setdefault(node_of(reference), []).append(node)
    for reference in definition.ret.values():
        users.setdefault(node_of(reference), []).append(None)
    instead: dict[str, str] = {}
    for node in definition.node_def:
        if node.op == "CollectiveReduceV2":
            instead |= _narrowed(node, nodes, users)
    if instead:
        _replace(definition, instead)


def _replace(definition: Any, instead: Mapping[str, str]) -> None:
    """Takes nodes out of a function, and has others stand for what they gave."""
    gone = {node_of(reference) for reference in instead}
    kept = []
    for node in definition.node_def:
        if node.name not in gone:
            kept.append(copy := node_def_pb2.NodeDef())
            copy.CopyFrom(node)
            copy.input[:] = [instead.get(one, one) for one in node.input]
    del definition.node_def[:]
    definition.node_def.extend(kept)
    for name, reference in definition.ret.items():
        definition.ret[name] = instead.get(reference, reference)


def _narrowed(
    node: Any, nodes: Mapping[str, Any], users: Mapping[str, Sequence[Any]]
) -> dict[str, str]:
    """Has a collective send what was cast; by reference of what was cast back, what it is now."""
    cast = nodes.get(node_of(node.input[0]))
    if cast is None or cast.op != "Cast" or not _is_exact(node, nodes, cast):
        return {}
    dtype = cast.attr["SrcT"].type
    handed_on, back = _taken_by(node, users)
    if not back or any(one is None or one.attr["DstT"].type != dtype for one in back):
        return {}
    node.input[0] = cast.input[0]
    for one in (node, *handed_on):
        one.attr["T"].type = dtype
    waited_for = {f"^{one.name}": f"^{node_of(one.input[0])}" for one in back}
    return waited_for | {f"{one.name}:y:0": one.input[0] for one in back}


def _taken_by(node: Any, users: Mapping[str, Sequence[Any]]) -> tuple[list[Any], list[Any]]:
    """What hands on a collective's result, and the casts that take it; None for anything else."""
    handed_on: list[Any] = []
    casts: list[Any] = []
    for one in (waiting := [node]):
        for user in users.get(one.name, ()):
            if user is None or node_of(user.input[0]) != one.name:
                casts.append(None)
            elif user.op in _HANDS_ON:
                handed_on.append(user)
                waiting.append(user)
            else:
                casts.append(user if user.op == "Cast" else None)
    return handed_on, casts


def _is_exact(node: Any, nodes: Mapping[str, Any], cast: Any) -> bool:
    """Whether a collective gives the same in the narrower dtype, cast back, on any device.

    Reductions of integers, and of what is true, stay as they are: few devices add small ones.
    """
    padded = nodes.get(node_of(cast.input[0]))
    if GATHER in node.name and padded is not None and padded.op == _OF_PADDED:
        return True
    merge, final = (node.attr[key].s.decode() for key in ("merge_op", "final_op"))
    halves = tf.as_dtype(cast.attr["SrcT"].type) == tf.bfloat16
    return halves and final in ("Id", "") and merge in ("Add", "Max", "Min")
