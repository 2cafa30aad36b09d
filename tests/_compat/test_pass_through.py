"""Exceptions that Keras and AutoGraph leave as they are."""

from __future__ import annotations

from typing import Any

from kdist._compat.pass_through import PassesThrough

import keras
import pytest
import tensorflow as tf


class Raised(PassesThrough):
    def __init__(self, *, why: str) -> None:
        super().__init__(why)


class Raising(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        raise Raised(why="as it is")


@pytest.mark.parametrize("graph", [False, True])
def test_passes_through(graph: bool) -> None:
    call: Any = Raising()
    with pytest.raises(Raised, match=r"^as it is$"):
        (tf.function(lambda x: call(x)) if graph else call)(tf.zeros((2, 3)))
