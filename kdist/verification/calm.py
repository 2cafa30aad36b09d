"""The layers that may rightly differ between one device and replicas, and switching them off.

Random layers draw other masks: every replica has a stream of its own, and over inner axes masks
depend on the layout. `BatchNormalization` takes its statistics from the rows it is given. Both are
called as in inference, on both sides: random layers draw nothing, and `BatchNormalization` uses the
moving statistics, which are the same. A layer that draws in inference too, as the sampling of a
variational autoencoder does, gets one and the same number for each draw. What then still differs
has another cause.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from kdist._compat import keras_models, keras_twins

import keras


def random_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Layers that have a seed generator and know a `training` argument."""
    return [
        layer
        for layer in keras_models.flat_layers(model)
        if _generators(layer) and keras_models.takes_training(layer)
    ]


def always_random(model: keras.Model) -> list[keras.layers.Layer]:
    """Layers that draw random numbers and cannot be told to stop: they know no `training`."""
    return [
        layer
        for layer in keras_models.flat_layers(model)
        if _generators(layer) and not keras_models.takes_training(layer)
    ]


def _generators(layer: keras.layers.Layer) -> list[keras.random.SeedGenerator]:
    return [v for v in vars(layer).values() if isinstance(v, keras.random.SeedGenerator)]


def statistic_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """`BatchNormalization` layers that normalise with the batch's statistics."""
    return [
        layer
        for layer in keras_models.flat_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable  # frozen ones use the moving statistics anyway
    ]


def calm(layers: list[keras.layers.Layer]) -> None:
    """Makes layers draw nothing, or equal numbers, for ever; those with `training` as in inference.

    Args:
        layers: Layers of a twin.
    """
    for layer in layers:
        own: Any = type(layer)
        make = _in_inference if keras_models.takes_training(layer) else _drawing_alike
        layer.__class__ = make(own, keras_models.call_name(layer))


@functools.cache
def _in_inference(base: Any, name: str) -> Any:
    """A subclass whose `call` or `quantized_call`, by name, always has `training=False`."""
    inner = getattr(base, name)
    # Both take the same; Keras's `quantized_call` does not say what.
    signature = inspect.signature(base.call)

    @functools.wraps(inner)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments["training"] = False
        return inner(*bound.args, **bound.kwargs)

    return type(base.__name__, (base,), {name: call, "__module__": base.__module__})


@functools.cache
def _drawing_alike(base: Any, name: str) -> Any:
    """A subclass whose `call` or `quantized_call`, by name, gets the same number for each draw."""
    inner = getattr(base, name)

    @functools.wraps(inner)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with keras_twins.equal_draws():
            return inner(self, *args, **kwargs)

    return type(base.__name__, (base,), {name: call, "__module__": base.__module__})
