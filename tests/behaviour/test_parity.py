"""What `parity` sees and what it lets pass: differences are measured by each tensor's own scale."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from ..parity import assert_close, assert_same_weights, data, mlp


def test_small_values_are_held_to_their_scale():
    assert_close([np.full(3, 1e-10)], [np.full(3, 1e-10) * (1 + 1e-10)])
    with pytest.raises(AssertionError, match="relative 1.0"):
        assert_close([np.full(3, 1e-10)], [np.full(3, 2e-10)])


def test_rounding_beside_large_values_passes():
    assert_close([1.0, 1e-13], [1.0, 2e-13])


def test_shapes_and_counts():
    with pytest.raises(AssertionError, match="shape"):
        assert_close([np.zeros(3)], [np.zeros((3, 1))])
    with pytest.raises(AssertionError):
        assert_close([1.0], [1.0, 2.0])


@pytest.mark.usefixtures("float64")
def test_second_moments_are_no_matter_of_first_ones():
    """A slot that is off by half of itself, far below the largest slot."""
    models = mlp(), mlp()
    for model in models:
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.train_on_batch(*data(4))
    assert_same_weights(*models)
    velocity = models[1].optimizer.variables[3]
    velocity.assign(velocity * 1e-9)
    models[0].optimizer.variables[3].assign(velocity * 1.5)
    with pytest.raises(AssertionError, match="up_kernel_velocity"):
        assert_same_weights(*models)
