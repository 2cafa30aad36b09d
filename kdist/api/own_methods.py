"""What methods of a model are called with, which its class may have overridden in its own way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from kdist.runtime.metrics import overrides

import keras

_MANY = inspect.Parameter.VAR_POSITIONAL
_NAMED = inspect.Parameter.VAR_KEYWORD


MADE = ("make_train_function", "make_test_function", "make_predict_function")
"""Methods whose functions kdist makes itself."""


def refuse_own_functions(model: keras.Model) -> None:
    """Refuses a model that makes itself what `fit`, `evaluate` or `predict` call.

    Args:
        model: The model, which is not parallel yet.

    Raises:
        ValueError: It does: its function would be left out.
    """
    for name in MADE:
        if overrides(model, name):
            kind = name.split("_")[1]
            raise ValueError(
                f"kdist makes the {kind} function itself, over the mesh. Say what a step does in "
                f"{kind}_step, and leave {name} to Keras. "
                f"Received: {type(model).__name__} with a {name} of its own"
            )


class Arguments:
    """Arguments of a method of a model, by name, to be looked at and changed before it is called.

    Args:
        model: The model.
        name: Of the method; the model's class has it.
        args: What it was called with.
        kwargs: What it was called with by name.

    Attributes:
        named: The arguments, by name. Those that the method takes as `*args` have the names that
            they have in Keras's own method.

    Raises:
        TypeError: The method takes no such arguments.
    """

    def __init__(self, model: keras.Model, name: str, args: Any, kwargs: Any) -> None:
        self._model, self._method = model, getattr(type(model), name)
        parameters = _parameters(self._method)
        self._defaults = {p.name: p.default for p in parameters}
        kinds = {p.kind: p.name for p in parameters}
        self.any_name = _NAMED in kinds
        self._by_name = {p.name for p in parameters if p.kind == inspect.Parameter.KEYWORD_ONLY}
        method = getattr(keras.Model, name) if self.any_name and _MANY in kinds else self._method
        given = inspect.signature(method).bind(model, *args, **kwargs).arguments
        del given[next(iter(given))]  # the model
        for one in _parameters(method):
            if one.kind == _NAMED:
                given |= given.pop(one.name, {})
        self._many = given.pop(kinds[_MANY], ()) if _MANY in kinds and not self.any_name else ()
        self.named: dict[str, Any] = given

    def takes(self, name: str) -> bool:
        """Whether the method takes an argument of that name."""
        return self.any_name or name in self._defaults

    def get(self, name: str, otherwise: Any = None) -> Any:
        """What an argument is; by default what the method says, if it says something."""
        default = self._defaults.get(name, inspect.Parameter.empty)
        default = otherwise if default is inspect.Parameter.empty else default
        return self.named.get(name, default)

    def call(self, named: dict[str, Any] | None = None) -> Any:
        """Calls the method.

        Args:
            named: Instead of `self.named`.
        """
        given = self.named if named is None else named
        if not self._many:
            return self._method(self._model, **given)
        named = {n: value for n, value in given.items() if n in self._by_name}
        first = [given[n] for n in self._defaults if n in given and n not in named]
        return self._method(self._model, *first, *self._many, **named)


def _parameters(method: Callable) -> list[inspect.Parameter]:
    """Those of a method, but for the object."""
    return [*inspect.signature(method).parameters.values()][1:]
