"""Whether XLA compiles steps, by what was asked for and what Keras would do, as if on a GPU."""

from __future__ import annotations

import warnings
from typing import Any

import kdist
from kdist._compat.keras_models import flat_layers
from kdist.api.attached import attached
from kdist.layers import DistributedEmbedding, FeatureConfig, TableConfig

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import assert_close, assert_every_copy, assert_same_weights, data, mlp

LEVEL_2 = {"optimizer": kdist.OptimizerConfig(level=2, threshold_kb=0)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one: Keras's own choice is XLA, of layers that support it."""

    def choice(model: keras.Model) -> bool:
        return all(layer.supports_jit for layer in flat_layers(model))

    monkeypatch.setattr(keras.Model, "_resolve_auto_jit_compile", choice)


def parallel(model: keras.Model, **options: Any) -> keras.Model:
    return kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2), **options))


class OwnCompile(keras.Sequential):
    def compile(self, rate: float = 0.1) -> None:
        super().compile(keras.optimizers.SGD(rate), "mse")


class Unable(keras.layers.Layer):
    """One that XLA does not compile, as those of strings."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_jit = False

    def call(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(("options", "expected"), [({}, True), (LEVEL_2, "auto")])
def test_what_nobody_asked_for_cuts_no_programs(
    options: dict[str, Any], expected: bool | str, gpu: None
) -> None:
    own = parallel(OwnCompile([keras.Input((6,)), keras.layers.Dense(2)]), **options)
    own.compile()
    before = mlp()
    before.compile("sgd", "mse")
    parallel(before, **options)
    assert (attached(own).jit_compile, attached(before).jit_compile) == (expected, expected)
    assert own.get_compile_config()["jit_compile"] == "auto"


@pytest.mark.parametrize("asked", [True, False])
def test_what_was_asked_for_before_counts(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, since with one Keras does not keep whether it was."""
    monkeypatch.setattr(keras.Model, "_resolve_auto_jit_compile", lambda self: False)
    model = mlp()
    model.compile("sgd", "mse", jit_compile=asked)
    assert attached(parallel(model, **LEVEL_2)).jit_compile is asked


@pytest.mark.parametrize("asked", [{}, {"jit_compile": True}])
def test_layers_that_xla_cannot_compile_train_without_it_as_in_keras(
    asked: dict[str, bool],
) -> None:
    model = parallel(keras.Sequential([keras.Input((6,)), Unable(), keras.layers.Dense(2)]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.compile("sgd", "mse", **asked)
    assert attached(model).jit_compile in (False, "auto")
    assert bool(asked) == any("doesn't support `jit_compile=True`" in str(w.message) for w in told)


@pytest.mark.parametrize("asked", [{}, {"jit_compile": True}])
def test_steps_op_by_op_have_no_xla(asked: dict[str, bool], gpu: None) -> None:
    model = parallel(mlp())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.compile("sgd", "mse", run_eagerly=True, **asked)
    assert attached(model).jit_compile is False
    assert bool(asked) == any("Disabling `jit_compile`" in str(w.message) for w in told)
    assert np.isfinite(model.train_on_batch(*data(8)))


@pytest.mark.parametrize("first", ["fit", "predict"])
def test_sparse_and_ragged_batches_have_none_that_nobody_asked_for(first: str, gpu: None) -> None:
    """XLA cannot read them."""
    ids = tf.ragged.constant([[1, 2], [3], [4, 5, 6], [7]], dtype=tf.int32)
    table = TableConfig("words", 8, 4)
    inputs = keras.Input((3,), dtype="int32", ragged=True)
    rows = DistributedEmbedding(FeatureConfig("text", table, (None, 3), (None, 4)))(inputs)
    model = parallel(keras.Model(inputs, keras.layers.Dense(2)(rows)))
    model.compile("sgd", "mse")
    if first == "predict":
        assert model.predict_on_batch(ids).shape == (4, 2)
    assert np.isfinite(model.train_on_batch(ids, np.zeros((4, 2))))
    assert attached(model).jit_compile is False


LEVEL_3 = {"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0)}


@pytest.mark.parametrize("compiled", ["before", "after", "never"])
def test_plain_models_with_cut_layers_predict_without_it(compiled: str, gpu: None) -> None:
    """XLA would look for all weights on one device."""
    whole = mlp()
    beside = keras.Model(whole.input, whole.get_layer("up").output)
    wrapped = keras.Sequential([keras.Input((6,)), beside, keras.layers.Dense(2)])
    x, _ = data(8)
    if compiled == "before":
        beside.compile("sgd", "mse")
        beside.predict(x, verbose=0)
    model = parallel(wrapped, **LEVEL_3)
    model.compile("sgd", "mse")
    if compiled == "after":
        beside.compile("sgd", "mse")
    model.fit(x, np.ones((8, 2)), batch_size=4, verbose=0)
    np.testing.assert_allclose(beside.predict(x, verbose=0), beside(x), rtol=1e-5)
    assert attached(model).jit_compile == "auto"


def test_plain_models_train_layers_that_several_devices_have_without_it(gpu: None) -> None:
    """Their new values go to all devices."""
    whole, (x, y) = mlp(), data(8)
    beside = keras.Model(whole.input, whole.get_layer("up").output)
    model = parallel(whole)
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=4, verbose=0)
    beside.compile("sgd", "mse")
    beside.fit(x, np.ones((8, 8)), batch_size=4, verbose=0)
    assert not beside.jit_compile
    assert_every_copy(whole.get_layer("up").kernel, whole.get_layer("up").kernel.numpy())
    model.compile("sgd", "mse")
    assert attached(model).jit_compile is True


class Doubled(keras.layers.Layer):
    """By NumPy, which XLA cannot compile."""

    def call(self, x: Any) -> Any:
        double = tf.numpy_function(lambda v: 2 * v, [tf.stop_gradient(x)], x.dtype)
        return x + tf.ensure_shape(double, x.shape)


def loop(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
    @tf.function
    def step(x: Any, y: Any) -> Any:
        loss, gradients = kdist.gradients(model, x, y)
        kdist.apply_gradients(model, gradients)
        return loss

    for first in range(0, len(x), 4):
        step(x[first : first + 4], y[first : first + 4])


def fit(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)


@pytest.mark.parametrize("train", [fit, loop])
def test_operations_that_xla_lacks_run_without_it_and_a_line_says_so(
    train: Any, gpu: None, float64: None
) -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        layers = [keras.Input((6,)), Doubled(), keras.layers.Dense(3, name="head")]
        return keras.Sequential(layers, name="doubled")

    plain, model, (x, y) = build(), parallel(build()), data(10)
    plain.compile("adam", "mse", jit_compile=False)
    model.compile("adam", "mse")
    fit(plain, x, y)
    with pytest.warns(UserWarning, match=r"XLA cannot compile PyFunc \(") as told:
        train(model, x, y)
        outputs = model.predict(x, verbose=0)
    assert len([one for one in told if "XLA cannot" in str(one.message)]) == 1
    assert_same_weights(plain, model)
    assert_close(plain.predict(x, verbose=0), outputs)


def test_what_was_asked_for_is_not_left_out(gpu: None) -> None:
    model = parallel(keras.Sequential([keras.Input((6,)), Doubled(), keras.layers.Dense(3)]))
    model.compile("adam", "mse", jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="PyFunc"):
        fit(model, *data(4))
