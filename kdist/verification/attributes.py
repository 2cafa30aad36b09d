"""A layer or model made again from its attributes, where it has no configuration.

That is how examples write models with a step of their own: a subclass that gets its networks as
arguments of its constructor, and keeps them beside metrics, optimizers and numbers.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import pathlib
import types
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from kdist._compat import keras_twins
from kdist.verification.again import metric_again, optimizer_again
from kdist.verification.no_twin import NoTwin

import keras
import numpy as np
import tensorflow as tf

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type, range, slice),
    *(np.generic, np.dtype, tf.DType, tf.TensorShape, types.BuiltinFunctionType, types.ModuleType),
    *(enum.Enum, pathlib.PurePath, keras.Initializer, keras.Regularizer),
    *(keras.constraints.Constraint, keras.optimizers.schedules.LearningRateSchedule),
)
"""Types of values that a twin may share with its model."""

SETTINGS = (Namespace, types.SimpleNamespace)
"""Types of objects that are what their attributes say; so are dataclasses."""


class FromAttributes:
    """Makes a layer, or a model, again, with all that its attributes hold.

    Args:
        dtype: Dtype of its variables, "float32" or "float64".
        policy: Its dtype policy.
        layer_again: Makes a layer inside it again.
    """

    def __init__(
        self, dtype: str, policy: str, layer_again: Callable[[keras.Layer], keras.Layer]
    ) -> None:
        self._dtype, self._policy, self._layer_again = dtype, policy, layer_again

    def __call__(self, layer: keras.Layer) -> keras.Layer:
        """The layer again.

        Raises:
            NoTwin: It holds something of which no second one can be made.
        """
        if own := [v.path for v in keras_twins.own_variables(layer)]:
            raise NoTwin(f"it has no configuration, and weights of its own: {own}")
        kind: Any = type(layer)
        policy = self._policy if self._policy == "float64" else layer.dtype_policy
        again = kind.__new__(kind)
        base = keras.Model if isinstance(layer, keras.Model) else keras.Layer
        base.__init__(again, name=layer.name, dtype=policy)
        known: dict[int, Any] = {id(layer): again}
        for name, value in keras_twins.own_attributes(layer).items():
            setattr(again, name, self._again(value, f"{kind.__name__}.{name}", known))
        again.built = layer.built
        return again

    def value(self, value: Any, name: str) -> Any:
        """A value of its own for the twin; `name` is what the user knows it by.

        Raises:
            NoTwin: No second one can be made of it.
        """
        return self._again(value, name, {})

    def _again(self, value: Any, name: str, known: dict[int, Any]) -> Any:
        """A value of its own for the twin, or one that both may have."""
        if isinstance(value, PLAIN):
            return value
        if id(value) not in known:
            known[id(value)] = self._made(value, name, known)
        return known[id(value)]

    def _made(self, value: Any, name: str, known: dict[int, Any]) -> Any:
        if isinstance(value, keras.Layer):
            return self._layer_again(value)
        if isinstance(value, keras.optimizers.Optimizer):
            return optimizer_again(value, self._dtype, {})
        if isinstance(value, keras.Loss):
            return keras_twins.loss_in(value, self._dtype)
        if isinstance(value, keras.Metric):
            return metric_again(value, self._dtype)
        if isinstance(value, keras.random.SeedGenerator):
            return type(value).from_config(value.get_config())
        if isinstance(value, dict):
            return {key: self._again(one, f"{name}[{key!r}]", known) for key, one in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            items = [self._again(one, f"{name}[...]", known) for one in value]
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*items)
            kind = next(one for one in (list, tuple, set, frozenset) if isinstance(value, one))
            return kind(items)
        if isinstance(value, tf.Variable):  # written by steps, each twin's by its own
            dtype = self._dtype if value.dtype.is_floating else value.dtype
            return tf.Variable(
                tf.cast(value, dtype), trainable=value.trainable, name=value.name.split(":")[0]
            )
        if isinstance(value, SETTINGS) or dataclasses.is_dataclass(value):
            return self._settings(value, name, known)
        if isinstance(value, functools.partial):
            given = (value.func, value.args, value.keywords)
            function, args, named = (self._again(one, name, known) for one in given)
            return functools.partial(function, *args, **named)
        if isinstance(value, np.ndarray) or (tf.is_tensor(value) and hasattr(value, "numpy")):
            floating = tf.as_dtype(value.dtype).is_floating
            if isinstance(value, np.ndarray):
                return value.astype(self._dtype if floating else value.dtype)
            return tf.cast(value, self._dtype) if floating else value
        if isinstance(value, types.MethodType) and id(value.__self__) in known:
            return types.MethodType(value.__func__, known[id(value.__self__)])
        if isinstance(value, types.FunctionType):
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            if all(isinstance(one, PLAIN) for one in held):
                return value
        raise NoTwin(
            f"no second one can be made of {name}, a {type(value).__name__}: give the class a "
            "get_config that says what it is"
        )

    def _settings(self, value: Any, name: str, known: dict[int, Any]) -> Any:
        """An object with the same attributes; its constructor is not called."""
        again = object.__new__(type(value))
        known[id(value)] = again
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        for key in getattr(value, "__dict__", None) or [one.name for one in fields]:
            one = getattr(value, key)
            object.__setattr__(again, key, self._again(one, f"{name}.{key}", known))
        return again
