"""The generator behind random operations without a seed, as Keras makes and uses it."""

from __future__ import annotations

import random
from typing import Any

from kdist._compat import keras_seeds

import keras
import numpy as np
import tensorflow as tf


def test_unseeded_generator() -> None:
    keras.utils.clear_session(free_memory=False)
    assert keras_seeds.unseeded_generator() is None
    keras.random.normal((1,))
    state = keras_seeds.unseeded_generator()
    assert state is not None
    before = keras.ops.convert_to_numpy(state).copy()
    keras.random.normal((1,))
    assert not np.array_equal(before, keras.ops.convert_to_numpy(state))


def test_make_unseeded_generator() -> None:
    """It draws what Keras would draw, and Python's numbers go on as if it was not made."""
    keras.utils.set_random_seed(3)
    expected = keras.ops.convert_to_numpy(keras.random.normal((2,)))
    keras.utils.set_random_seed(3)
    before = random.getstate()
    generator = keras_seeds.make_unseeded_generator()
    assert random.getstate() == before
    assert keras_seeds.unseeded() is None
    keras_seeds.adopt(generator)
    assert keras_seeds.unseeded() is generator
    assert keras_seeds.make_unseeded_generator() is generator
    np.testing.assert_array_equal(keras.random.normal((2,)), expected)


def test_make_unseeded_generator_once_for_all() -> None:
    """Until somebody draws, it begins where Keras's would now."""
    keras.utils.set_random_seed(3)
    keras.random.SeedGenerator()  # takes one of Python's numbers
    expected = keras.ops.convert_to_numpy(keras.random.normal((2,)))
    after = random.getstate()
    keras.utils.set_random_seed(3)
    first = keras_seeds.make_unseeded_generator()
    keras.random.SeedGenerator()
    assert keras_seeds.make_unseeded_generator() is first
    keras_seeds.adopt(first)
    assert random.getstate() == after
    np.testing.assert_array_equal(keras.random.normal((2,)), expected)


def test_make_unseeded_generator_in_a_trace() -> None:
    """Of a second one too, in which TensorFlow refuses new variables."""
    made = []

    @tf.function
    def function(x: Any) -> Any:
        made.append(keras_seeds.make_unseeded_generator())
        return x + keras.ops.cast(made[-1].state[0], "float32")

    for rows in (1, 2, 3):
        keras.utils.clear_session(free_memory=False)
        function(tf.ones((rows,)))
    assert len(made) > 2 and made[0] is not made[-1]


def test_unseeded_and_adopt() -> None:
    keras.utils.set_random_seed(3)
    assert keras_seeds.unseeded() is None
    first, second = keras.random.SeedGenerator(5), keras.random.SeedGenerator(6)
    keras_seeds.adopt(first)
    keras_seeds.adopt(second)
    assert keras_seeds.unseeded() is first


def test_drawing_from() -> None:
    """Who has drawn without one before goes on from it."""
    generator = keras.random.SeedGenerator(5)
    with keras_seeds.drawing_from(generator):
        expected = keras.ops.convert_to_numpy(keras.random.normal((2,)))
    generator = keras.random.SeedGenerator(5)
    keras.utils.set_random_seed(3)
    with keras_seeds.drawing_from(generator):
        with keras_seeds.drawing_from(generator):
            pass
        assert keras_seeds.unseeded() is generator
    assert keras_seeds.unseeded_generator() is None
    with keras_seeds.drawing_from(generator), keras_seeds.drawing_from(generator):
        np.testing.assert_array_equal(keras.random.normal((2,)), expected)
    assert keras_seeds.unseeded() is generator
    assert "next" not in vars(generator)


def test_is_late() -> None:
    keras.utils.set_random_seed(3)
    spare = keras_seeds.make_unseeded_generator()
    assert not keras_seeds.is_late(spare)
    keras.random.normal((1,))
    assert keras_seeds.is_late(spare)
    keras.utils.set_random_seed(3)
    drawn = keras_seeds.make_unseeded_generator()
    keras_seeds.adopt(drawn)
    keras.random.normal((1,))
    assert not keras_seeds.is_late(drawn)


def test_generators_kept() -> None:
    keras.utils.set_random_seed(3)
    spare = keras_seeds.make_unseeded_generator()
    expected = keras.ops.convert_to_numpy(spare.state)
    with keras_seeds.generators_kept():
        keras_seeds.adopt(spare)
        keras.random.normal((1,))
    assert keras_seeds.unseeded() is None
    keras.random.normal((1,))
    assert keras_seeds.is_late(spare)  # as before
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(spare.state), expected)
