"""Keras internals for what a layer's own `call` makes of its inputs, as a graph of layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kdist._compat import keras_models
from kdist._compat.keras_twins import names_kept

import keras

_NODES = ("_inbound_nodes", "_outbound_nodes")


class NoGraph(Exception):
    """What a layer's `call` does is no graph of layers; says why."""


@contextlib.contextmanager
def nodes_kept(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """Around symbolic calls of layers: afterwards they have the nodes of earlier ones."""
    before = [(layer, name, len(getattr(layer, name))) for layer in layers for name in _NODES]
    try:
        yield
    finally:
        for layer, name, count in before:
            del getattr(layer, name)[count:]


def called_graph(layer: keras.Layer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The graph of what a built layer's `call` does, as `keras_models.nodes_in_order` reads it.

    `call` runs on symbolic tensors, which layers inside it take as those of a `Functional` do; what
    it writes to variables is forgotten.

    Args:
        layer: The layer.
        args: What it is called with; symbolic tensors among it.
        kwargs: See `args`.

    Returns:
        A `keras.Function`, whose inputs stand for the symbolic tensors in their order.

    Raises:
        NoGraph: `call` computes by TensorFlow alone, looks at values, or fails otherwise.
    """
    layers = keras_models.flat_layers(layer)
    if unbuilt := [one.name for one in layers if not one.built]:
        raise NoGraph(f"its layer {unbuilt[0]!r} is not built")
    failed: Exception | None = None
    # Many a call makes something for each row (a class token, tiled), which takes their number.
    for rows in (None, 2):
        with names_kept(), nodes_kept(layers), keras.StatelessScope():
            try:
                return _graph_of(keras_models.call_of(layer), args, kwargs, rows)
            except Exception as error:  # any, of the layer's own code; callers tell of it
                failed = error
    raise NoGraph(f"its call takes no symbolic tensors ({type(failed).__name__})") from failed


def _graph_of(
    call: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int | None
) -> Any:
    """The graph of a call, on inputs of as many rows where these are not known."""
    inputs: list[Any] = []

    def stand_in(one: Any) -> Any:
        if not isinstance(one, keras.KerasTensor):
            return one
        shape = tuple(one.shape)
        shape = (rows, *shape[1:]) if shape[:1] == (None,) else shape
        inputs.append(keras.Input(batch_shape=shape, dtype=one.dtype))
        return inputs[-1]

    own = keras.tree.map_structure(stand_in, (tuple(args), dict(kwargs)))
    return keras.Function(inputs, call(*own[0], **own[1]))


def known_inputs(layer: keras.Layer) -> tuple[list[Any], dict[str, Any]] | None:
    """What a layer was built for, as symbolic tensors to call it with; None if it is not known.

    They are of the dtype that it computes in.
    """
    shapes = layer._build_shapes_dict
    if not shapes or not all(map(_is_shape, shapes.values())):
        return None
    given = {
        name.removesuffix("_shape"): keras.KerasTensor(tuple(one), layer.compute_dtype)
        for name, one in shapes.items()
    }
    return ([*given.values()], {}) if len(given) == 1 else ([], given)


def _is_shape(one: Any) -> bool:
    return isinstance(one, (tuple, list)) and all(n is None or isinstance(n, int) for n in one)
