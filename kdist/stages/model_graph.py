"""The graph of a Keras model, for the partition and for those who run its stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kdist._compat import keras_models
from kdist.pipeline.graph import Graph, GraphNode
from kdist.stages.layer_costs import Machine, layer_cost, tensor_bytes, used_variables

import keras

EXAMPLES = 32
"""Rows of a micro-batch where nobody knows better."""


@dataclasses.dataclass(frozen=True)
class NodeSource:
    """The Keras node behind a node of the graph.

    A nested model that is called twice has each of its nodes twice in the graph, with the same
    Keras node and different tensor names: values belong to the names, not to Keras's tensors.

    Attributes:
        node: The Keras node: its `operation`, its `arguments`.
        inputs: Name of the value of each of `node.arguments.keras_tensors`, in order.
        outputs: Name of each of `node.outputs`, in order.
    """

    node: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ModelGraph:
    """A graph and what its names stand for.

    Attributes:
        graph: The pure graph.
        sources: The Keras node of each of its nodes.
        variables: The variable of each parameter key. States that are not trained (seeds,
            statistics) are among them: a layer used on two stages shares those too.
        inputs: Name of each tensor of the model's flat inputs, in order.
        outputs: Name of each tensor of the model's flat outputs, in order.
    """

    graph: Graph
    sources: Mapping[str, NodeSource]
    variables: Mapping[str, keras.Variable]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def graph_of(model: keras.Model, *, examples: int = EXAMPLES) -> ModelGraph:
    """Describes a Functional or built Sequential model as a graph, with estimated costs.

    A nested Functional or Sequential is replaced by its own nodes ("encoder/dense"), once for each
    call of it ("encoder#1/dense"), unless that would change what is computed: it has a `call` of
    its own or an activity regularizer, is called with other arguments than its inputs, or would
    cast or reshape them. Then it is one node. `training=False` is no such argument: Keras runs
    the nested model as it runs the outer one.

    Args:
        model: The model.
        examples: Rows of a micro-batch, for the balance of computing and reading weights.

    Returns:
        The graph; costs are seconds, bytes are per example. Masks travel with their tensors and
        are not counted.

    Raises:
        ValueError: If the model has no graph of layers.

    Example:
    ```python
    from kdist.pipeline import partition
    from kdist.stages.model_graph import graph_of

    print(partition(graph_of(model).graph, 4))
    ```
    """
    functional = keras_models.functional_of(model) if isinstance(model, keras.Model) else None
    if functional is None:
        raise ValueError(
            "Only a Functional model, or a Sequential model that has been built, has a graph that "
            "can be cut into stages. Build the Sequential (give it a keras.Input), make the model "
            "with keras.Model(inputs, outputs), or give a list of layers per stage. Received: "
            f"model of type {type(model).__name__}"
        )
    builder = _Builder(examples)
    inputs = tuple(_unique_names([tensor.name for tensor in functional.inputs]))
    names = {id(tensor): name for tensor, name in zip(functional.inputs, inputs)}
    builder.add(functional, names, "")
    outputs = tuple(names[id(tensor)] for tensor in functional.outputs)
    graph = Graph(nodes=tuple(builder.nodes), inputs=inputs, outputs=tuple(dict.fromkeys(outputs)))
    variables = {key: variable for variable, key in builder.keys.values()}
    return ModelGraph(graph, builder.sources, variables, inputs, outputs)


class _Builder:
    def __init__(self, examples: int):
        self._examples = examples
        self.nodes: list[GraphNode] = []
        self.sources: dict[str, NodeSource] = {}
        self.keys: dict[int, tuple[keras.Variable, str]] = {}
        self._calls: dict[str, int] = {}

    def add(self, functional: Any, names: dict[int, str], prefix: str) -> None:
        """Adds the nodes of one call of a model; `names` gets the name of each tensor's value."""
        for node in keras_models.nodes_in_order(functional):
            name = self._name(prefix + node.operation.name)
            inner = inner_functional(node)
            if inner is None:
                self._add_node(node, name, names)
                continue
            given = node.arguments.keras_tensors
            inside = {id(t): names[id(x)] for t, x in zip(inner.inputs, given)}
            self.add(inner, inside, name + "/")
            for outer, tensor in zip(node.outputs, inner.outputs):
                names[id(outer)] = inside[id(tensor)]

    def _add_node(self, node: Any, name: str, names: dict[int, str]) -> None:
        made = [name if len(node.outputs) == 1 else f"{name}:{i}" for i in range(len(node.outputs))]
        names.update((id(tensor), text) for tensor, text in zip(node.outputs, made))
        used = tuple(names[id(tensor)] for tensor in node.arguments.keras_tensors)
        self.sources[name] = NodeSource(node, used, tuple(made))
        sizes = [tensor_bytes(tensor) for tensor in node.outputs]
        variables = used_variables(node.operation, node.arguments.kwargs)
        self.nodes.append(
            GraphNode(
                name=name,
                cost=self._seconds(node),
                inputs=tuple(dict.fromkeys(used)),
                outputs=dict(zip(made, sizes)),
                parameters=tuple(self._key(variable) for variable in variables),
            )
        )

    def _seconds(self, node: Any) -> float:
        inner = keras_models.functional_of(node.operation)
        if inner is not None:  # nested, but kept whole
            return sum(self._seconds(one) for one in keras_models.nodes_in_order(inner))
        given = node.arguments
        cost = layer_cost(node.operation, given.keras_tensors, node.outputs, given.kwargs)
        return cost.seconds(self._examples, Machine())

    def _name(self, name: str) -> str:
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        return f"{name}#{call}" if call else name

    def _key(self, variable: keras.Variable) -> str:
        """A variable's path; numbered where two variables have the same."""
        if id(variable) not in self.keys:
            taken = {key for _, key in self.keys.values()}
            key, number = variable.path, 1
            while key in taken:
                key, number = f"{variable.path}#{number}", number + 1
            self.keys[id(variable)] = variable, key
        return self.keys[id(variable)][1]


def inner_functional(node: Any) -> Any:
    """The nested model that a node calls, if its nodes may stand in its place, else None."""
    inner = keras_models.functional_of(node.operation)
    arguments = node.arguments
    if inner is None or node.operation.activity_regularizer is not None:
        return None
    # Keras adds a `mask` of Nones of its own; `training=False` is overridden by the outer model's.
    given_too = {k: v for k, v in arguments.kwargs.items() if not (k == "training" and v is False)}
    told = any(value is not None for value in keras.tree.flatten(given_too))
    if len(arguments.args) != 1 or told:
        return None
    given = arguments.keras_tensors
    flat = keras.tree.flatten(arguments.args[0])
    if len(flat) != len(given) or len(given) != len(inner.inputs):
        return None
    if len(given) > 1 and not _same_structure(arguments.args[0], inner.input):
        return None
    alike = all(
        len(x.shape) == len(t.shape) and x.dtype == t.dtype for x, t in zip(given, inner.inputs)
    )
    return inner if alike else None


def _same_structure(a: Any, b: Any) -> bool:
    try:
        keras.tree.assert_same_structure(
            keras.tree.lists_to_tuples(a), keras.tree.lists_to_tuples(b)
        )
    except (ValueError, TypeError):
        return False
    return True


def _unique_names(names: list[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}:{i}" for i, name in enumerate(names)]
