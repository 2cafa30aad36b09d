"""Keras internals of whether XLA compiles a model's steps.

Keras has no public way to ask, in 3.15; `tests/_compat/test_keras_xla.py` fails by name when one of
them moves.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from kdist._compat.keras_models import flat_layers

import keras
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

LEFT_OPEN = ""
"""What a model's `jit_compile` is in `auto_left_open`, where nobody asked for something else."""
MARK = "_kdist_without_xla"
"""Of a layer that `leave_out_xla` was called for, and that XLA can compile."""


def leave_out_xla(layer: keras.Layer) -> None:
    """Has Keras's own functions of models with a layer do without XLA.

    XLA reads and writes variables of its own device alone. kdist's programs get values.
    """
    if layer.supports_jit:
        object.__setattr__(layer, MARK, True)
        layer.supports_jit = False


@contextlib.contextmanager
def layers_as_made(model: keras.Model) -> Iterator[None]:
    """Meanwhile, what a model's layers support is what it was before `leave_out_xla`."""
    marked = [layer for layer in flat_layers(model) if MARK in vars(layer)]
    for layer in marked:
        layer.supports_jit = True
    try:
        yield
    finally:
        for layer in marked:
            layer.supports_jit = False


def compiles_by_itself(model: keras.Model) -> bool:
    """What Keras makes of `jit_compile="auto"`: not without a GPU, nor of layers that cannot."""
    with layers_as_made(model):
        return bool(model._resolve_auto_jit_compile())


@contextlib.contextmanager
def auto_left_open(model: keras.Model) -> Iterator[None]:
    """Has Keras make `LEFT_OPEN` of `jit_compile="auto"`, which is false, and nothing else is."""
    object.__setattr__(model, "_resolve_auto_jit_compile", lambda: LEFT_OPEN)
    try:
        with layers_as_made(model):
            yield
    finally:
        object.__delattr__(model, "_resolve_auto_jit_compile")


def save_as_auto(model: keras.Model) -> str:
    """Has files say `jit_compile="auto"` of a model that was compiled in `auto_left_open`."""
    model._compile_config.config["jit_compile"] = "auto"
    return "auto"


def forget_made(model: keras.Model) -> None:
    """Has a model make functions anew that it keeps beside those of Keras, perhaps for XLA.

    Such as `generate_function`, which KerasHub's `make_generate_function` makes if it is None, and
    gives back if it is not.
    """
    of_keras = ("train_function", "test_function", "predict_function")
    for name in set(vars(model)).difference(of_keras):
        made: Any = getattr(model, name)
        make: Any = getattr(model, f"make_{name}", None)
        if isinstance(made, Function) and _takes_nothing(make) and make() is made:
            setattr(model, name, None)


def _takes_nothing(make: Any) -> bool:
    """Whether it can be called without arguments."""
    try:
        inspect.signature(make).bind()
    except (TypeError, ValueError):
        return False
    return True


def forget_functions(model: keras.Model) -> None:
    """Has a plain model trace its functions anew, with XLA if its layers still support it."""
    model.train_function = model.test_function = model.predict_function = None
    if model._jit_compile and not all(layer.supports_jit for layer in flat_layers(model)):
        model._jit_compile = False
