"""Keras internals for what `keras.RematScope` said of layers and operations.

Each of them notes the scope that it was made in as `_remat_mode`, and its `__call__` wraps `call`
in `tf.recompute_grad` by it. On TensorFlow that fails in `fit`, or draws other masks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import keras


def operations_of(model: keras.Model) -> list[Any]:
    """A model, its layers at any depth, and the operations of the graphs among them."""
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        found[id(layer)] = layer
        if isinstance(layer, keras.Model) and hasattr(layer, "operations"):
            found.update((id(one), one) for one in layer.operations)
    return list(found.values())


def with_remat(operations: Iterable[Any]) -> list[Any]:
    """Those that were made in a scope."""
    return [one for one in operations if getattr(one, "_remat_mode", None) is not None]


def policy_of(layer: keras.layers.Layer) -> str | None:
    """What a layer's scope asks for: "full", or "selective", which repeats activations alone.

    Where the size of a layer's output is not known before it runs, since it has no symbolic call,
    it counts as larger than any threshold.
    """
    noted = getattr(layer, "_remat_mode", None)
    if noted is None or noted.mode is None:
        return None
    if noted.mode == "activations":
        return "selective" if getattr(layer, "activation", None) is not None else None
    if noted.mode == "list_of_layers":
        return "full" if layer.name in noted.layer_names else None
    if noted.mode == "larger_than":
        calls = layer._inbound_nodes
        largest = max((_size(node.outputs) for node in calls), default=None)
        small = largest is not None and largest <= noted.output_size_threshold
        return None if small else "full"
    return "full"


def _size(tensors: Any) -> int:
    """Elements of one example, as Keras counts them."""
    return sum(math.prod(d or 1 for d in t.shape) for t in keras.tree.flatten(tensors))


@contextlib.contextmanager
def without_remat(operations: Iterable[Any]) -> Iterator[None]:
    """Meanwhile, operations run as if they had been made outside of any scope."""
    before = [(one, one._remat_mode) for one in operations]
    for one, _ in before:
        object.__setattr__(one, "_remat_mode", None)
    try:
        yield
    finally:
        for one, mode in before:
            object.__setattr__(one, "_remat_mode", mode)


def taken_back(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Meanwhile, a model runs as if it had been made outside of any scope."""
    return without_remat(with_remat(operations_of(model)))
