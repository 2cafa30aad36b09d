"""Functions with a gradient of their own (`tf.custom_gradient`) that read weights.

TensorFlow asks such a gradient for those of the variables that the function has read. In a program
weights are tensors, of which it knows nothing: they would get no gradient. So here they are
arguments of the function, and `variables` of its gradient.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._compat import custom_gradients, keras_trainer
from kdist._compat.custom_gradients import Run
from kdist.program.forward_scope import ForwardScope

import keras
import tensorflow as tf


def weights_as_arguments() -> contextlib.AbstractContextManager[None]:
    """Meanwhile, weights that functions with a gradient of their own read get theirs.

    Raises:
        TypeError: A gradient takes no `variables`, as plain TensorFlow says too.
        ValueError: It gives none for a weight, or writes variables.
    """
    return custom_gradients.run_by(_run)


class _Reads(keras.StatelessScope):
    """Notes the weights that are read; what is written is dropped."""

    def __init__(self, scope: ForwardScope) -> None:
        super().__init__(initialize_variables=False)
        self.state_mapping = dict(scope.state_mapping)
        self.trainable = scope.trainable
        self.found: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        if id(variable) in self.trainable:
            self.found[id(variable)] = variable
        return super().get_current_value(variable)


class _Values(keras.StatelessScope):
    """What a gradient reads: the values that its function has read."""

    def __init__(self, values: Mapping[int, Any]) -> None:
        super().__init__(initialize_variables=False)
        self.state_mapping = dict(values)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        raise ValueError(
            "The gradient of a function (tf.custom_gradient) writes a variable, which a step would "
            f"lose. Write it in the function itself. Received: {update[0].path}"
        )


def _run(run: Run, function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    scope = keras_trainer.running_scope()
    known = custom_gradients.is_of_library(function) or (kwargs and not tf.executing_eagerly())
    if known or not isinstance(scope, ForwardScope):
        return run(function, args, kwargs)
    # As TensorFlow does: the gradient of a variable that is an argument is that of the argument.
    args = tf.nest.map_structure(_value, args)
    weights = _read_by(function, args, kwargs, scope)
    count = len(args)

    def pure(*given: Any) -> tuple[Any, Callable]:
        values = dict(zip(map(id, weights), given[count:], strict=True))
        with scope.instead(values):
            result, gradient = function(*given[:count], **kwargs)
        if weights and not _takes_variables(gradient):
            raise TypeError(
                "@tf.custom_gradient grad_fn must accept keyword argument 'variables', since "
                f"function uses variables: {[v.path for v in weights]}"
            )
        return result, _of_all(gradient, weights, {**scope.state_mapping, **values})

    return run(pure, (*args, *(scope.current(v) for v in weights)), {})


def _value(argument: Any) -> Any:
    is_variable = isinstance(argument, keras.Variable | tf.Variable)
    return tf.convert_to_tensor(argument) if is_variable else argument


def _read_by(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], scope: ForwardScope
) -> list[keras.Variable]:
    """The weights that a function reads, by name, as TensorFlow hands them to its gradient."""

    def dry() -> None:
        function(*args, **kwargs)

    with _Reads(scope) as reads:
        tf.function(dry, autograph=False).get_concrete_function()
    return sorted(reads.found.values(), key=lambda v: str(v.name))


def _takes_variables(gradient: Callable) -> bool:
    parameters = inspect.signature(gradient).parameters
    return "variables" in parameters or any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()
    )


def _of_all(
    gradient: Callable, weights: Sequence[keras.Variable], values: Mapping[int, Any]
) -> Callable[..., list[Any]]:
    """The gradient of arguments and weights."""

    def of_all(*cotangents: Any) -> list[Any]:
        with _Values(values):
            if not weights:
                return tf.nest.flatten(gradient(*cotangents))
            read = [values[id(v)] for v in weights]
            of_arguments, of_weights = gradient(*cotangents, variables=read)
        missing = [v.path for v, g in zip(weights, of_weights, strict=True) if g is None]
        if missing:
            raise ValueError(
                "The gradient of a function (tf.custom_gradient) gives none for weights that the "
                "function reads. They are tensors here, which a tape watches if it is told: "
                "tape.watch(variables). Received: no gradient of " + ", ".join(missing)
            )
        cast = [tf.cast(g, v.dtype) for g, v in zip(of_weights, read, strict=True)]
        return [*tf.nest.flatten(of_arguments), *cast]

    return of_all
