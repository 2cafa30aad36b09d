"""An executed graph with the bodies of the functions that it calls, as nodes of it.

A call starts when all that it takes is there, and holds that until it ends; so its body stands
between two nodes that pass tensors on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kdist._compat import dtensor_internals
from kdist.graphs.chunks import node_of

from tensorflow.core.framework import node_def_pb2

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
GIVEN = "/kdist_given"
"""After the name of a call, that of the node that hands its arguments to its body."""
_SPECIALIZED = "_specialized_for_"


def opened(nodes: Iterable[Any], library: Mapping[str, Any]) -> Iterator[Any]:
    """The nodes, calls replaced by what they call.

    Args:
        nodes: `NodeDef`s.
        library: `FunctionDef`s by name. A call of another function stays.
    """
    for node in nodes:
        name = node.attr["f"].func.name if node.op in CALLS else ""
        body = library.get(name) or library.get(name.split(_SPECIALIZED)[0])
        if body is None or not _fits(node, body.signature):
            yield node
        else:
            yield from _opened(node, body, library)


def _fits(call: Any, signature: Any) -> bool:
    """Whether a call is of this function; a specialized one may take and return less."""
    taken, returned = call.attr["Tin"].list.type, call.attr["Tout"].list.type
    return len(signature.input_arg) == len(taken) and len(signature.output_arg) == len(returned)


def _opened(call: Any, body: Any, library: Mapping[str, Any]) -> Iterator[Any]:
    given = node_def_pb2.NodeDef(name=call.name + GIVEN, op="IdentityN", device=call.device)
    given.input.extend(call.input)
    given.attr["T"].list.type.extend(call.attr["Tin"].list.type)
    if not call.attr["Tin"].list.type:
        given.op = "NoOp"
        del given.attr["T"]
    yield given
    arguments = {one.name: i for i, one in enumerate(body.signature.input_arg)}
    inner = {node.name: node for node in body.node_def}

    def within(reference: str) -> str:
        if reference.startswith("^"):
            return f"^{call.name}/{reference[1:]}"
        name = node_of(reference)
        if name in arguments:
            return f"{given.name}:{arguments[name]}"
        _, output, index = reference.split(":")
        number = int(index)
        for kind, dtypes in dtensor_internals.output_dtypes(inner[name]).items():
            if kind == output:
                break
            number += len(dtypes)
        return f"{call.name}/{name}:{number}"

    copies = []
    for node in body.node_def:
        copy = node_def_pb2.NodeDef()
        copy.CopyFrom(node)
        copy.name, copy.device = f"{call.name}/{node.name}", node.device or call.device
        copy.input[:] = [within(r) for r in node.input] or [f"^{given.name}"]
        copies.append(copy)
    yield from opened(copies, library)
    end = node_def_pb2.NodeDef(name=call.name, op="IdentityN", device=call.device)
    end.input.extend(within(body.ret[one.name]) for one in body.signature.output_arg)
    end.input.extend(f"^{call.name}/{name}" for name in body.control_ret.values())
    end.attr["T"].list.type.extend(call.attr["Tout"].list.type)
    if not end.attr["T"].list.type:
        end.op = "NoOp"
        del end.attr["T"]
        end.input.append(f"^{given.name}")
    yield end
