"""Stages that the user gives as lists of layers, for models that have no graph of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdist.pipeline.graph import Graph
from kdist.stages.own_call import not_a_chain, refuse_other_call

import keras

Lists = Sequence[Sequence[keras.Layer]]


def chained(model: keras.Model, lists: Lists, stages: int, example: Any) -> Any:
    """A `Functional` that calls the layers one after the other.

    Args:
        model: The model that the layers are of.
        lists: Layers of each virtual stage.
        stages: Number of virtual stages.
        example: Spec of the model's input.

    Raises:
        ValueError: The lists are not as many as stages, miss weights of the model, or have foreign
            ones; the model has several inputs; no batch has been seen; the model's own `call`
            computes something else.
    """
    if len(lists) != stages:
        raise ValueError(
            f"stages as lists of layers has one list per virtual stage, {stages} here. "
            f"Received: {len(lists)} lists"
        )
    if example is None:
        raise ValueError(
            "Stages given as lists of layers are put together when the first batch shows the "
            f"shape of the input. Train or predict a batch first. Received: model={model.name!r}"
        )
    if not isinstance(example, keras.KerasTensor):
        raise ValueError(
            "Stages given as lists of layers pass one tensor on. Make a model of several inputs "
            f"with keras.Model(inputs, outputs). Received: inputs {example!r}"
        )
    used = {id(v) for row in lists for layer in row for v in layer.weights}
    own = {id(v): v for v in model.weights}
    if missing := [v.path for key, v in own.items() if key not in used]:
        raise ValueError(
            "The lists of layers contain every layer of the model that has weights. "
            f"Received: none with {', '.join(missing)}"
        )
    if used - set(own):
        raise ValueError(
            "The lists of layers contain layers of the model alone. Received: layers with "
            f"{len(used - set(own))} weights that the model does not have"
        )
    x = inputs = keras.Input(tuple(example.shape[1:]), dtype=example.dtype)
    for row in lists:
        for layer in row:
            try:
                x = layer(x)
            except (TypeError, ValueError) as error:
                raise not_a_chain(model, error) from error
    chain = keras.Model(inputs, x)
    refuse_other_call(model, chain, [layer for row in lists for layer in row], example)
    return chain


def with_lists(graph: Graph, lists: Lists) -> Graph:
    """The graph of `chained` with the stage of every listed layer's nodes.

    What Keras computes between them (masks) follows its neighbours.
    """
    calls: dict[str, int] = {}
    stage_of: dict[str, int] = {}
    for stage, row in enumerate(lists):
        for layer in row:
            call = calls.get(layer.name, 0)
            calls[layer.name] = call + 1
            name = f"{layer.name}#{call}" if call else layer.name
            for node in graph.nodes:
                if node.name == name or node.name.startswith(f"{name}/"):
                    stage_of[node.name] = stage
    nodes = (dataclasses.replace(n, stage=stage_of.get(n.name)) for n in graph.nodes)
    return dataclasses.replace(graph, nodes=tuple(nodes))
