"""Own steps over a mesh: what is told of them, and what is refused."""

from __future__ import annotations

import types
import warnings
from pathlib import Path
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from .step_parts import Own, TwoParts, batch, layer_of_two, pair, same

pytestmark = pytest.mark.usefixtures("float64")


class Looping(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        zero = tf.zeros((), x.dtype)
        every = tf.while_loop(
            lambda i, _: i < 2, lambda i, far: (i + 1, far + super(Looping, self).loss_of(x, y)),
            (0, zero),
        )  # fmt: skip
        return every[1]


def test_a_call_in_a_loop_of_tensorflows_runs_on_one_device_and_says_so() -> None:
    models = pair({"data": 4}, Looping)
    models[0].fit(*batch(), verbose=0)
    with pytest.warns(UserWarning, match=r"tf\.while_loop.*computes on one device"):
        models[1].fit(*batch(), verbose=0)
    same(models)


class Stateless(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        weights = [v.value for v in self.trainable_variables]
        found, _ = self.stateless_call(weights, self.non_trainable_variables, x, training=True)
        return ops.mean((found - y) ** 2)


def test_a_stateless_call_runs_on_one_device_and_says_so() -> None:
    models = pair({"data": 2, "model": 2}, Stateless)
    models[0].fit(*batch(), verbose=0)
    with pytest.warns(UserWarning, match=r"stateless_call.*computes on one device"):
        models[1].fit(*batch(), verbose=0)
    same(models)


def test_rows_that_meet_in_a_layer_are_told() -> None:
    class Centred(layers.Layer):
        def call(self, x: Any) -> Any:
            return x - ops.mean(x, axis=0)

    model = layer_of_two(middle=Centred())
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("sgd")
    with pytest.warns(UserWarning, match=r"each replica's rows.*centred.*batch_semantics"):
        model.fit(*batch(), verbose=0)


class OfRows(layers.Layer):
    """Gives `add_loss` an entry for each row."""

    def call(self, x: Any) -> Any:
        self.add_loss(ops.sum(x**2, axis=-1))
        return x


class Adding(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        return super().loss_of(x, y) + tf.add_n([tf.reduce_sum(one) for one in self.losses])


def test_losses_by_row_are_their_sum_and_said_to_be() -> None:
    models = [layer_of_two(Adding, middle=OfRows()) for _ in range(2)]
    kdist.parallelize(models[1], kdist.ParallelConfig(mesh=kdist.mesh(data=4)))
    for model in models:
        model.compile(keras.optimizers.Adam(0.01))
    models[0].fit(*batch(), batch_size=6, verbose=0)
    with pytest.warns(UserWarning, match=r"sum over the batch.*take no mean.*of_rows"):
        models[1].fit(*batch(), batch_size=6, verbose=0)
    same(models)


REFUSED: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "pipeline": (
        {"pipe": 2, "data": 2},
        {"pipeline": kdist.PipelineConfig(micro_batches=2)},
    ),
    "compression": ({"data": 2}, {"compression": kdist.CompressionConfig(rest="bf16")}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_own_steps_cannot_honour_are_refused(name: str) -> None:
    axes, options = REFUSED[name]
    model = layer_of_two()
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), **options))
    model.compile("sgd")
    words = f"(?s)in its own `train_step` goes without {name}.*Leave it out.*Received: Own"
    with pytest.raises(ValueError, match=words):
        model.fit(*batch(), verbose=0)


def test_stages_of_networks_that_a_step_joins_are_refused_for_the_step() -> None:
    class Pair(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layer_of_two(), layer_of_two()
            self.built = True

        def train_step(self, data: Any) -> dict[str, Any]:
            raise NotImplementedError

    axes, options = REFUSED["pipeline"]
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), **options)
    with pytest.raises(ValueError, match=r"its own `train_step` goes without pipeline.*: Pair"):
        kdist.parallelize(Pair(), config)


def test_rows_are_not_looked_up_ahead() -> None:
    ids = keras.Input((4,), dtype="int32")
    table = layers.Embedding(9, 3, name="table")
    model = Own(ids, layers.GlobalAveragePooling1D()(table(ids)))
    kdist.place(table, "host", prefetch=True)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("sgd")
    words = r"Leave prefetch=True out.*Received: Own in its own `train_step`.*\['table'\]"
    with pytest.raises(ValueError, match=words):
        model.fit(np.zeros((8, 4), "int32"), batch(8)[1], verbose=0)


def test_the_plan_says_whose_step_it_lists() -> None:
    _, model = pair({"data": 2})
    model.fit(*batch(), verbose=0)
    assert any("steps of one's own" in note for note in model.plan(batch_size=16).notes)
    assert "the model has its own train_step" in str(kdist.inspect(model))


class Inside(keras.Model):
    """Has no inputs of its own: its step calls the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="up")])

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = ops.mean(self.inner(data) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_a_model_whose_step_calls_its_parts_is_inspected_over_inner_axes() -> None:
    model = Inside()
    cuts = {".*up/kernel": (None, "model")}
    mesh = kdist.mesh(data=2, model=2)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, layout_map=cuts))
    model.compile(keras.optimizers.Adam())
    model.fit(np.ones((8, 4)), verbose=0)
    found = kdist.inspect(model)
    assert found.collectives == () and "the model has its own train_step" in str(found)
    assert [one.parameters for one in found.memory] == [(4 * 2 + 4) * 8] * 4
    with pytest.raises(ValueError, match="called by a step of its own.*Received: model='inside'"):
        model.plan(batch_size=8)


def test_a_weight_that_comes_twice_is_refused() -> None:
    """Keras updates it two times, one after the other."""
    model = layer_of_two(TwoParts)
    model.other, model.groups = keras.optimizers.SGD(0.1), lambda: [model.trainable_weights * 2]
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile()
    with pytest.raises(ValueError, match=r"each weight once.*'up/kernel' twice in apply of SGD"):
        model.fit(*batch(), verbose=0)


class Scaling(TwoParts):
    def loss_of(self, x: Any, y: Any) -> Any:
        return self.other.scale_loss(super().loss_of(x, y))


def test_averages_of_weights_that_an_optimizer_is_not_applied_to_are_refused() -> None:
    """Keras averages those that it is applied to first; one that scales losses has all."""

    def averaging() -> Any:
        adam = keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=1)
        return keras.optimizers.LossScaleOptimizer(adam)

    model = layer_of_two(Scaling)
    model.groups = lambda: [model.layers[1].trainable_weights]
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile(averaging())
    model.other = model.optimizer
    with pytest.raises(ValueError, match=r"(?s)Freeze the others.*Loss.*\['down/kernel', 'down/b"):
        model.fit(*batch(), verbose=0)
    model.layers[2].trainable = False
    model.compile(averaging())
    model.other = model.optimizer
    model.fit(*batch(), verbose=0)


def test_gradients_that_are_missing_are_told() -> None:
    class Watching(Own):
        def train_step(self, data: Any) -> dict[str, Any]:
            values = [v.value for v in self.trainable_variables]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(values)
                loss = self.loss_of(*data)
            self.optimizer.apply(tape.gradient(loss, values), self.trainable_variables)
            return {"far": loss}

    _, model = pair({"data": 2, "model": 2}, Watching)
    with pytest.warns(UserWarning, match=r"(?s)do not exist for variables \['up/kernel'.*by the v"):
        model.fit(*batch(), verbose=0)


def test_weights_and_other_variables_are_not_updated_together() -> None:
    other = keras.Variable(np.ones(3))
    model = layer_of_two(TwoParts)
    model.other = keras.optimizers.SGD(0.1)
    model.groups = lambda: [[*model.trainable_weights, other]]
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile()
    with pytest.raises(ValueError, match="or other variables: give others an optimizer"):
        model.fit(*batch(), verbose=0)


class Beside(keras.Model):
    """Holds a network, and an optimizer in an object besides the compiled one; has no `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.network = layer_of_two()
        self.others = types.SimpleNamespace(adam=keras.optimizers.Adam(0.01))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = ops.mean((self.network(x, training=True) - y) ** 2)
        weights = self.network.trainable_weights
        self.others.adam.apply(tape.gradient(loss, weights), weights)
        return {"far": loss, "rows": ops.shape(x)[0]}


def test_checkpoints_say_whose_state_they_do_not_have(tmp_path: Path) -> None:
    def model() -> keras.Model:
        made = kdist.parallelize(Beside(), kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
        made.compile("sgd")
        return made

    first, second = model(), model()
    first.fit(*batch(), verbose=0)
    with pytest.warns(UserWarning, match=r"Make this one an attribute.*Received: Adam 'adam"):
        kdist.checkpoint.save(first, tmp_path, step=1)
    kdist.checkpoint.restore(second, tmp_path)
    for one, other in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_settings_without_their_effect_are_told() -> None:
    fusion, level = kdist.FusionConfig(mode="none"), kdist.OptimizerConfig(level=2, threshold_kb=0)
    model = layer_of_two()
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2), fusion=fusion, optimizer=level)
    kdist.parallelize(model, config)
    model.compile("sgd")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(*batch(), verbose=0)
    texts = [str(one.message) for one in said]
    assert sum("no effect on the sums of gradients" in text for text in texts) == 1, texts
    assert sum("level=2 has no effect on when gradients" in text for text in texts) == 1, texts


class Evaluated(keras.Model):
    """Trains as kdist does, and tests by itself."""

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return {"far": ops.mean((self(x, training=False) - y) ** 2)}


def test_an_own_test_step_leaves_training_its_settings() -> None:
    model = layer_of_two(Evaluated)
    compression = kdist.CompressionConfig(rest="bf16")
    mesh = kdist.mesh(data=2)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, compression=compression))
    model.compile("sgd", "mse")
    x, y = batch()
    model.fit(x, y, verbose=0)
    far = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)["far"]
    np.testing.assert_allclose(far, np.mean((model.predict(x, verbose=0) - y) ** 2), rtol=1e-9)


def test_a_normalization_is_not_told_of_as_in_fit() -> None:
    model = layer_of_two(middle=layers.BatchNormalization())
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("sgd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(*batch(), verbose=0)
