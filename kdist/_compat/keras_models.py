"""Keras internals of models as graphs of layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras.src.models.functional import Functional


def functional_of(model: Any) -> Any:
    """The `Functional` that a Functional or built Sequential model runs, or None.

    None also for models whose `call` is not Keras's own: their graph is not what they compute.
    """
    call = getattr(type(model), "call", None)
    if isinstance(model, keras.Sequential):
        return model._functional if call is keras.Sequential.call else None
    return model if isinstance(model, Functional) and call is Functional.call else None


def nodes_in_order(functional: Any) -> list[Any]:
    """The nodes of a `Functional` in the order in which Keras runs them, without its inputs.

    Each has an `operation`, `arguments` (`args`, `kwargs`, `keras_tensors`, `fill_in`) and flat
    `outputs`.
    """
    by_depth = functional._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in nodes if not node.is_input]


def has_call(model: keras.Model) -> bool:
    """Whether a model can be called; one that only holds others may have no `call`."""
    return type(model).call not in (keras.Model.call, keras.Layer.call)


def flat_layers(layer: keras.Layer) -> list[keras.Layer]:
    """A layer and all layers inside it, at any depth, itself first."""
    return list(layer._flatten_layers())


def trainable_flags(layer: keras.Layer) -> list[tuple[Any, bool]]:
    """Whether a layer trains, those inside it, and their weights, for `trainable_as`."""
    layers = flat_layers(layer)
    held = [*layers, *(v for one in layers for v in one._trainable_variables)]
    return [(one, one._trainable) for one in held]


@contextlib.contextmanager
def trainable_as(flags: Sequence[tuple[Any, bool]]) -> Iterator[None]:
    """Meanwhile, layers and weights train as flags say. What says so already is left to the user.

    Args:
        flags: By `trainable_flags`.
    """
    others = [(one, one._trainable) for one, flag in flags if one._trainable != flag]
    for one, flag in others:
        one._trainable = not flag
    try:
        yield
    finally:
        for one, flag in others:
            one._trainable = flag


def flags_to_train(layer: keras.Layer, wanted: Sequence[keras.Variable]) -> list[tuple[Any, bool]]:
    """Flags with which just these weights of a layer train, whatever is frozen now."""
    known = {id(v) for v in wanted}
    layers = flat_layers(layer)
    weights = [v for one in layers for v in one._trainable_variables]
    return [*((one, True) for one in layers), *((v, id(v) in known) for v in weights)]


def synchronizes(model: keras.Model) -> bool:
    """Whether a layer of a model takes its statistics over the rows of all replicas."""
    return any(getattr(one, "synchronized", False) for one in flat_layers(model))


def layers_inside(layer: keras.Layer) -> list[keras.Layer]:
    """The layers directly inside a layer."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def held_layers(layer: keras.Layer) -> list[keras.Layer]:
    """The same as `flat_layers`, without unbuilt ones that no attribute holds any more.

    Keras goes on listing a layer that an attribute has held (`self.head`, of a base class) when
    another one has taken its place. Nobody will call it.
    """

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            value = [*value.values()]
        if isinstance(value, list | tuple | set | frozenset):
            for one in value:
                yield from leaves(one)
        else:
            yield value

    found, queue = {id(layer): layer}, [layer]
    for one in queue:
        # But for lists of what Keras, and TensorFlow, track.
        names = [name for name in vars(one) if name != "_layers" and not name.startswith("_self_")]
        held = {id(leaf) for name in names for leaf in leaves(vars(one)[name])}
        for inner in layers_inside(one):
            kept = inner.built or id(inner) in held or isinstance(one, keras.Sequential)
            if kept and id(inner) not in found:
                found[id(inner)] = inner
                queue.append(inner)
    return list(found.values())


def without_weights(layer: keras.Layer) -> list[keras.Layer]:
    """Layers inside a layer, itself too, whose weights are not made yet, as their `build` would.

    Keras says of many more that they are not built: a `Reshape` that was not called, a model that
    only holds others and has no `call`.
    """
    merge = keras.layers.Add.__base__  # its kinds check shapes in `build`
    builds = {one.build for one in (keras.Layer, keras.Model, keras.Sequential)}
    unbuilt = [one for one in held_layers(layer) if not one.built and not isinstance(one, merge)]
    return [one for one in unbuilt if type(one).build not in builds]


def layers_of(node: Any) -> list[keras.Layer]:
    """The layer that a node calls and all layers inside it; none for an operation."""
    return flat_layers(node.operation) if isinstance(node.operation, keras.Layer) else []


def calls_of(layer: keras.Layer) -> list[Any]:
    """The calls of a layer on symbolic tensors: nodes with `arguments` and `outputs`."""
    return list(layer._inbound_nodes)


def flat_inputs(functional: Any, inputs: Any) -> list[Any]:
    """Inputs of a `Functional` as its call takes them: flat, as tensors, of the expected ranks.

    An optional input that is not given is None.
    """
    return list(functional._standardize_inputs(inputs))


@contextlib.contextmanager
def as_model_call(layer: keras.Layer) -> Iterator[None]:
    """Makes a layer that stands for a part of a model take inputs as they are, as a model does."""
    before = layer._convert_input_args, layer._allow_non_tensor_positional_args
    layer._convert_input_args, layer._allow_non_tensor_positional_args = False, True
    try:
        yield
    finally:
        layer._convert_input_args, layer._allow_non_tensor_positional_args = before


def call_name(layer: keras.Layer) -> str:
    """The method that Keras runs when a layer is called."""
    return "call" if getattr(layer, "quantization_mode", None) is None else "quantized_call"


def call_of(layer: keras.Layer) -> Any:
    """What Keras runs when a layer is called: `call`, or `quantized_call` if it is quantized."""
    return getattr(layer, call_name(layer))


@functools.cache
def kept_of_calls() -> frozenset[str]:
    """Names of attributes in which every Keras layer keeps what it was called with and made.

    And of `call` itself. Its settings, as `autocast`, are not among them.
    """
    settings = {"activity_regularizer", "autocast", "_dtype_policy", "_supports_masking"}
    settings |= {"_convert_input_args", "_allow_non_tensor_positional_args", "_remat_mode"}
    return frozenset({*vars(keras.Layer()), "call"} - settings)


def give_call(layer: keras.Layer, call: Any) -> None:
    """Gives a layer another `call_of`, on the instance; see `calls_kept`."""
    object.__setattr__(layer, call_name(layer), call)


@contextlib.contextmanager
def calls_kept(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """Around what gives layers another call, on the instance: afterwards they have theirs."""
    names = ("call", "quantized_call")
    before = [(layer, name, vars(layer).get(name)) for layer in layers for name in names]
    try:
        yield
    finally:
        for layer, name, call in before:
            vars(layer).pop(name, None)
            if call is not None:
                object.__setattr__(layer, name, call)


def takes_training(operation: Any) -> bool:
    """Whether Keras passes `training` to it: a model that it trains, a layer of a `Functional`."""
    return getattr(operation, "_call_has_training_arg", False)


def pack_outputs(functional: Any, outputs: Sequence[Any]) -> Any:
    """Flat outputs of a `Functional` in the structure that its `call` returns."""
    packed = keras.tree.pack_sequence_as(functional._outputs_struct, list(outputs))
    return packed


def model_outputs(functional: Any, outputs: Sequence[Any]) -> Any:
    """What calling a `Functional` returns for flat outputs: a single one without its list."""
    packed = pack_outputs(functional, outputs)
    return packed[0] if isinstance(packed, list | tuple) and len(packed) == 1 else packed
