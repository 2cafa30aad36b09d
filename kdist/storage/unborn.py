"""Variables whose values are made as parts, when it is known where these go."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdist._compat import keras_births, keras_trainer
from kdist._compat.keras_births import raw_dtype
from kdist.sharding.placement import Index, overlap, relative, shape_of
from kdist.storage.host_arrays import aligned, as_tensor
from kdist.storage.recipes import (
    Constant,
    Existing,
    Recipe,
    blocks,
    is_mapped,
    recipe_of,
    values,
)
from kdist.storage.variables import Part, become_view, make_plain

import keras
import numpy as np
import tensorflow as tf


class Unborn:
    """Backing of a variable whose values have not been made, and are for parts, not for it.

    Read or written as a whole before it is placed, it becomes a plain variable.

    Attributes:
        variable: The variable.
        recipe: How to make its values.
        unborn: Itself; see `kdist.storage.variables.unborn`.
    """

    def __init__(
        self, variable: keras.Variable, recipe: Recipe, told: Callable[[keras.Variable, str], None]
    ) -> None:
        self.unborn = self
        self._told = told
        self.variable = variable
        self.recipe = recipe
        self.shape = tuple(int(n) for n in variable.shape)
        self.dtype = raw_dtype(variable)

    def whole(self) -> Any:
        """The values; while shapes are inferred, a stand-in."""
        if keras_trainer.inferring():
            return tf.zeros(self.shape, self.dtype)
        self._told(self.variable, "it is read before the end of its kdist.scope")
        with keras_trainer.at_once():
            made = self.made()
            make_plain(self.variable, made)
        return keras_trainer.tf_variable(self.variable)

    @property
    def given(self) -> np.ndarray | None:
        """What it was assigned, to be read part by part; None if nothing was."""
        return self.recipe.checked() if isinstance(self.recipe, Existing) else None

    def made(self) -> Any:
        """All values, on the device in scope."""
        value = self.recipe.block(self.shape, self.dtype, 0, math.prod(self.shape))
        return tf.reshape(value, self.shape)

    def assign(self, value: Any) -> None:
        """Takes a value, in place of what it would have begun with, which is not made.

        An array waits until it is known where its parts go; a tensor is a plain variable at once.
        """
        if isinstance(value, np.ndarray):
            self.recipe = Existing.of(value if is_mapped(value) else np.array(value, order="C"))
            return
        with keras_trainer.at_once():
            make_plain(self.variable, tf.zeros(self.shape, self.dtype))
        self.variable.assign(value)

    def stored_parts(self) -> list[Part]:
        """See `parts_of`."""
        self.whole()
        return [Part(None, None, self.variable)]

    def parts(self, indices: Sequence[Index]) -> Iterator[Any]:
        """The values of parts, one tensor each in host memory, drawn together chunk by chunk.

        Written as arrays: a variable that was once written slice by slice is copied, by TensorFlow,
        whenever it is read.
        """
        shapes = [shape_of(index) for index in indices]
        if isinstance(self.recipe, Constant):
            yield from (tf.fill(shape, tf.cast(self.recipe.value, self.dtype)) for shape in shapes)
            return
        if isinstance(self.recipe, Existing):
            yield from (self.recipe.part(index, self.dtype) for index in indices)
            return
        arrays = [aligned(shape, self.dtype) for shape in shapes]
        for box in blocks(self.recipe, self.shape, self.dtype):
            there = [(n, overlap(box, index)) for n, index in enumerate(indices)]
            if all(both is None for _, both in there):
                continue
            made = values(self.recipe, self.shape, self.dtype, box).numpy()
            for n, both in there:
                if both is not None:
                    arrays[n][relative(both, indices[n])] = made[relative(both, box)]
            del made  # before the next is drawn
        while arrays:
            yield as_tensor(arrays.pop(0))


_born = itertools.count()


@contextlib.contextmanager
def unborn_variables(told: Callable[[keras.Variable, str], None]) -> Iterator[None]:
    """Meanwhile, new variables get no values, where these can be made part by part later.

    Args:
        told: Called with those that are made whole, as Keras makes them, and why.
    """

    def take(variable: keras.Variable, initializer: Any) -> bool:
        shape = tuple(int(n) for n in variable.shape)
        now = tf.inside_function() or not shape  # scalars are not cut
        recipe = None if now else recipe_of(initializer, shape, raw_dtype(variable))
        if recipe is None:
            told(variable, "its initializer gives no parts")
            return False
        keras_births.without_value(variable, f"kdist_unborn_{next(_born)}")
        become_view(variable, Unborn(variable, recipe, told), None)
        return True

    with keras_births.variables_made_by(take):
        yield
