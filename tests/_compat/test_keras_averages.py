"""Every internal behind `kdist._compat.keras_averages` is there and does what is expected."""

from __future__ import annotations

from kdist._compat import keras_averages

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import assert_close
from .private_checks import untested


def test_each_function_has_a_test():
    """So that what moves is named by what fails."""
    assert untested(keras_averages, __file__) == []


@pytest.mark.parametrize("every", [None, 2])
def test_average_weights(every):
    """As `apply` does last."""
    found = []
    for parts in (False, True):
        variable = keras.Variable(np.ones(2), name="a")
        settings = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": every}
        optimizer = keras.optimizers.SGD(0.5, **settings)
        optimizer.build([variable])
        for _ in range(3):
            if parts:
                variable.assign_sub(np.full(2, 0.5))
                keras_averages.average_weights(optimizer)
                optimizer._iterations.assign_add(1)
            else:
                optimizer.apply([tf.ones(2)], [variable])
        found.append([variable.numpy(), optimizer._model_variables_moving_average[0].numpy()])
    assert_close(*found)


def test_overwrite_by_assign():
    """Keras writes by what is replaced, and to what it is given."""
    variable = keras.Variable(np.ones(2), name="a")
    settings = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 1}
    written, optimizer = [], keras.optimizers.SGD(0.5, **settings)
    optimizer.build([variable])
    assign = variable.assign
    object.__setattr__(variable, "assign", lambda value: written.append(value) or assign(value))
    optimizer.apply([tf.ones(2)], [variable])
    assert not written, "Keras does it itself"
    keras_averages.overwrite_by_assign(optimizer)
    optimizer.apply([tf.ones(2)], [variable])
    assert len(written) == 1
    assert_close([variable], optimizer._model_variables_moving_average)
