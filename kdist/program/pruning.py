"""A part of a traced function, between tensors of its graph, as a function of its own.

`WrappedFunction.prune` does the same operation by operation, in Python, and copies what lies before
the feeds too. Here the nodes in between are imported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist._compat import function_graphs, said_shapes
from kdist.graphs.chunks import node_of

import tensorflow as tf


def pruned(
    function: Any,
    feeds: Sequence[Any],
    fetches: Sequence[Any],
    effects: Sequence[tf.Operation] = (),
) -> Any:
    """The part of a wrapped function between tensors of its graph.

    Args:
        function: The wrapped function.
        feeds: Tensors of its graph that the part is given.
        fetches: Tensors of its graph that it returns.
        effects: Operations that are part of it though it returns nothing of them.

    Returns:
        A wrapped function of the feeds; it captures what the function does, as far as it needs it.

    Raises:
        ValueError: A fetch, or an effect, depends on an input of the function that is not fed.
    """
    part = _Part(function, feeds, fetches, effects)

    def imported(*given: Any) -> list[Any]:
        outputs = part.imported(given)
        run_effects(tf.compat.v1.get_default_graph())
        return outputs

    with tf.device(None):
        return tf.compat.v1.wrap_function(
            imported, [tf.TensorSpec(t.shape, t.dtype, name=t.op.name) for t in feeds]
        )


def without_effects(function: Callable[[], Any]) -> Any:
    """A tensor that a function makes, in the graph that is being traced, and nothing besides.

    What the function prints, asserts or writes on the way is left out of the graph, and so is all
    else that does not lead to the tensor.

    Args:
        function: Takes nothing; tensors of the graph that it uses are captured.
    """
    whole = tf.compat.v1.wrap_function(function, [])
    [found] = _Part(whole, [], whole.outputs, []).imported([])
    return found


class _Part:
    """Operations of a wrapped function that lead to some tensors; see `pruned`."""

    def __init__(
        self,
        function: Any,
        feeds: Sequence[Any],
        fetches: Sequence[Any],
        effects: Sequence[tf.Operation],
    ) -> None:
        self._graph, self._feeds, self._fetches = function.graph, feeds, fetches
        self._captured = {inner.name: outer for outer, inner in function.graph.captures}
        fed = {t.name for t in feeds}
        self._between = _between({*fed, *self._captured}, fetches, effects)
        self._definition = _definition(function.graph, self._between)

    def imported(self, given: Sequence[Any]) -> list[Any]:
        """The fetches, in the graph that is being traced; `given` stand for the feeds."""
        graph = tf.compat.v1.get_default_graph()
        for tensor, one in zip(self._feeds, given, strict=True):
            function_graphs.copy_handle_data(tensor, one)
        read = {reference for node in self._definition.node for reference in node.input}
        fetched = {_reference(t.name) for t in self._fetches}
        known = {t.name: one for t, one in zip(self._feeds, given, strict=True)}
        for name, outer in self._captured.items():
            if name not in known and _reference(name) in read | fetched:
                known[name] = graph.capture(outer)
        function_graphs.share_functions(self._graph, graph)
        made = tf.graph_util.import_graph_def(
            self._definition,
            input_map={name: t for name, t in known.items() if _reference(name) in read},
            return_elements=[t.name for t in self._fetches if t.name not in known],
            name="",
        )
        found = iter(made)
        outputs = [known[t.name] if t.name in known else next(found) for t in self._fetches]
        _carry_shapes(self._graph, graph, self._between)
        return outputs


def effects_in(graph: Any) -> list[tf.Operation]:
    """What prints, asserts or writes in a graph."""
    return [op for op in graph.get_operations() if op.op_def.is_stateful]


def run_effects(graph: Any) -> None:
    """Has the function of a graph that is being traced run all effects, which nothing may read.

    TensorFlow runs them anyway where it calls the function; DTensor drops what nobody says is to
    run.
    """
    graph.control_outputs.extend(effects_in(graph))


def _reference(name: str) -> str:
    """How a node's inputs name a tensor."""
    return name.removesuffix(":0")


def _between(given: set[str], fetches: Sequence[Any], effects: Sequence[tf.Operation]) -> set[str]:
    """Names of the operations that lead from given tensors to fetches and effects, these too.

    Raises:
        ValueError: An input that is not given does.
    """
    waiting = [*(t.op for t in fetches if t.name not in given), *effects]
    found: set[str] = set()
    while waiting:
        operation = waiting.pop()
        if operation.name in found:
            continue
        if operation.type == "Placeholder":
            raise ValueError(
                "A part of a function is given all inputs that it depends on. "
                f"Received: {operation.name!r} among those that are not"
            )
        found.add(operation.name)
        waiting.extend(t.op for t in operation.inputs if t.name not in given)
        waiting.extend(
            one for one in operation.control_inputs if not any(t.name in given for t in one.outputs)
        )
    return found


def _definition(graph: Any, wanted: set[str]) -> Any:
    """The nodes of some operations; of what they wait for and are next to, what is there."""
    definition = tf.compat.v1.GraphDef()
    whole = graph.as_graph_def()
    definition.versions.CopyFrom(whole.versions)
    definition.node.extend(node for node in whole.node if node.name in wanted)
    for node in definition.node:
        there = [r for r in node.input if not r.startswith("^") or node_of(r[1:]) in wanted]
        if len(there) < len(node.input):
            node.input[:] = there
        if "_class" in node.attr:
            kept = [
                one
                for one in node.attr["_class"].list.s
                if one.decode().removeprefix("loc:@") in wanted
            ]
            node.attr.pop("_class")
            if kept:
                node.attr["_class"].list.s.extend(kept)
    return definition


def _carry_shapes(graph: Any, copy: Any, names: set[str]) -> None:
    """Gives copies the shapes that were set, such as those of what XLA compiles."""
    traced = {one.name: one for one in graph.get_operations() if one.name in names}
    for operation in copy.get_operations():
        original = traced.get(operation.name)
        if original is not None and original.type == operation.type:
            for known, tensor in zip(original.outputs, operation.outputs, strict=True):
                said_shapes.carry(known, tensor)
