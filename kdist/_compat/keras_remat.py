"""Keras and TensorFlow internals for `keras.RematScope` and `keras.remat`.

Layers and operations note the scope that they were made in as `_remat_mode`, and `__call__` wraps
`call` in `tf.recompute_grad` by it. On TensorFlow that fails in `fit`, or draws other masks.

`keras.remat` is `tf.recompute_grad`. What that makes knows the gradients of its arguments and of
variables, but not of other tensors. A pure function of a model gets weights as tensors, so these
would get no gradient.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import custom_gradient

WRAPPER = "recompute_grad"
"""Function in which wrappers are made, as TensorFlow notes it."""
LIBRARIES = frozenset(
    {*sys.stdlib_module_names, "keras", "tensorflow", "numpy", "kdist", "pytest", "_pytest"}
)
LOOKED_AT = 10_000
"""So many values of a layer are looked at in search of wrappers."""
_NOT_LOOKED_INTO = (
    *(type(None), str, bool, int, float, bytes, types.BuiltinFunctionType, types.ModuleType),
    *(keras.layers.Layer, keras.Variable, keras.KerasTensor, tf.Tensor, tf.Variable),
)
"""What most values are comes first. Layers are looked at each for itself."""


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


@contextlib.contextmanager
def taken_back(model: keras.Model) -> Iterator[None]:
    """Meanwhile, a model runs as if it had been made outside of any scope, and without wrappers."""
    with without_remat(with_remat(operations_of(model))), wrapped_run_by(lambda call: call):
        yield


def wraps_functions(layer: keras.layers.Layer) -> bool:
    """Whether a layer has what `keras.remat` made, or makes it in a method of its own.

    It may be in lists, dicts and objects that the layer has, at any depth; of these, and of
    functions on the way, so many are looked at.
    """
    held = [*vars(layer).values(), *_of_class(type(layer))]
    seen: dict[int, Any] = {}
    return any(_leads_to_remat(one, seen) for one in held)


def _is_wrapper(value: Any) -> bool:
    if type(value) not in (types.FunctionType, custom_gradient.Bind):
        return False
    return getattr(vars(value).get("_tf_decorator"), "decorator_name", None) == WRAPPER


def _leads_to_remat(value: Any, seen: dict[int, Any]) -> bool:
    """Whether a value is what `keras.remat` made, or leads to what is or makes such.

    Args:
        value: Anything.
        seen: What was looked at, by identity; kept, so that no other value gets its identity.
    """
    waiting = [value]
    while waiting and len(seen) < LOOKED_AT:
        one = waiting.pop()
        if one is keras.remat or one is tf.recompute_grad:
            return True
        if id(one) in seen or isinstance(one, _NOT_LOOKED_INTO):
            continue
        seen[id(one)] = one
        if _is_wrapper(one):
            return True
        waiting.extend(_held_by(one))
    return False


def _held_by(value: Any) -> list[Any]:
    """What a container, function, class or object has, if it is the user's."""
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return [*value]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        return [] if _is_library(value) else _reached(value)
    kind = value if isinstance(value, type) else type(value)
    if _is_library(kind) or issubclass(kind, keras.layers.Layer):
        return []
    return [*([] if isinstance(value, type) else _attributes(value)), *_of_class(kind)]


def _attributes(value: Any) -> list[Any]:
    """What an object has, without asking it, as a proxy would answer in its own way."""
    found: list[Any] = []
    for kind in type(value).__mro__:
        for name in ("__dict__", *vars(kind).get("__slots__", ())):
            slot = vars(kind).get(name)
            with contextlib.suppress(AttributeError):  # none, or without a value yet
                if isinstance(slot, types.GetSetDescriptorType | types.MemberDescriptorType):
                    held = slot.__get__(value)
                    found += held.values() if name == "__dict__" else [held]
    return found


def _of_class(kind: type) -> list[Any]:
    """What a class and its bases have, those of libraries apart."""
    return [one for base in kind.__mro__ if not _is_library(base) for one in vars(base).values()]


def _is_library(value: types.FunctionType | type) -> bool:
    """Whether a function or class is of a library: none of these wraps what users do."""
    module = value.__module__
    # A class may have a slot or property of that name: what its objects answer, as proxies do.
    return isinstance(module, str) and module.partition(".")[0] in LIBRARIES


def _reached(function: types.FunctionType) -> list[Any]:
    """What a function's code may name: globals, what modules among them have, closed-over values.

    Of nested functions too.
    """
    code = [function.__code__]
    names: set[str] = set()
    while code:
        one = code.pop()
        names.update(one.co_names)
        code.extend(c for c in one.co_consts if isinstance(c, types.CodeType))
    known = [function.__globals__.get(name) for name in names]
    modules = [one for one in known if isinstance(one, types.ModuleType)]
    known += [getattr(module, "__dict__", {}).get(name) for module in modules for name in names]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # of a name that has no value yet
            known.append(cell.cell_contents)
    return known


def described(call: Callable) -> str:
    """A function or a layer, in a message."""
    return str(getattr(call, "__qualname__", call))


@contextlib.contextmanager
def wrapped_run_by(taken: Callable[[Callable], Callable]) -> Iterator[None]:
    """Meanwhile, what `keras.remat` made of a function runs as what `taken` makes of it."""
    before = {name: getattr(custom_gradient, name) for name in _MODES}

    def instead(name: str) -> Callable:
        def decorated(wrapped: Callable, args: Any, kwargs: Any) -> Any:
            if not wrapped.__qualname__.startswith(f"{WRAPPER}.<locals>."):
                return before[name](wrapped, args, kwargs)
            return taken(inspect.getclosurevars(wrapped).nonlocals["f"])(*args, **kwargs)

        return decorated

    for name in before:
        setattr(custom_gradient, name, instead(name))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(custom_gradient, name, function)


_MODES = ("_graph_mode_decorator", "_eager_mode_decorator")
"""What runs a function with a gradient of its own, in a graph and op by op."""
