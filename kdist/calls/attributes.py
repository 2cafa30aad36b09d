"""What Python objects are like, so that a call traced before is used again only where it holds.

A trace holds what Python decided on the way: flags, activations, numbers. A user's step may set an
attribute between two calls of one layer (adapters off for a reference policy, say). As with Keras,
each call does what it finds then.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from kdist._compat import keras_models

import keras
import numpy as np
import tensorflow as tf

_DEPTH, _MOST, _BYTES = 4, 256, 1 << 16
_CONTAINERS = (list, tuple, set, frozenset)
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, np.generic)
_THEMSELVES = (
    *(type, types.ModuleType, types.MethodType, functools.partial),
    *(keras.Layer, keras.Variable, tf.Variable, tf.Tensor, tf.Module),
)
_OF_LIBRARIES = ("keras", "tensorflow", "numpy", "kdist", "builtins")


class Same:
    """An object, equal to none but itself; held, so that nothing else gets its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Equal:
    """An object that says itself what it equals; nothing, where it cannot say."""

    def __init__(self, value: Any) -> None:
        self.value, self._hash = value, hash(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Equal) or type(other.value) is not type(self.value):
            return False
        if other.value is self.value:
            return True
        with contextlib.suppress(Exception):  # whatever the user's own comparison raises
            return bool(self.value == other.value)
        return False

    def __hash__(self) -> int:
        return self._hash


def attributes_of(layers: Iterable[keras.Layer]) -> Hashable:
    """What attributes of layers are like, but for those in which Keras notes their calls.

    Args:
        layers: The layers of a call.

    Returns:
        Equal for equal attributes: numbers and texts by value, lists and the user's own objects by
        what they hold, functions by what they read from around them, all else by identity.
    """
    noted = keras_models.kept_of_calls()

    def of(one: keras.Layer) -> Hashable:
        held = ((n, v) for n, v in vars(one).items() if n not in noted and v is not None)
        return (alike(type(one).call), *((name, alike(value)) for name, value in held))

    return tuple(map(of, layers))


def alike(value: Any, depth: int = _DEPTH) -> Hashable:
    """What one object is like; see `attributes_of`.

    Args:
        value: The object.
        depth: How deep to look into it.
    """
    try:
        return _alike(value, depth)
    except Exception:  # whatever the user's own class raises where it is looked into
        return Same(value)


def _alike(value: Any, depth: int) -> Hashable:
    kind = type(value)
    if isinstance(value, _NUMBERS):
        hash(value)
        return (kind, value)  # 1, 1.0 and True are equal
    if isinstance(value, keras.KerasTensor):
        return (kind,)
    if isinstance(value, tf.Tensor) and not hasattr(value, "numpy"):
        return (kind, *_of_step(value))
    if isinstance(value, np.ndarray) and value.nbytes <= _BYTES and not value.dtype.hasobject:
        return (kind, value.dtype.str, value.shape, value.tobytes())
    if not depth or (isinstance(value, (*_CONTAINERS, Mapping)) and len(value) > _MOST):
        return Same(value)
    if isinstance(value, Mapping):
        items = value.items()
        return (kind, *((alike(k, depth - 1), alike(v, depth - 1)) for k, v in items))
    if isinstance(value, _CONTAINERS):
        held = (alike(one, depth - 1) for one in value)
        return (kind, frozenset(held)) if isinstance(value, set | frozenset) else (kind, *held)
    return _own_object(value, depth)


def _of_step(tensor: tf.Tensor) -> tuple[Hashable, ...]:
    """Which one a tensor of a graph is, where what is traced can read it.

    Of another trace it is what a layer keeps to show it, as attention scores.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not tensor.graph:
        graph = getattr(graph, "outer_graph", None)
    return () if graph is None else (weakref.ref(graph), tensor.name)


def _own_object(value: Any, depth: int) -> Hashable:
    """What an object of a class is like."""
    kind = type(value)
    if isinstance(value, types.FunctionType):
        return (Same(value), *_around(value, depth - 1))
    if isinstance(value, _THEMSELVES):
        return Same(value)
    if kind.__hash__ not in (None, object.__hash__):
        with contextlib.suppress(Exception):  # of a class that has a hash, but not always
            return Equal(value)
    if _of_library(kind.__module__) or not hasattr(value, "__dict__"):
        return Same(value)
    return (Same(value), alike(vars(value), depth - 1))


def _around(function: types.FunctionType, depth: int) -> Iterator[Hashable]:
    """What a function of the user's reads from around it: numbers and texts of its module too."""
    if _of_library(function.__module__ or ""):
        return
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            yield alike(cell.cell_contents, depth)
    read = function.__code__.co_names
    found = {n: function.__globals__[n] for n in read if n in function.__globals__}
    yield tuple((n, alike(v)) for n, v in found.items() if isinstance(v, _NUMBERS))


def _of_library(module: str) -> bool:
    return module.partition(".")[0] in _OF_LIBRARIES
