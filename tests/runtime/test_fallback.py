"""What runs on gathered weights: same numbers, and it says so."""

import kdist

import keras
import numpy as np
import pytest
from keras import layers


@pytest.mark.usefixtures("float64")
def test_a_model_that_is_all_island_runs_on_gathered_weights_and_says_so():
    """Every matrix product is in the loop: one device of a slice is as good as all."""

    def build():
        keras.utils.set_random_seed(3)
        cell = layers.SimpleRNN(2, name="only", return_sequences=True)
        return keras.Sequential([keras.Input((4, 2)), cell])

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 4, 2)), rng.normal(size=(8, 4, 2))
    plain, model = build(), build()
    cut = {".*only/.*/kernel": (None, "model")}
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=cut)
    kdist.parallelize(model, config)
    for one in (plain, model):
        one.compile(keras.optimizers.Adam(0.01), "mse")
    for _ in range(2):
        plain.train_on_batch(x, y)
    with pytest.warns(UserWarning, match="every matrix product.*gathered weights") as caught:
        for _ in range(2):
            model.train_on_batch(x, y)
    assert len([one for one in caught if "gathered weights" in str(one.message)]) == 1
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    inspection = kdist.inspect(model)
    assert inspection.fallbacks and "not over DTensor" in str(inspection)


def test_a_loop_has_a_program_for_each_shape():
    """DTensor names the bodies of loops of all shapes alike; each program keeps its own."""

    def build():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((4, 3)), keras.layers.LSTM(4), keras.layers.Dense(2, name="head")]
        model = keras.Sequential(layers)
        return model

    plain, model = build(), build()
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(model=2), layout_map={".*head/kernel": (None, "model")}
    )
    kdist.parallelize(model, config)
    rng = np.random.default_rng(0)
    for one in (plain, model):
        one.compile("sgd", "mse")
    for rows in (8, 5, 8, 3):
        x, y = rng.normal(size=(rows, 4, 3)), rng.normal(size=(rows, 2))
        expected = plain.train_on_batch(x, y)
        assert model.train_on_batch(x, y) == pytest.approx(expected, rel=1e-5)
    assert kdist.inspect(model).fallbacks == ()
