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
        with contextlib.suppress(Exception):  # whatever the user's own comparison raises
            return other.value is self.value or bool(self.value == other.value)
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
    kind = type(value)
    if isinstance(value, _NUMBERS):
        return (kind, value)  # 1, 1.0 and True are equal
    if isinstance(value, tf.Tensor | keras.KerasTensor) and not hasattr(value, "numpy"):
        return (kind,)  # of a trace: what a layer keeps to show it, as attention scores
    if isinstance(value, np.ndarray) and value.nbytes <= _BYTES and not value.dtype.hasobject:
        return (kind, value.dtype.str, value.shape, value.tobytes())
    if not depth or (isinstance(value, (*_CONTAINERS, Mapping)) and len(value) > _MOST):
        return Same(value)
    if isinstance(value, Mapping):
        items = value.items()
        return (kind, *((alike(k, depth - 1), alike(v, depth - 1)) for k, v in items))
    if isinstance(value, _CONTAINERS):
        return (kind, *(alike(one, depth - 1) for one in value))
    return _own_object(value, depth)


def _own_object(value: Any, depth: int) -> Hashable:
    """What an object of a class is like."""
    kind = type(value)
    if isinstance(value, types.FunctionType):
        return (Same(value), *_around(value, depth - 1))
    if isinstance(value, _THEMSELVES):
        return Same(value)
    if kind.__hash__ not in (None, object.__hash__):
        with contextlib.suppress(TypeError):  # of a class that has a hash, but not always
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
