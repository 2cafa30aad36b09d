"""How Keras makes variables and models: what a scope has to see of it.

- `Variable._initialize_with_initializer` calls an initializer and keeps the result. Meanwhile,
  `variables_made_by` calls something else.
- `random_initializers.random` is where Keras's initializers draw from, with `seed_generator`'s
  `draw_seed`; `Recorder` notes what they would draw.
- `Trainer.__init__` is what every model runs when it is made; `sequential.Functional` is what a
  `Sequential` model makes for itself, each time that it is built.

`tests/_compat/test_keras_births.py` fails when one of them moves.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from kdist._compat.keras_trainer import KEY

import keras
from keras.src.backend.tensorflow import random as tensorflow_random
from keras.src.initializers import random_initializers
from keras.src.models import sequential
from keras.src.random import seed_generator
from keras.src.trainers.trainer import Trainer

DRAWING = (
    keras.initializers.RandomNormal,
    keras.initializers.TruncatedNormal,
    keras.initializers.RandomUniform,
    keras.initializers.VarianceScaling,
)
"""Initializers that draw once; those of Keras that derive from them compute nothing else."""


def draws_once(initializer: Any) -> bool:
    """Whether an initializer's value is one draw of `keras.random`, and nothing else."""
    return any(
        isinstance(initializer, one) and type(initializer).__call__ is one.__call__
        for one in DRAWING
    )


def recorded_draw(initializer: Any, shape: Any, dtype: str) -> tuple[str, dict[str, Any], Any]:
    """What an initializer of `draws_once` would draw, and takes the seed for it.

    Returns:
        "uniform", "normal" or "truncated_normal"; its bounds, or mean and stddev; the seed, int32
        (2,).
    """
    found: list[tuple[str, dict[str, Any], Any]] = []

    def noting(kind: str) -> Callable:
        def note(shape: Any, *, dtype: Any, seed: Any, **bounds: Any) -> None:
            drawn = tensorflow_random._cast_seed(seed_generator.draw_seed(seed))
            found.append((kind, bounds, drawn))

        return note

    kinds = ("uniform", "normal", "truncated_normal")
    own = random_initializers.random
    random_initializers.random = types.SimpleNamespace(**{kind: noting(kind) for kind in kinds})
    try:
        initializer(shape, dtype=dtype)
    finally:
        random_initializers.random = own
    (draw,) = found
    return draw


@contextlib.contextmanager
def variables_made_by(make: Callable[[keras.Variable, Any], bool]) -> Iterator[None]:
    """Meanwhile, offers each new variable with an initializer to `make(variable, initializer)`.

    It returns whether it has taken it; Keras initializes the others.
    """
    own = keras.Variable._initialize_with_initializer

    def initialize(self: Any, initializer: Any) -> None:
        if not make(self, initializer):
            own(self, initializer)

    keras.Variable._initialize_with_initializer = initialize
    try:
        yield
    finally:
        keras.Variable._initialize_with_initializer = own


def is_replaced() -> bool:
    """Whether `variables_made_by` is at work."""
    return keras.Variable._initialize_with_initializer.__module__ == __name__


def raw_dtype(variable: keras.Variable) -> str:
    """The dtype of a variable's values, whatever autocast scope is active."""
    return str(variable._dtype)


def without_value(variable: keras.Variable, key: str) -> None:
    """Leaves a variable that is being made without a value; optimizers know it by `key`."""
    variable._value = None
    object.__setattr__(variable, KEY, key)


@contextlib.contextmanager
def noted_models() -> Iterator[list[keras.Model]]:
    """Meanwhile, notes each model that is made, but what a `Sequential` makes for itself."""
    found: list[keras.Model] = []
    own, functional = Trainer.__init__, sequential.Functional

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        if isinstance(self, keras.Model) and not any(self is one for one in found):
            found.append(self)

    def made_inside(*args: Any, **kwargs: Any) -> keras.Model:
        model = functional(*args, **kwargs)
        found[:] = [one for one in found if one is not model]
        return model

    Trainer.__init__, sequential.Functional = made, made_inside
    try:
        yield found
    finally:
        Trainer.__init__, sequential.Functional = own, functional
