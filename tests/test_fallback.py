"""Models with operations that DTensor runs only whole, or not at all: same numbers, and it says so.

Some of these operations end the process when DTensor is tried on them, so the engine must see them
before. Each row trains the same model on one plain device and over data=2 x model=2, in float64.
"""

import warnings

import kdist

import keras
import numpy as np
import pytest
from keras import layers, ops

CUT = {".*up/kernel": (None, "model"), ".*up/bias": ("model",)}


@keras.saving.register_keras_serializable("test_fallback")
class NewAxis(layers.Layer):
    """The backward pass of `x[:, None]` ends the process under DTensor."""

    def call(self, x):
        return x[:, None][:, 0]


@keras.saving.register_keras_serializable("test_fallback")
class Sorted(layers.Layer):
    """DTensor has no rule for the backward pass of a sort; it runs it whole."""

    def call(self, x):
        return ops.sort(x, axis=-1)


@keras.saving.register_keras_serializable("test_fallback")
class Scanned(layers.Layer):
    """A while loop with a gradient."""

    def call(self, x):
        steps = ops.transpose(x, (1, 0))
        total, _ = ops.scan(lambda c, v: (ops.tanh(c + v), c), ops.zeros_like(steps[0]), steps)
        return ops.expand_dims(total, -1) + x


def lstm(x):
    return layers.LSTM(8, name="up")(layers.Reshape((4, 2))(x))


def grouped(x):
    """TensorFlow convolves in groups on a CPU only under XLA, which DTensor loses."""
    x = layers.Reshape((2, 4))(x)
    return layers.Flatten()(layers.Conv1D(8, 2, groups=2, padding="same", name="filters")(x))


ROWS = {
    "new axis": (lambda x: NewAxis()(x), True),
    "grouped convolution": (grouped, True),
    "sort": (lambda x: Sorted()(x), False),
    "scan": (lambda x: Scanned()(x), True),
    "spectral": (
        lambda x: layers.SpectralNormalization(layers.Dense(8, name="inner"))(x),
        None,
    ),
    "lstm": (lstm, None),
}


def build(middle):
    """Dense, the operation in question, Dense; the first Dense is cut."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="tanh", name="up" if middle is not lstm else "first")(inputs)
    return keras.Model(inputs, layers.Dense(2, name="head")(middle(x)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ROWS)
def test_trains_as_one_device_and_says_how(name):
    middle, falls_back = ROWS[name]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 6)), rng.normal(size=(16, 2))
    plain, parallel = build(middle), build(middle)
    parallel.set_weights(plain.get_weights())
    cut = CUT if middle is not lstm else {".*up/lstm_cell/kernel": (None, "model")}
    kdist.parallelize(
        parallel, kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=cut)
    )
    for model in (plain, parallel):
        model.compile(keras.optimizers.Adam(0.01), "mse")
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    expected = plain.fit(x, y, **options).history["loss"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = parallel.fit(x, y, **options).history["loss"]
    np.testing.assert_allclose(actual, expected, rtol=1e-9)
    for a, b in zip(parallel.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        parallel.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-9, atol=1e-12
    )

    said = [str(w.message) for w in caught if "gathered weights" in str(w.message)]
    inspection = kdist.inspect(parallel)
    # Training and prediction are programs of their own, each with its own reason.
    assert bool(said) == bool(inspection.fallbacks)
    assert len(said) <= 1
    if falls_back is not None:
        assert bool(said) == falls_back, said
    if said:
        assert "DTensor cannot run" in said[0]
        assert "not over DTensor" in str(inspection)
    # Cut at rest, whether or not the compute is split.
    held = {int(np.prod(v.shape)) for v in _local_parts(parallel, cut)}
    assert held == {int(np.prod(_cut_weight(parallel, cut).shape)) // 2}


def _cut_weight(model, cut):
    pattern = next(iter(cut)).removeprefix(".*")
    return next(v for v in model.weights if v.path.endswith(pattern))


def _local_parts(model, cut):
    from kdist.variables import stored

    return list(stored(_cut_weight(model, cut)).locals.values())


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
