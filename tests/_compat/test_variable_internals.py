"""Every internal behind `kdist._compat.variable_internals` is there and does what is expected."""

from __future__ import annotations

from kdist._compat import keras_optimizers, variable_internals

import keras
import pytest
import tensorflow as tf

from .private_checks import untested


def test_each_function_has_a_test():
    """So that what moves is named by what fails."""
    assert untested(variable_internals, __file__) == []


def test_key_of():
    """What an optimizer of Keras asks for."""
    variable, optimizer = keras.Variable(1.0), keras.optimizers.SGD()
    key = variable_internals.key_of(variable.value)
    assert keras_optimizers.variable_key(optimizer, variable) == key
    assert key != variable_internals.key_of(tf.Variable(1.0))


@pytest.mark.parametrize("make", [tf.Variable, tf.constant])
def test_give_key(make):
    """Keras asks the value of a variable for it, which may be a tensor."""
    variable, optimizer = keras.Variable(1.0), keras.optimizers.SGD()
    optimizer.build([variable])
    other = make(2.0)
    variable_internals.give_key(other, variable_internals.key_of(variable.value))
    assert keras_optimizers.index_of(optimizer, other) == 0


def made_in_a_trace() -> tf.Variable:
    made: list[tf.Variable] = []

    @tf.function
    def read() -> tf.Tensor:
        if not made:
            made.append(tf.Variable(1.0))
        return made[0].read_value()

    read()
    return made[0]


def test_is_plain():
    assert variable_internals.is_plain(tf.Variable(1.0))
    assert variable_internals.is_plain(made_in_a_trace())
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        assert not variable_internals.is_plain(tf.Variable(1.0))


def test_is_captured():
    read, other = tf.Variable(1.0), tf.Variable(1.0)
    function = tf.function(lambda: read + 1.0)
    assert not variable_internals.is_captured(read)
    function()
    found = [variable_internals.is_captured(one) for one in (read, other, made_in_a_trace())]
    assert found == [True, False, True]


def test__holders():
    """Of a new one there are as many as of any other."""
    variable = tf.Variable(1.0)
    assert variable_internals._holders(variable) == variable_internals._holders_of_a_new_one()
    handle = variable.handle
    assert variable_internals._holders(variable) > variable_internals._holders_of_a_new_one()
    assert handle is variable.handle


def test__holders_of_a_new_one():
    assert variable_internals._holders_of_a_new_one() >= 1
