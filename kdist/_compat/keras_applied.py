"""Keras internals of who applies gradients: methods of optimizers, replaced and routed."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras.src.optimizers import base_optimizer as keras_base_optimizer

SEE_ALL = (
    "apply",
    "apply_gradients",
    "_clip_gradients",
    "_backend_apply_gradients",
    "_backend_update_step",
)
"""Methods of an optimizer that Keras hands the gradients of all weights."""


def own_methods(optimizer: Any, names: Sequence[str]) -> list[str]:
    """Which methods of an optimizer are neither Keras's nor kdist's."""

    def definer(name: str) -> type:
        return next(one for one in type(optimizer).__mro__ if name in vars(one))

    return [n for n in names if definer(n).__module__.split(".")[0] not in ("keras", "kdist")]


def methods_of_object(optimizer: Any) -> list[str]:
    """Methods that somebody assigned to one optimizer, and neither Keras nor kdist did."""
    kind = type(optimizer)
    found = [n for n, v in vars(optimizer).items() if callable(v) and hasattr(kind, n)]
    methods = [n for n in found if inspect.isfunction(inspect.getattr_static(kind, n))]
    return [n for n in methods if _package_of(vars(optimizer)[n]) not in ("keras", "kdist")]


def _package_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return (getattr(function, "__module__", None) or "").partition(".")[0]


def replace_apply(optimizer: Any, apply: Callable[..., None]) -> None:
    """Replaces what `apply` and `apply_gradients` of one optimizer do."""

    def apply_gradients(grads_and_vars: Iterable[Any]) -> Any:
        apply(*zip(*grads_and_vars, strict=True))
        return optimizer.iterations

    object.__setattr__(optimizer, "apply", apply)
    object.__setattr__(optimizer, "apply_gradients", apply_gradients)


def _with_own(kind: Any, name: str) -> set[Any]:
    """The classes that have a method of their own, from one on down."""
    found = {kind} if name in vars(kind) else set()
    return found.union(*(_with_own(one, name) for one in kind.__subclasses__()))


@contextlib.contextmanager
def applied_by(apply: Callable[[Any, Callable, Any, Any], None]) -> Iterator[None]:
    """Meanwhile, `apply` and `apply_gradients` of every optimizer are run by a function.

    Whose optimizers a step of the user's own uses is known once it uses them, so it is the classes
    that change: wrappers, and those of the user's own, too.

    Args:
        apply: Gets the optimizer, a function of gradients and variables that does what its own
            method does, gradients, and variables or None.
    """

    def of_apply(own: Callable) -> Callable:
        @tf.autograph.experimental.do_not_convert
        def run(self: Any, grads: Any, trainable_variables: Any = None) -> None:
            apply(self, functools.partial(own, self), grads, trainable_variables)

        return run

    def of_apply_gradients(own: Callable) -> Callable:
        @tf.autograph.experimental.do_not_convert
        def run(self: Any, grads_and_vars: Iterable[Any]) -> Any:
            grads, variables = zip(*grads_and_vars, strict=True)
            apply(self, lambda grads, found: own(self, zip(grads, found)), grads, variables)
            return self.iterations

        return run

    with _routed({"apply": of_apply, "apply_gradients": of_apply_gradients}):
        yield


@contextlib.contextmanager
def built_within(around: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Meanwhile, every optimizer is built within a context, whoever calls `build`."""

    def of_build(own: Callable) -> Callable:
        @tf.autograph.experimental.do_not_convert
        def run(self: Any, variables: Any) -> None:
            with around():
                own(self, variables)

        return run

    with _routed({"build": of_build}):
        yield


@contextlib.contextmanager
def scaled_after(prepare: Callable[[Any], None]) -> Iterator[None]:
    """Meanwhile, a function sees every optimizer that is asked to scale a loss, before it does."""

    def of_scale_loss(own: Callable) -> Callable:
        @tf.autograph.experimental.do_not_convert
        def run(self: Any, loss: Any) -> Any:
            prepare(self)
            return own(self, loss)

        return run

    with _routed({"scale_loss": of_scale_loss}):
        yield


@contextlib.contextmanager
def _routed(methods: dict[str, Callable[[Callable], Callable]]) -> Iterator[None]:
    """Meanwhile, methods of all classes of optimizers are what functions make of them."""
    before: list[tuple[Any, str, Callable]] = []
    base = keras_base_optimizer.BaseOptimizer
    for name, routed in methods.items():
        for owner in _with_own(base, name):
            before.append((owner, name, vars(owner)[name]))
            setattr(owner, name, routed(vars(owner)[name]))
    try:
        yield
    finally:
        for owner, name, own in before:
            setattr(owner, name, own)
