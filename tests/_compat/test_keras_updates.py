"""What an optimizer of Keras does in a step: `kdist._compat.keras_optimizers`, its second half."""

from __future__ import annotations

from kdist._compat import keras_optimizers

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import assert_close


@pytest.mark.parametrize("names", [["bias"], ["norm"], ["norm/kernel"], ["kernel:0"], ["^kernel"]])
def test_decays(names):
    """As Keras decides, which knows variables by the names that TensorFlow gave them."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="norm_1")])
    model.add(keras.layers.Dense(2, name="other"))
    optimizer = keras.optimizers.SGD(1.0, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=names)
    optimizer.build(model.trainable_variables)
    for variable in model.trainable_variables:
        variable.assign(tf.ones(variable.shape))
    decays = [keras_optimizers.decays(optimizer, v) for v in model.trainable_variables]
    zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
    keras_optimizer = keras.optimizers.SGD(1.0, weight_decay=0.5)
    keras_optimizer.exclude_from_weight_decay(var_names=names)
    keras_optimizer.apply(zeros, model.trainable_variables)
    assert decays == [bool((v.numpy() == 0.5).all()) for v in model.trainable_variables]


def test_decays_nothing_without_a_factor():
    variable = keras.Variable(1.0)
    optimizer = keras.optimizers.SGD()
    optimizer.build([variable])
    assert not keras_optimizers.decays(optimizer, variable)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"clipnorm": 1.0}])
def test_apply_nothing(options):
    """Averages of weights and Nadam's product move on as where another variable has a gradient."""
    state = []
    for idle in (False, True):
        a, b = keras.Variable(np.ones(2), name="a"), keras.Variable(np.ones(3), name="b")
        optimizer = keras.optimizers.Nadam(0.1, use_ema=True, **options)
        optimizer.build([a] if idle else [a, b])
        for _ in range(3):
            if idle:
                keras_optimizers.apply_nothing(optimizer)
            else:
                optimizer.apply([tf.ones(3, b.dtype)], [b])
        average = optimizer._model_variables_moving_average[0]
        state.append([optimizer.iterations, optimizer._iterations, optimizer._u_product, average])
    assert_close(*[[v.numpy() if hasattr(v, "numpy") else v for v in one] for one in state])


@pytest.mark.parametrize("use_ema", [False, True])
def test_decay_and_count(use_ema):
    """As in Keras's `apply`, without what comes from the gradients: averages do not move."""
    variable = keras.Variable(np.ones(2))
    optimizer = keras.optimizers.Nadam(0.5, weight_decay=0.5, use_ema=use_ema)
    optimizer.build([variable])
    product = float(optimizer._u_product.numpy())
    keras_optimizers.decay_and_count(optimizer, [variable])
    assert_close([variable.numpy()], [np.full(2, 0.75)])
    assert int(optimizer.iterations) == 1
    assert (float(optimizer._u_product.numpy()) == product) == use_ema


def test_decays_given():
    variables = [keras.Variable(1.0, name=name) for name in "ab"]
    optimizer = keras.optimizers.SGD(1.0)
    assert not keras_optimizers.decays_given(optimizer, variables[0])
    optimizer = keras.optimizers.SGD(1.0, weight_decay=0.5)
    optimizer.exclude_from_weight_decay([variables[1]])
    for given in (variables, [one.value for one in variables]):
        assert [keras_optimizers.decays_given(optimizer, one) for one in given] == [True, False]


def test_clip_by():
    optimizer, variable = keras.optimizers.SGD(1.0, global_clipnorm=0.1), keras.Variable(1.0)
    keras_optimizers.clip_by(optimizer, lambda gradients: [2 * one for one in gradients])
    optimizer.apply([tf.constant(3.0)], [variable])
    assert float(variable) == -5.0


def test_accumulate():
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    variable = keras.Variable(1.0)
    optimizer.build([variable])
    total = keras_optimizers.accumulator(optimizer, variable)
    keras_optimizers.accumulate(optimizer, [tf.constant(2.0)], [total])
    assert list(keras_optimizers.families(optimizer)) == [keras_optimizers.ACCUMULATORS]
    assert (float(total), float(variable), int(optimizer._iterations)) == (2.0, 1.0, 0)


def test_update():
    optimizer = keras.optimizers.SGD(0.5, global_clipnorm=0.1, weight_decay=0.5)
    variable = keras.Variable(1.0)
    optimizer.build([variable])
    keras_optimizers.update(optimizer, [tf.constant(2.0)], [variable])
    assert (float(variable), int(optimizer.iterations)) == (0.0, 0)
