"""Whatever data Keras takes, a parallel model takes, and trains on it as a plain one does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import assert_close, compile_all, data, everywhere, fit_all, mlp

pytestmark = pytest.mark.usefixtures("float64")
long = pytest.mark.long


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


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: dataset(8), id="dynamic"),
        pytest.param(lambda: dataset(8, drop=True), id="static"),
        pytest.param(lambda: Batches(workers=1), id="py-dataset"),
        pytest.param(lambda: tuple(tf.constant(a) for a in data(16)), id="tensors", marks=long),
    ],
)
def test_inputs(make):
    models = everywhere()
    compile_all(models)
    fit_all(models, make, epochs=2)
    arguments = [make() for _ in models]
    results = []
    for model, args in zip(models, arguments):
        args = args if isinstance(args, tuple) else (args,)
        results.append(model.evaluate(*args, verbose=0))
    assert_close(*results)


@pytest.mark.parametrize(
    "weights", [pytest.param(False, id="pair", marks=long), pytest.param(True, id="none-weights")]
)
def test_generators(weights):
    models = everywhere()
    compile_all(models)
    fit_all(models, lambda: generator(weights), steps_per_epoch=3, epochs=2)
    results = [m.evaluate(generator(weights), steps=2, verbose=0) for m in models]
    assert_close(*results)
    assert_close(*[m.predict(generator(weights), steps=2, verbose=0) for m in models])


def test_validation_data_and_split():
    models = everywhere()
    compile_all(models)
    fit_all(models, batch_size=8, validation_data=data(10, seed=3), epochs=2)
    fit_all(models, batch_size=8, validation_split=0.25)


def test_sample_weight_and_weighted_metrics():
    models = everywhere()
    compile_all(models, weighted_metrics=["mse"])
    weight = np.linspace(0.1, 2.0, 24)
    fit_all(models, lambda: (*data(),), batch_size=8, sample_weight=weight)


def test_class_weight():
    def build() -> keras.Model:
        model = mlp()
        return keras.Model(model.inputs, keras.layers.Softmax(name="p")(model.outputs[0]))

    models = everywhere(build)
    compile_all(models, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    x, _ = data()
    y = np.arange(24) % 3
    weights = {0: 1.0, 1: 0.3, 2: 2.5}
    fit_all(models, lambda: (x, y), batch_size=8, class_weight=weights)


def test_steps_per_epoch():
    models = everywhere()
    compile_all(models)
    fit_all(models, lambda: dataset(4).repeat(), steps_per_epoch=3, epochs=2)


@pytest.mark.parametrize(
    "batch",
    [pytest.param({"batch_size": 5}, id="numpy"), pytest.param(None, id="dataset", marks=long)],
)
def test_steps_per_execution_that_do_not_divide(batch):
    models = everywhere()
    compile_all(models, steps_per_execution=3)
    make = data if batch else lambda: dataset(5)
    fit_all(models, make, epochs=2, **(batch or {}))
    x, y = data()
    assert_close(*[m.evaluate(x, y, batch_size=5, verbose=0) for m in models])
    assert_close(*[m.predict(x, batch_size=5, verbose=0) for m in models])


def several() -> keras.Model:
    keras.utils.set_random_seed(2)
    a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
    hidden = keras.layers.Dense(8, "tanh", name="up")(keras.layers.Concatenate()([a, b]))
    value = keras.layers.Dense(3, name="down")(hidden)
    return keras.Model({"a": a, "b": b}, {"value": value, "hidden": hidden})


@pytest.mark.parametrize("source", ["numpy", pytest.param("dataset", marks=long)])
def test_dict_inputs_and_several_outputs(source):
    models = everywhere(several)
    compile_all(
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
    fit_all(models, make, epochs=2, **batch)
    outputs = [m.predict(inputs, batch_size=8, verbose=0) for m in models]
    assert list(outputs[0]) == list(outputs[1]) == list(outputs[2])
    assert_close(*outputs)


def test_list_inputs_with_sample_weights_per_output():
    def build() -> keras.Model:
        model = several()
        return keras.Model(list(model.input.values()), list(model.output.values()))

    models = everywhere(build)
    compile_all(models, loss=["mse", "mae"], metrics=[["mae"], []], weighted_metrics=[["mse"], []])
    x, y = data(16)
    one, two = np.linspace(0, 1, 16), np.linspace(2, 1, 16)
    order = {8: np.ones((16, 8)), 3: y}
    targets = [order[o.shape[-1]] for o in models[0].outputs]
    inputs = [x if i.shape[-1] == 6 else x[:, :4] for i in models[0].inputs]
    fit_all(models, lambda: (inputs, targets), sample_weight=[one, two], batch_size=8)
