"""An executed graph with the bodies of the functions that it calls, as nodes of it.

A call starts when all that it takes is there, and holds that until it ends; so its body stands
between two nodes that pass tensors on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kdist._compat import dtensor_internals
from kdist.graphs.chunks import node_of

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
GIVEN = "/kdist_given"
"""After the name of a call, that of the node that hands its arguments to its body."""
_SPECIALIZED = "_specialized_for_"


class Opener:
    """Replaces calls by what they call.

    Args:
        library: `FunctionDef`s by name.
        before: `NodeDef`s by name of the graph that calls them, before it was optimized.
        needed: Which outputs of a call by name something needs; None of a call that is unknown.
        folded: Of a call by name and a number, the shape of that argument if TensorFlow may have
            put its value into the function; else None.

    Attributes:
        closed: Names of calls of these functions that stayed, since TensorFlow made variants of
            them of which it is not known what they take and return.
    """

    def __init__(
        self,
        library: Mapping[str, Any],
        before: Mapping[str, Any],
        needed: Callable[[str], Sequence[int] | None],
        folded: Callable[[str, int], tf.TensorShape | None],
    ) -> None:
        self.library, self.before, self.needed, self.folded = library, before, needed, folded
        self.closed: set[str] = set()

    def opened(self, nodes: Iterable[Any]) -> Iterator[Any]:
        """The nodes, calls replaced; a call of a function that is not in the library stays."""
        for node in nodes:
            name = node.attr["f"].func.name if node.op in CALLS else ""
            body = self.library.get(name) or self.library.get(name.split(_SPECIALIZED)[0])
            if body is None:
                yield node
            elif (constants := self._constants(node, body.signature)) is None or (
                returned := self._returned(node, body.signature)
            ) is None:
                self.closed.add(node.name)
                yield node
            else:
                yield from constants.values()
                copies, end = _opened(node, body, constants, returned)
                yield from self.opened(copies)
                yield end

    def _constants(self, call: Any, signature: Any) -> dict[int, Any] | None:
        """Arguments that a call no longer hands over, by position; None if they are not known.

        A variant of a function that is specialized for a call has the call's constants inside, and
        maybe what became constant before.
        """
        missing = len(signature.input_arg) - len(call.attr["Tin"].list.type)
        if not missing:
            return {}
        original = self.before.get(call.name)
        given = [] if original is None else [r for r in original.input if not r.startswith("^")]
        if len(given) != len(signature.input_arg):
            return None
        sources = [self.before.get(node_of(reference)) for reference in given]
        found = {i: s for i, s in enumerate(sources) if s is not None and s.op == "Const"}
        if len(found) != missing:
            shapes = {i: self.folded(call.name, i) for i in range(len(given)) if i not in found}
            known = {i: shape for i, shape in shapes.items() if shape is not None}
            found |= {i: _unknown(signature.input_arg[i].type, known[i]) for i in known}
        if len(found) != missing:
            return None
        return {i: _named(s, f"{call.name}/kdist_constant_{i}", call) for i, s in found.items()}

    def _returned(self, call: Any, signature: Any) -> Sequence[int] | None:
        """Which results a call still returns; None if that is not known.

        A variant returns what something needs.
        """
        count, every = len(call.attr["Tout"].list.type), range(len(signature.output_arg))
        if count == len(every):
            return every
        needed = self.needed(call.name)
        return needed if needed is not None and len(needed) == count else None


def _named(source: Any, name: str, call: Any) -> Any:
    """A copy of a node, on the device of a call."""
    copy = node_def_pb2.NodeDef()
    copy.CopyFrom(source)
    copy.name, copy.device = name, call.device
    del copy.input[:]
    return copy


def _unknown(dtype: int, shape: tf.TensorShape) -> Any:
    """A node of a value that is not known."""
    made = node_def_pb2.NodeDef(op="Placeholder")
    made.attr["dtype"].type = dtype
    made.attr["shape"].shape.CopyFrom(shape.as_proto())
    return made


def _opened(
    call: Any, body: Any, constants: Mapping[int, Any], returned: Sequence[int]
) -> tuple[list[Any], Any]:
    """What stands for a call: nodes that hand over and compute, and one that returns.

    Args:
        call: The call.
        body: The function.
        constants: Nodes of arguments that it does not hand over, by position.
        returned: Which results it returns.
    """
    given = node_def_pb2.NodeDef(name=call.name + GIVEN, op="IdentityN", device=call.device)
    given.input.extend(call.input)
    given.attr["T"].list.type.extend(call.attr["Tin"].list.type)
    if not call.attr["Tin"].list.type:
        given.op = "NoOp"
        del given.attr["T"]
    arguments: dict[str, str] = {}
    for i, one in enumerate(body.signature.input_arg):
        handed = len(arguments) - sum(k < i for k in constants)
        constant = constants.get(i)
        arguments[one.name] = f"{given.name}:{handed}" if constant is None else constant.name
    inner = {node.name: node for node in body.node_def}

    def within(reference: str) -> str:
        if reference.startswith("^"):
            return f"^{call.name}/{reference[1:]}"
        name = node_of(reference)
        if name in arguments:
            return arguments[name]
        _, output, index = reference.split(":")
        number = int(index)
        for kind, dtypes in dtensor_internals.output_dtypes(inner[name]).items():
            if kind == output:
                break
            number += len(dtypes)
        return f"{call.name}/{name}:{number}"

    copies = [given]
    for node in body.node_def:
        copy = node_def_pb2.NodeDef()
        copy.CopyFrom(node)
        copy.name, copy.device = f"{call.name}/{node.name}", node.device or call.device
        copy.input[:] = [within(r) for r in node.input] or [f"^{given.name}"]
        copies.append(copy)
    end = node_def_pb2.NodeDef(name=call.name, op="IdentityN", device=call.device)
    results = [body.signature.output_arg[i].name for i in returned]
    end.input.extend(within(body.ret[name]) for name in results)
    end.input.extend(f"^{call.name}/{name}" for name in body.control_ret.values())
    end.attr["T"].list.type.extend(call.attr["Tout"].list.type)
    if not end.attr["T"].list.type:
        end.op = "NoOp"
        del end.attr["T"]
        end.input.append(f"^{given.name}")
    return copies, end
