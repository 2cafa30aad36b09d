"""Layout maps for blocks of convolutions that are layers with a `call` of their own, and models."""

from __future__ import annotations

from typing import Any

import kdist
from kdist._compat import keras_models

import keras
import numpy as np
import pytest
import tensorflow as tf

COLUMNS, ROWS, PART = (None, None, None, "model"), (None, None, "model", None), ("model",)


class Residual(keras.layers.Layer):
    """Two convolutions, with a norm and a gate by squeeze and excitation between them."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(**options)
        conv = keras.layers.Conv2D
        self.up = conv(4 * width, 3, padding="same", use_bias=False, name="up")
        self.norm = keras.layers.BatchNormalization(synchronized=True, name="norm")
        self.squeeze = conv(2, 1, activation="tanh", name="squeeze")
        self.excite = conv(4 * width, 1, activation="sigmoid", name="excite")
        self.down = conv(width, 3, padding="same", name="down")

    def call(self, x: Any, training: bool = False) -> Any:
        y = keras.ops.relu(self.norm(self.up(x), training=training))
        gate = keras.ops.mean(y, axis=(1, 2), keepdims=True)
        return x + self.down(y * self.excite(self.squeeze(gate)))


class Convolved(keras.layers.Layer):
    """A convolution whose result leaves."""

    def __init__(self, filters: int, **options: Any) -> None:
        super().__init__(**options)
        self.conv = keras.layers.Conv2D(filters, 3, padding="same", name="conv")

    def call(self, x: Any) -> Any:
        return keras.ops.tanh(self.conv(x))


class Pictures(keras.Model):
    """A model that Keras knows no graph of."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.block = Residual(4, name="block")
        self.head = keras.layers.Dense(2, name="head")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(keras.ops.mean(self.block(x, training=training), axis=(1, 2)))


def connected() -> keras.Model:
    x = inputs = keras.Input((6, 6, 4))
    x = Residual(4, name="block")(x)
    x = Convolved(8, name="second")(Convolved(12, name="first")(x))
    x = keras.layers.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(x), name="connected")


def subclassed() -> keras.Model:
    model = Pictures(name="pictures")
    model(np.zeros((8, 6, 6, 4)))
    return model


def block(name: str) -> dict[str, Any]:
    norms = dict.fromkeys(("gamma", "beta", "moving_mean", "moving_variance"), PART)
    found = {"up/kernel": COLUMNS, **{f"norm/{one}": dims for one, dims in norms.items()}}
    found |= {"squeeze/kernel": ROWS, "excite/kernel": COLUMNS, "excite/bias": PART}
    return {f"{name}/{path}": dims for path, dims in {**found, "down/kernel": ROWS}.items()}


PAIR = {"first/conv/kernel": COLUMNS, "first/conv/bias": PART, "second/conv/kernel": ROWS}


class Tokened(keras.layers.Layer):
    """Convolutions before a token, of which there is one for each row."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first = keras.layers.Conv2D(8, 3, padding="same", activation="relu", name="first")
        self.second = keras.layers.Conv2D(4, 3, padding="same", name="second")

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.second.build((*shape[:-1], 8))
        self.token = self.add_weight(shape=(1, 1, 4), name="token")

    def call(self, x: Any) -> Any:
        x = self.second(self.first(x))
        rows, _, _, width = keras.ops.shape(x)
        x = keras.ops.reshape(x, (rows, -1, width))
        return keras.ops.concatenate([keras.ops.tile(self.token, (rows, 1, 1)), x], axis=1)


def tokened() -> keras.Model:
    inputs = keras.Input((6, 6, 4))
    x = keras.layers.GlobalAveragePooling1D()(Tokened(name="tokened")(inputs))
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(x))


TOKENED = {
    "tokened/first/kernel": COLUMNS,
    "tokened/first/bias": PART,
    "tokened/second/kernel": ROWS,
}
CASES = {
    "tokened": (tokened, TOKENED),
    "connected": (connected, {**block("block"), **PAIR}),
    "subclassed": (subclassed, block("pictures/block")),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_inside_is_cut(name: str) -> None:
    build, expected = CASES[name]
    assert kdist.layout_map_for(build(), kdist.mesh(model=2)) == expected


@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"model": 4}])
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_device_does(name: str, axes: dict[str, int], float64: None) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 6, 6, 4)), rng.normal(size=(16, 2))
    weights = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        model = CASES[name][0]()
        if parallel:
            mesh = kdist.mesh(**axes)
            layouts = kdist.layout_map_for(model, mesh)
            kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, layout_map=layouts))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    found = kdist.inspect(model, 8)
    assert found.gathered == found.islands == ()


def test_the_model_stays_as_it_was() -> None:
    model = connected()
    layers = keras_models.flat_layers(model)
    before = [len(keras_models.calls_of(one)) for one in layers]
    kdist.layout_map_for(model, kdist.mesh(model=2))
    assert [len(keras_models.calls_of(one)) for one in layers] == before
    name = keras.layers.Add().name
    kdist.layout_map_for(model, kdist.mesh(model=2))
    stem, _, number = keras.layers.Add().name.rpartition("_")
    assert name in (stem, f"{stem}_{int(number) - 1}")


class Noisy(Convolved):
    """Writes to variables when it is called."""

    def __init__(self, filters: int, **options: Any) -> None:
        super().__init__(filters, **options)
        self.seeds = keras.random.SeedGenerator(1)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        return super().call(x) * keras.random.uniform((), seed=self.seeds)


def test_what_a_call_writes_is_forgotten() -> None:
    x = inputs = keras.Input((6, 6, 4))
    x = Noisy(8, name="second")(Noisy(12, name="first")(x))
    model = keras.Model(inputs, keras.layers.GlobalMaxPooling2D()(x))
    before = [one.numpy() for one in model.variables]
    assert len(kdist.layout_map_for(model, kdist.mesh(model=2))) == 3
    for one, other in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(one, other)


class ByValue(Convolved):
    """Looks at numbers, which a symbolic tensor has not."""

    def call(self, x: Any) -> Any:
        return super().call(tf.where(tf.abs(x) > 1.0, x, tf.zeros_like(x)))


def test_what_takes_no_symbolic_tensors_stays_whole() -> None:
    x = inputs = keras.Input((6, 6, 4))
    x = ByValue(8, name="second")(ByValue(12, name="first")(x))
    x = Convolved(8, name="fourth")(Convolved(12, name="third")(x))
    model = keras.Model(inputs, keras.layers.GlobalMaxPooling2D()(x))
    why = r"first/conv/kernel \(in layer 'first': its call takes no symbolic tensors"
    with pytest.warns(UserWarning, match=why):
        found = kdist.layout_map_for(model, kdist.mesh(model=2))
    assert found.keys() == {"third/conv/kernel", "third/conv/bias", "fourth/conv/kernel"}
