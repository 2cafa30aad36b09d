"""`fit`, `evaluate`, `predict` and their forms per batch equal plain Keras, for any input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import kdist
from kdist import spmd_step

import keras
import numpy as np
import pytest
import tensorflow as tf

from .parity import (
    MESHES,
    assert_close,
    assert_same_history,
    assert_same_weights,
    config,
    data,
    mlp,
    pair,
)

pytestmark = pytest.mark.usefixtures("float64")
both_meshes = pytest.mark.parametrize("axes", MESHES, ids=["data", "inner"])
DATA = MESHES[0]


def compiled(models: tuple[keras.Model, keras.Model], **options: Any) -> None:
    for model in models:
        settings: dict[str, Any] = {"loss": "mse", "metrics": ["mae"], **options}
        make = settings.pop("optimizer", lambda: keras.optimizers.Adam(0.01))
        model.compile(make(), **settings)


def fit_both(models: tuple[keras.Model, keras.Model], make: Callable, **options: Any) -> None:
    """Trains both on fresh arguments from `make()`, and compares logs and weights."""
    histories = []
    for model in models:
        args = make()
        args = args if isinstance(args, tuple) else (args,)
        histories.append(model.fit(*args, verbose=0, **options))
    assert_same_history(*histories)
    assert_same_weights(*models)


class Batches(keras.utils.PyDataset):
    """Three batches of 8."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = data()
        return x[index * 8 : index * 8 + 8], y[index * 8 : index * 8 + 8]


def generator(weights: bool) -> Iterator[tuple]:
    for index in range(6):
        batch = Batches(workers=1)[index % 3]
        yield (*batch, None) if weights else batch


def dataset(batch: int, drop: bool = False) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data(22)).batch(batch, drop_remainder=drop)


# -- fit and its relatives ---------------------------------------------------------------------


@both_meshes
def test_compile_fit_evaluate_predict(axes):
    models = pair(axes)
    compiled(models)
    fit_both(models, lambda: data(22), batch_size=8, epochs=2, shuffle=False)
    x, y = data(22)
    results = [m.evaluate(x, y, batch_size=8, verbose=0, return_dict=True) for m in models]
    assert list(results[0]) == list(results[1])
    assert_close(results[0], results[1])
    assert_close(*[m.predict(x, batch_size=8, verbose=0) for m in models])


@both_meshes
def test_evaluate_and_predict_before_fit(axes):
    models = pair(axes)
    compiled(models)
    x, y = data(10)
    assert_close(*[m.predict(x, batch_size=4, verbose=0) for m in models])
    assert_close(*[m.evaluate(x, y, batch_size=4, verbose=0) for m in models])
    fit_both(models, lambda: (x, y), batch_size=8)


@both_meshes
def test_predict_without_compile(axes):
    plain, parallel = pair(axes)
    x, _ = data(10)
    assert_close(plain.predict(x, verbose=0), parallel.predict(x, verbose=0))


@both_meshes
def test_batch_methods(axes):
    models = pair(axes)
    compiled(models)
    x, y = data(10)
    for _ in range(2):
        assert_close(*[m.train_on_batch(x, y, return_dict=True) for m in models])
    assert_close(*[m.test_on_batch(x, y) for m in models])
    assert_close(*[m.predict_on_batch(x) for m in models])
    assert_same_weights(*models)


@both_meshes
def test_train_on_batch_weights(axes):
    models = pair(axes)
    compiled(models)
    x, y = data(10)
    weight = np.linspace(0.5, 2.0, 10)
    assert_close(*[m.train_on_batch(x, y, sample_weight=weight) for m in models])
    assert_close(*[m.test_on_batch(x, y, sample_weight=weight) for m in models])
    assert_same_weights(*models)


def test_rows_fewer_than_replicas():
    models = pair(DATA)
    compiled(models)
    x, y = data(2)
    fit_both(models, lambda: (x, y), epochs=2)
    assert_close(*[m.predict(x, verbose=0) for m in models])


def test_fit_twice_goes_on():
    models = pair(DATA)
    compiled(models)
    fit_both(models, lambda: data(), batch_size=8, shuffle=False)
    fit_both(models, lambda: data(16), batch_size=8, shuffle=False, epochs=3, initial_epoch=1)


def test_summary_shows_whole_shapes():
    plain, parallel = pair({"data": 2, "model": 2})
    texts = []
    for model in (plain, parallel):
        lines: list[str] = []
        model.summary(print_fn=lines.append)
        texts.append("\n".join(map(str, lines)))
    assert texts[0] == texts[1]
    assert "83" in texts[1]


# -- inputs ------------------------------------------------------------------------------------


@both_meshes
@pytest.mark.parametrize(
    "make",
    [
        lambda: dataset(8),
        lambda: dataset(8, drop=True),
        lambda: Batches(workers=1),
        lambda: tuple(tf.constant(a) for a in data(16)),
    ],
    ids=["dynamic", "static", "py-dataset", "tensors"],
)
def test_inputs(axes, make):
    models = pair(axes)
    compiled(models)
    fit_both(models, make, epochs=2, shuffle=False)
    arguments = [make() for _ in models]
    results = []
    for model, args in zip(models, arguments):
        args = args if isinstance(args, tuple) else (args,)
        results.append(model.evaluate(*args, verbose=0))
    assert_close(*results)


@both_meshes
@pytest.mark.parametrize("weights", [False, True], ids=["pair", "none-weights"])
def test_generators(axes, weights):
    models = pair(axes)
    compiled(models)
    fit_both(models, lambda: generator(weights), steps_per_epoch=3, epochs=2)
    results = [m.evaluate(generator(weights), steps=2, verbose=0) for m in models]
    assert_close(*results)
    assert_close(*[m.predict(generator(weights), steps=2, verbose=0) for m in models])


@both_meshes
def test_validation_data_and_split(axes):
    models = pair(axes)
    compiled(models)
    fit_both(models, data, batch_size=8, shuffle=False, validation_data=data(10, seed=3), epochs=2)
    fit_both(models, data, batch_size=8, shuffle=False, validation_split=0.25)


@both_meshes
def test_sample_weight_and_weighted_metrics(axes):
    models = pair(axes)
    compiled(models, weighted_metrics=["mse"])
    weight = np.linspace(0.1, 2.0, 24)
    fit_both(models, lambda: (*data(),), batch_size=8, shuffle=False, sample_weight=weight)


@both_meshes
def test_class_weight(axes):
    def build() -> keras.Model:
        model = mlp()
        return keras.Model(model.inputs, keras.layers.Softmax(name="p")(model.outputs[0]))

    models = pair(axes, build)
    compiled(models, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    x, _ = data()
    y = np.arange(24) % 3
    weights = {0: 1.0, 1: 0.3, 2: 2.5}
    fit_both(models, lambda: (x, y), batch_size=8, shuffle=False, class_weight=weights)


@both_meshes
def test_steps_per_epoch(axes):
    models = pair(axes)
    compiled(models)
    fit_both(models, lambda: dataset(4).repeat(), steps_per_epoch=3, epochs=2)


@both_meshes
@pytest.mark.parametrize("batch", [{"batch_size": 5}, None], ids=["numpy", "dataset"])
def test_steps_per_execution_that_do_not_divide(axes, batch):
    models = pair(axes)
    compiled(models, steps_per_execution=3)
    make = data if batch else lambda: dataset(5)
    fit_both(models, make, shuffle=False, epochs=2, **(batch or {}))
    x, y = data()
    assert_close(*[m.evaluate(x, y, batch_size=5, verbose=0) for m in models])
    assert_close(*[m.predict(x, batch_size=5, verbose=0) for m in models])


def several() -> keras.Model:
    keras.utils.set_random_seed(2)
    a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
    hidden = keras.layers.Dense(8, "tanh", name="up")(keras.layers.Concatenate()([a, b]))
    value = keras.layers.Dense(3, name="down")(hidden)
    return keras.Model({"a": a, "b": b}, {"value": value, "hidden": hidden})


@both_meshes
@pytest.mark.parametrize("source", ["numpy", "dataset"])
def test_dict_inputs_and_several_outputs(axes, source):
    models = pair(axes, several)
    compiled(
        models,
        loss={"value": "mse", "hidden": "mae"},
        metrics={"value": ["mae"]},
        loss_weights={"value": 1.0, "hidden": 0.3},
    )
    x, y = data(22)
    inputs = {"a": x, "b": x[:, :4] * 2}
    targets = {"value": y, "hidden": np.ones((22, 8))}

    def make() -> Any:
        if source == "numpy":
            return inputs, targets
        return tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(8)

    batch = {"batch_size": 8} if source == "numpy" else {}
    fit_both(models, make, shuffle=False, epochs=2, **batch)
    outputs = [m.predict(inputs, batch_size=8, verbose=0) for m in models]
    assert list(outputs[0]) == list(outputs[1])
    assert_close(*outputs)


@both_meshes
def test_list_inputs_with_sample_weights_per_output(axes):
    def build() -> keras.Model:
        model = several()
        return keras.Model(list(model.input.values()), list(model.output.values()))

    models = pair(axes, build)
    compiled(models, loss=["mse", "mae"], metrics=[["mae"], []], weighted_metrics=[["mse"], []])
    x, y = data(16)
    one, two = np.linspace(0, 1, 16), np.linspace(2, 1, 16)
    order = {8: np.ones((16, 8)), 3: y}
    targets = [order[o.shape[-1]] for o in models[0].outputs]
    inputs = [x if i.shape[-1] == 6 else x[:, :4] for i in models[0].inputs]
    fit_both(
        models, lambda: (inputs, targets), sample_weight=[one, two], batch_size=8, shuffle=False
    )


# -- models ------------------------------------------------------------------------------------


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


@both_meshes
@pytest.mark.parametrize("build", [unbuilt_sequential, unbuilt_subclass])
def test_unbuilt_models(axes, build):
    plain = build()
    compiled((plain,))
    history = plain.fit(*data(), batch_size=8, shuffle=False, verbose=0)
    parallel = kdist.parallelize(build(), config(axes))
    compiled((parallel,))
    assert_same_history(history, parallel.fit(*data(), batch_size=8, shuffle=False, verbose=0))
    assert_same_weights(plain, parallel)


@both_meshes
@pytest.mark.parametrize("build", [unbuilt_sequential, unbuilt_subclass])
def test_unbuilt_models_predict_first(axes, build):
    x, _ = data(9)
    plain = build()
    expected = plain.predict(x, verbose=0)
    parallel = kdist.parallelize(build(), config(axes))
    assert_close(expected, parallel.predict(x, verbose=0))
    models = (plain, parallel)
    compiled(models)
    fit_both(models, data, batch_size=8, shuffle=False)


@both_meshes
def test_nested_model(axes):
    def build() -> keras.Model:
        inner = mlp()
        outer = keras.Input((6,))
        return keras.Model(outer, keras.layers.Dense(3, name="last")(inner(outer)))

    models = pair(axes, build)
    compiled(models)
    fit_both(models, data, batch_size=8, shuffle=False)


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
def test_varying_lengths_trace_a_bounded_number_of_times(axes, monkeypatch):
    """Eight lengths, twice: later ones add no trace, and every number is plain Keras's."""
    monkeypatch.setattr(spmd_step, "MAX_SHAPES", 2)
    calls: list[Any] = []
    plain = sequence_model(keras.layers.Identity())
    parallel = kdist.parallelize(counting(sequence_model, calls), config(axes))
    models = (plain, parallel)
    compiled(models)
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
    compiled(models)
    rows = np.random.default_rng(0).normal(size=(30, 6))
    ragged = tf.RaggedTensor.from_row_lengths(rows, [1, 5, 2, 7, 3, 4, 6, 2])
    _, y = data(8)
    fit_both(models, lambda: tf.data.Dataset.from_tensor_slices((ragged, y)).batch(4), epochs=2)


def test_sparse_inputs_on_a_data_mesh():
    def build() -> keras.Model:
        keras.utils.set_random_seed(6)
        inputs = keras.Input((20,), sparse=True)
        return keras.Model(inputs, keras.layers.Dense(3, name="down")(inputs))

    models = pair(DATA, build)
    compiled(models)
    dense = np.where(np.random.default_rng(0).random((10, 20)) > 0.8, 1.0, 0.0)
    x = tf.sparse.from_dense(dense)
    _, y = data(10)
    fit_both(models, lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(5), epochs=2)
    assert_close(*[m.predict(x, verbose=0) for m in models])


# -- compile -----------------------------------------------------------------------------------


@both_meshes
def test_run_eagerly(axes):
    models = pair(axes)
    compiled(models, run_eagerly=True)
    fit_both(models, data, batch_size=8, shuffle=False)
    x, y = data(10)
    assert_close(*[m.evaluate(x, y, batch_size=4, verbose=0) for m in models])
    assert_close(*[m.predict(x, batch_size=4, verbose=0) for m in models])


def test_jit_compile_on_a_data_mesh():
    models = pair(DATA)
    compiled(models, jit_compile=True)
    fit_both(models, data, batch_size=8, shuffle=False, epochs=2)
    assert_close(*[m.predict(data(10)[0], verbose=0) for m in models])


@both_meshes
def test_compile_again_with_another_optimizer_and_loss(axes):
    models = pair(axes)
    compiled(models)
    fit_both(models, data, batch_size=8, shuffle=False)
    compiled(models, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9), loss="mae")
    fit_both(models, data, batch_size=8, shuffle=False, epochs=2)


@both_meshes
def test_compile_again_with_the_same_optimizer(axes):
    models = pair(axes)
    compiled(models)
    fit_both(models, data, batch_size=8, shuffle=False)
    for model in models:
        model.compile(model.optimizer, loss="mae")
    fit_both(models, data, batch_size=8, shuffle=False)


@both_meshes
def test_whole_tensor_optimizer_then_another(axes):
    """Lamb keeps whole copies of cut weights; after it these must neither lag nor come back."""
    models = pair(axes)
    compiled(models, optimizer=lambda: keras.optimizers.Lamb(0.01))
    fit_both(models, data, batch_size=8, shuffle=False)
    compiled(models)
    fit_both(models, data, batch_size=8, shuffle=False)
    compiled(models, optimizer=lambda: keras.optimizers.Lamb(0.01))
    fit_both(models, data, batch_size=8, shuffle=False)


@both_meshes
def test_freeze_then_compile_again(axes):
    models = pair(axes)
    compiled(models)
    fit_both(models, data, batch_size=8, shuffle=False)
    before = models[1].get_layer("up").kernel.numpy()
    for model in models:
        model.get_layer("up").trainable = False
    compiled(models)
    fit_both(models, data, batch_size=8, shuffle=False)
    np.testing.assert_array_equal(models[1].get_layer("up").kernel.numpy(), before)
    for model in models:
        model.get_layer("up").trainable = True
    compiled(models)
    fit_both(models, data, batch_size=8, shuffle=False)


@both_meshes
def test_frozen_before_parallelize(axes):
    def build() -> keras.Model:
        model = mlp()
        model.get_layer("up").trainable = False
        return model

    models = pair(axes, build)
    compiled(models)
    fit_both(models, data, batch_size=8, shuffle=False)


def test_freeze_without_compile_equals_plain():
    """Keras trains on what was trainable at compile time only after another compile."""
    models = pair(DATA)
    compiled(models)
    fit_both(models, data, batch_size=8, shuffle=False)
    for model in models:
        model.get_layer("up").trainable = False
    fit_both(models, data, batch_size=8, shuffle=False)


@both_meshes
def test_trained_model_goes_on_from_its_optimizer_state(axes):
    plain, other = mlp(), mlp()
    compiled((plain, other))
    for model in (plain, other):
        model.fit(*data(), batch_size=8, shuffle=False, verbose=0)
    parallel = kdist.parallelize(other, config(axes))
    fit_both((plain, parallel), data, batch_size=8, shuffle=False, epochs=2)
    assert int(parallel.optimizer.iterations) == 9


def test_two_models_on_two_meshes():
    first, second = pair(DATA), pair({"data": 2, "model": 2})
    for models in (first, second):
        compiled(models)
    for _ in range(2):
        for models in (first, second):
            fit_both(models, data, batch_size=8, shuffle=False)


@both_meshes
def test_learning_rate_set_between_epochs(axes):
    models = pair(axes)
    compiled(models)
    fit_both(models, data, batch_size=8, shuffle=False)
    for model in models:
        model.optimizer.learning_rate = 0.1
    fit_both(models, data, batch_size=8, shuffle=False)


@both_meshes
def test_learning_rate_schedule(axes):
    models = pair(axes)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    compiled(models, optimizer=lambda: keras.optimizers.SGD(schedule, momentum=0.9))
    fit_both(models, data, batch_size=4, shuffle=False)
    assert_close(models[0].optimizer.learning_rate, models[1].optimizer.learning_rate)


@both_meshes
def test_shuffle_draws_the_same_order(axes):
    models = pair(axes)
    compiled(models)
    histories = []
    for model in models:
        keras.utils.set_random_seed(11)
        histories.append(model.fit(*data(), batch_size=8, shuffle=True, verbose=0))
    assert_same_history(*histories)
    assert_same_weights(*models)


@both_meshes
def test_prepared_functions_survive_reset(axes):
    """`reset_metrics` and `make_*_function(force=True)` are public; nothing is lost by them."""
    models = pair(axes)
    compiled(models)
    fit_both(models, data, batch_size=8, shuffle=False)
    for model in models:
        model.reset_metrics()
        model.make_train_function(force=True)
    fit_both(models, data, batch_size=8, shuffle=False)
