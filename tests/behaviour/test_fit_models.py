"""Every kind of model trains: unbuilt, nested, of varying lengths, on ragged and sparse inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import (
    MESHES,
    assert_close,
    assert_same_weights,
    both_meshes,
    compile_all,
    config,
    data,
    everywhere,
    fit_all,
    mlp,
    pair,
)

pytestmark = pytest.mark.usefixtures("float64")
DATA = MESHES[0]
long = pytest.mark.long


class Subclassed(keras.Model):
    """Its layers exist at once and their weights on the first batch."""

    def __init__(self) -> None:
        super().__init__(name="mlp")
        self.up = keras.layers.Dense(8, "tanh", name="up")
        self.down = keras.layers.Dense(3, name="down")

    def call(self, inputs: Any) -> Any:
        return self.down(self.up(inputs))


def unbuilt_sequential() -> keras.Model:
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(8, "tanh", name="up"), keras.layers.Dense(3, name="down")]
    return keras.Sequential(layers, name="mlp")


def unbuilt_subclass() -> keras.Model:
    keras.utils.set_random_seed(4)
    return Subclassed()


@pytest.mark.parametrize("build", [unbuilt_sequential, pytest.param(unbuilt_subclass, marks=long)])
def test_unbuilt_models(build):
    models = everywhere(build)
    compile_all(models)
    fit_all(models, batch_size=8)


@pytest.mark.parametrize("build", [pytest.param(unbuilt_sequential, marks=long), unbuilt_subclass])
def test_unbuilt_models_predict_first(build):
    x, _ = data(9)
    models = everywhere(build)
    assert_close(*[m.predict(x, verbose=0) for m in models])
    compile_all(models)
    fit_all(models, batch_size=8)


def test_nested_model():
    def build() -> keras.Model:
        inner = mlp()
        outer = keras.Input((6,))
        return keras.Model(outer, keras.layers.Dense(3, name="last")(inner(outer)))

    models = everywhere(build)
    compile_all(models)
    fit_all(models, batch_size=8)


def counting(build: Callable, calls: list[Any]) -> keras.Model:
    """A model whose first layer notes every Python call with a batch of data."""

    class Noted(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            calls.append(tuple(inputs.shape))
            return inputs

    return build(Noted())


def sequence_model(first: keras.layers.Layer) -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((None, 6))
    hidden = keras.layers.Dense(8, "tanh", name="up")(first(inputs))
    return keras.Model(inputs, keras.layers.Dense(3, name="down")(hidden))


@both_meshes
def test_varying_lengths_trace_a_bounded_number_of_times(axes):
    """Eight lengths, twice: later ones add no trace, and every number is plain Keras's."""
    calls: list[Any] = []
    plain = sequence_model(keras.layers.Identity())
    parallel = kdist.parallelize(counting(sequence_model, calls), config(axes))
    models = (plain, parallel)
    compile_all(models)
    random = np.random.default_rng(0)
    lengths = [*range(2, 10), *range(2, 10)]
    batches = [(random.normal(size=(4, n, 6)), random.normal(size=(4, n, 3))) for n in lengths]
    calls.clear()
    traces = []
    for x, y in batches:
        before = len(calls)
        assert_close(*[m.train_on_batch(x, y) for m in models])
        traces.append(len(calls) - before)
    assert_same_weights(*models)
    assert sum(traces[:5]) <= 12
    assert sum(traces[5:]) == 0


def test_ragged_inputs_on_a_data_mesh():
    def build() -> keras.Model:
        keras.utils.set_random_seed(6)

        class Mean(keras.layers.Layer):
            def call(self, inputs: Any) -> Any:
                return tf.reduce_mean(inputs, axis=1)

        inputs = keras.Input((None, 6), ragged=True, dtype="float64")
        return keras.Model(inputs, keras.layers.Dense(3, name="down")(Mean()(inputs)))

    models = pair(DATA, build)
    compile_all(models)
    rows = np.random.default_rng(0).normal(size=(30, 6))
    ragged = tf.RaggedTensor.from_row_lengths(rows, [1, 5, 2, 7, 3, 4, 6, 2])
    _, y = data(8)
    fit_all(models, lambda: tf.data.Dataset.from_tensor_slices((ragged, y)).batch(4), epochs=2)


def test_sparse_inputs_on_a_data_mesh():
    def build() -> keras.Model:
        keras.utils.set_random_seed(6)
        inputs = keras.Input((20,), sparse=True)
        return keras.Model(inputs, keras.layers.Dense(3, name="down")(inputs))

    models = pair(DATA, build)
    compile_all(models)
    dense = np.where(np.random.default_rng(0).random((10, 20)) > 0.8, 1.0, 0.0)
    x = tf.sparse.from_dense(dense)
    _, y = data(10)
    fit_all(models, lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(5), epochs=2)
    assert_close(*[m.predict(x, verbose=0) for m in models])


class Watched(keras.layers.Layer):
    """Counts its calls, in evaluation too, and remembers the mean of the last one."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        options: dict[str, Any] = {"initializer": "zeros", "trainable": False}
        self.calls = self.add_weight(shape=(), dtype="int32", name="calls", **options)
        self.last = self.add_weight(shape=input_shape[1:], name="last", **options)

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1)
        self.last.assign(keras.ops.mean(inputs, axis=0))
        return inputs


def test_state_that_a_layer_writes_in_evaluation_is_kept():
    def build() -> keras.Model:
        keras.utils.set_random_seed(4)
        layers = [keras.layers.Dense(8, name="up"), Watched(name="watched")]
        return keras.Sequential([keras.Input((6,)), *layers], name="watching")

    plain = build()
    cuts = {".*up/kernel": (None, "model")}
    parallel = [
        kdist.parallelize(
            build(),
            kdist.ParallelConfig(
                mesh=kdist.mesh(**axes), layout_map=cuts if "model" in axes else None
            ),
        )
        for axes in MESHES
    ]
    models = (plain, *parallel)
    compile_all(models)
    x = data()[0]
    for model in models:
        model.fit(x, np.tanh(x @ np.ones((6, 8))), batch_size=8, epochs=1, verbose=0, shuffle=False)
        model.evaluate(x[::-1], np.ones((24, 8)), batch_size=8, verbose=0)
    assert int(plain.layers[1].calls) == 6
    assert_same_weights(*models)
