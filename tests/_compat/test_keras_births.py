"""How Keras makes variables and models: each hook sees what it is for."""

from kdist._compat import keras_births

import keras
import numpy as np
import pytest


def test_variables_are_offered_and_left_alone():
    offered = []

    def make(variable, initializer):
        offered.append((tuple(variable.shape), keras_births.raw_dtype(variable), initializer))
        return False

    with keras_births.variables_made_by(make):
        assert keras_births.is_replaced()
        layer = keras.layers.Dense(3)
        layer.build((None, 2))
    assert not keras_births.is_replaced()
    assert [(shape, dtype) for shape, dtype, _ in offered] == [
        ((2, 3), "float32"),
        ((3,), "float32"),
    ]
    assert isinstance(offered[0][2], keras.initializers.GlorotUniform)
    assert np.abs(layer.kernel.numpy()).sum() > 0


def test_models_are_noted():
    class Own(keras.Model):
        pass

    with keras_births.noted_models() as found:
        inputs = keras.Input((2,))
        inner = keras.Sequential([keras.layers.Dense(2)])
        made = [inner, keras.Model(inputs, inner(inputs)), Own()]
        made.append(keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]))
        made[-1].add(keras.layers.Dense(2))
    keras.Sequential()
    assert [id(one) for one in found] == [id(one) for one in made]


@pytest.mark.parametrize("kind", ["uniform", "normal", "truncated_normal"])
def test_a_draw_is_recorded(kind):
    name = {"uniform": "RandomUniform", "normal": "RandomNormal"}.get(kind, "TruncatedNormal")
    initializer = getattr(keras.initializers, name)(seed=5)
    assert keras_births.draws_once(initializer)
    found, bounds, seed = keras_births.recorded_draw(initializer, (2, 3), "float32")
    assert found == kind and seed.shape == (2,)
    assert set(bounds) == ({"minval", "maxval"} if kind == "uniform" else {"mean", "stddev"})
    assert initializer((2, 3)).shape == (2, 3), "Keras draws again once it has been recorded"


def test_others_do_not_draw_once():
    class Own(keras.initializers.RandomNormal):
        def __call__(self, shape, dtype=None):
            return super().__call__(shape, dtype) * 2

    others = [Own(), keras.initializers.Orthogonal(), keras.initializers.Zeros()]
    assert not any(map(keras_births.draws_once, others))
