"""Own steps over a mesh: what runs where, and equal to one device."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import kdist
from kdist.graphs import executed
from kdist.sharding.device import Device

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from ..parity import assert_close
from .step_parts import IDS, MESHES, Own, TwoParts, batch, layer_of_two, pair, same

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_every_device_computes_and_nothing_runs_twice(axes: dict[str, int]) -> None:
    """A layer's forward product, and those of its backward pass, are there once per device."""
    _, model = pair(axes)
    step = executed.largest(executed.watch(lambda: model.train_on_batch(*batch())))
    found = {Device.parse(name).index: n for name, n in step.count(executed.PRODUCTS).items()}
    # up: forward, kernel; nobody asks for its inputs'. down: forward, kernel, inputs.
    assert found == dict.fromkeys(range(4), 5)


@pytest.mark.parametrize("options", [{"steps_per_execution": 3}, {"run_eagerly": True}])
@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_ways_to_run_steps(axes: dict[str, int], options: dict[str, Any]) -> None:
    models = pair(axes, **options)
    for model in models:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.fit(*batch(26), batch_size=4, epochs=2, verbose=0, shuffle=False)
    same(models)


class Slopes(Own):
    """Gradients with respect to inputs: of a tape, of `tf.gradients`, and inside a function."""

    def loss_of(self, x: Any, y: Any) -> Any:
        @tf.function(autograph=False)
        def far(x: Any) -> Any:
            return ops.mean((self(x, training=True) - y) ** 2)

        with tf.GradientTape() as tape:
            tape.watch(x)
            watched = far(x)
        moved = x + 0.1 * tf.stop_gradient(tape.gradient(watched, x))
        (slope,) = tf.gradients(super().loss_of(moved, y), moved)
        return super().loss_of(moved - 0.1 * tf.stop_gradient(slope), y)


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_gradients_of_inputs(axes: dict[str, int]) -> None:
    models = pair(axes, Slopes)
    for model in models:
        model.fit(*batch(), batch_size=8, epochs=2, verbose=0, shuffle=False)
    same(models)


def test_an_optimizer_keeps_to_its_weights() -> None:
    model = layer_of_two(TwoParts)
    model.other = keras.optimizers.SGD(0.1)
    model.groups = lambda: [layer.trainable_weights for layer in model.layers[1:]]
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile()
    with pytest.raises(ValueError, match=r"applied to first.*SGD.*\['down/kernel'"):
        model.fit(*batch(), verbose=0)


class Builds(Own):
    """Builds its optimizers while it is traced, and applies one without naming weights."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        weights = self.trainable_variables
        for optimizer in (self.optimizer, self.beside):
            if not optimizer.built:
                optimizer.build(weights)
        found = tape.gradient(loss, weights)
        self.optimizer.apply(found)
        self.beside.apply([0.1 * one for one in found], weights)
        return {"far": loss}


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_optimizers_that_the_step_builds(axes: dict[str, int]) -> None:
    models = pair(axes, kind=Builds)
    for model in models:
        model.beside = keras.optimizers.Adagrad(0.05)
        model.fit(*batch(), batch_size=4, verbose=0, shuffle=False)
    same(models)
    assert_close(*[model.beside.variables for model in models])


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_a_model_compiled_again_goes_on(axes: dict[str, int]) -> None:
    models = pair(axes)
    for model in models:
        model.fit(*batch(), batch_size=4, verbose=0, shuffle=False)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        model.fit(*batch(), batch_size=4, verbose=0, shuffle=False)
    same(models)


class Apart(Own):
    """Is compiled without an optimizer: it has one itself."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.mine.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_what_is_frozen_trains_on_until_compile(axes: dict[str, int]) -> None:
    """As Keras has it, whose traced step stays: whichever optimizer the step applies."""
    models = pair(axes, Apart)
    for model in models:
        model.mine = keras.optimizers.Adam(0.01)
        model.compile(optimizer=None)
        kernels = [model.get_layer("up").kernel.numpy()]
        for n in range(3):
            if n == 2:
                model.compile(optimizer=None)
            model.fit(*batch(), batch_size=4, verbose=0, shuffle=False)
            model.get_layer("up").trainable = False
            kernels.append(model.get_layer("up").kernel.numpy())
        changed = [not np.array_equal(*both) for both in itertools.pairwise(kernels)]
        assert changed == [True, True, False]
    same(models)


class Thaws(Own):
    """Makes a layer trainable in its step, as a GAN does with its discriminator."""

    def train_step(self, data: Any) -> dict[str, Any]:
        self.get_layer("up").trainable = True
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        weights = self.get_layer("down").trainable_variables
        self.mine.apply(tape.gradient(loss, weights), weights)
        return {"far": loss}


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_what_a_step_thaws_is_told(axes: dict[str, int]) -> None:
    _, model = pair(axes, Thaws)
    model.mine = keras.optimizers.SGD(0.01)
    model.compile(optimizer=None)
    model.get_layer("up").trainable = False
    with pytest.warns(UserWarning, match=r"(?s)made them trainable.*no gradients.*up/kernel"):
        model.fit(*batch(), batch_size=4, verbose=0, shuffle=False)


class Direct(keras.Model):
    """Its step calls layers, not the model."""

    def __init__(self) -> None:
        super().__init__()
        self.up = layers.Dense(8, "tanh", name="up")
        self.down = layers.Dense(4, name="down")
        self.down(self.up(np.zeros((1, 6))))

    def train_step(self, x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = ops.mean(self.down(self.up(x)) ** 2)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_a_layer_that_the_step_calls_has_its_layouts() -> None:
    """`kdist.shard` of such a layer: each device makes a quarter of the rows, forward."""
    model = Direct()
    kdist.shard(model.up, in_strategy=((4, 1), (1, 1)))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(model=4), layout_map={}))
    model.compile("sgd")
    x = batch()[0]
    functions = executed.watch(lambda: model.fit(x, batch_size=16, verbose=0))
    products = executed.largest(functions).select(executed.PRODUCTS)
    shapes = {node.shape for node in products if not node.backward}
    assert (4, 8) in shapes and (16, 8) not in shapes, shapes


class Student(keras.Model):
    """Has another head than a base class has made; Keras lists that one too, unbuilt."""

    train_step, loss_of = Own.train_step, Own.loss_of

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)
        self.body, self.head = layers.Dense(8, "tanh"), layers.Dense(7, name="head")
        self.head = layers.Dense(3, name="other")

    def call(self, x: Any) -> Any:
        return self.head(self.body(x))


def test_a_layer_that_another_one_has_replaced_need_not_be_built() -> None:
    models = [Student(), Student()]
    kdist.parallelize(models[1], kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    for model in models:
        assert "head" in {one.name for one in model.layers}
        model.compile(keras.optimizers.Adam(0.01))
        model.fit(*batch(), batch_size=8, verbose=0, shuffle=False)
    same(models)


class TracedTwice(keras.Model):
    """Asks for a gradient of a gradient, which is found out after Keras has made metrics."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                made = self(x, training=True)
                loss = self.compute_loss(x, y, made)
            slope = tape.gradient(loss, x)
        outer.gradient(slope, x)
        return self.compute_metrics(x, y, made)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("steps", [1, 2])
def test_metrics_that_a_trace_made_which_was_left_are_counted(steps: int) -> None:
    found = []
    for axes in (None, {"data": 2}):
        keras.utils.set_random_seed(0)
        first = keras.Input((4,))
        outputs = {name: keras.layers.Dense(3, name=name)(first) for name in ("one", "other")}
        model = TracedTwice(first, outputs)
        if axes is not None:
            kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes)))
        losses = {"one": "mse", "other": "mae"}
        metrics = {"one": ["mae"], "other": ["mse"]}
        model.compile("sgd", losses, metrics=metrics, steps_per_execution=steps)
        x, y = np.random.default_rng(0).normal(size=(12, 4)), np.zeros((12, 3))
        given = {"one": y, "other": y}
        found.append(model.fit(x, given, batch_size=6, shuffle=False, verbose=0).history)
    assert found[0].keys() == found[1].keys() and "one_loss" in found[0]
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-9, err_msg=name)
