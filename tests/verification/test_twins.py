"""How a model is compared: by twins, or itself; it stays as it is, or is refused."""

import random
import sys
from typing import Any

import kdist
from kdist.config.settings import Setting
from kdist.verification.compiled import compile_alike, copy_optimizers
from kdist.verification.declared import SETTINGS
from kdist.verification.twin import make_twin

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from .models import Centre, batch, observable, small, wrapped


def test_nothing_of_the_model_changes():
    metrics = [keras.metrics.MeanAbsoluteError(name="error")]
    noise = layers.Dropout(0.3, name="noise"), layers.BatchNormalization(name="norm")
    model = small(*noise, metrics=metrics)
    x, y = batch()
    model.fit(x, y, epochs=2, verbose=0)
    before, floatx = observable(model), keras.config.floatx()
    layers.Dense(1)
    number = int(layers.Dense(1).name.split("_")[-1])
    draws = random.getstate(), np.random.get_state()[1].tolist()
    report = kdist.verify(model, x, y)
    assert report.ok, report
    after = observable(model)
    assert len(before) == len(after)
    for a, b in zip(before, after):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    assert keras.config.floatx() == floatx
    assert (random.getstate(), np.random.get_state()[1].tolist()) == draws
    assert int(layers.Dense(1).name.split("_")[-1]) == number + 1, "a name was used up"


def test_what_cannot_be_verified_is_refused():
    with pytest.raises(ValueError, match="plain Keras model"):
        kdist.verify(keras.Sequential([keras.Input((2,)), layers.Dense(1)]), *batch())
    model = small()
    with pytest.raises(ValueError, match="dtype='half'"):
        kdist.verify(model, *batch(), dtype="half")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    with pytest.raises(ValueError, match="model.compile"):
        kdist.verify(model, *batch())


def test_a_model_without_a_twin_is_compared_itself():
    x, y = batch()
    histories = []
    for verify in (None, "first_step"):
        keras.utils.set_random_seed(0)
        noise = layers.Dropout(0.3, name="noise"), layers.BatchNormalization(name="norm")
        model = wrapped(*noise, verify=verify)
        histories.append(model.fit(x, y, epochs=3, verbose=0).history)
    assert histories[0] == histories[1]
    before = observable(model)
    report = kdist.verify(model, x, y)
    assert report.ok and report.explained_by == ("noise", "norm"), report
    assert report.dtype == "float32"
    assert "the model itself" in report.way and "without an update" in report.way
    for a, b in zip(before, observable(model)):
        np.testing.assert_array_equal(a, b)
    model.fit(x, y, verbose=0)
    assert not kdist.verify(wrapped(Centre(name="centre")), x, y).ok
    compressed = wrapped(*noise, compression=kdist.CompressionConfig(rest="bf16"))
    assert kdist.verify(compressed, x, y).ok  # gradients are compared before they travel


@pytest.mark.parametrize("level", [0, 3])
def test_what_is_not_decayed_is_so_while_compared_and_afterwards(level: int, float64: None):
    x, y = (np.asarray(one, "float64") for one in batch())

    def trained(verified: bool) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        inner = [layers.Dense(4, name="up"), layers.Dense(2, name="down")]
        model = keras.Sequential([keras.Input((6,)), *inner])
        optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)
        mesh = kdist.mesh(data=2)
        kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, optimizer=optimizer))
        adam = keras.optimizers.Adam(0.05, weight_decay=0.5)
        adam.exclude_from_weight_decay(var_names=["down", "bias"])
        model.compile(adam, "mse")
        if verified:
            report = kdist.verify(model, x, y)
            assert report.ok and report.compared["weight"] == 4, report
        model.fit(x, y, verbose=0)
        return model.get_weights()

    for plain, verified in zip(trained(False), trained(True)):
        np.testing.assert_array_equal(plain, verified)


class Told(keras.optimizers.SGD):
    """Is told a factor that its configuration does not have."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = 1.0

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.factor, variable, learning_rate)


def test_members_of_a_multi_optimizer_are_told_alike_in_twins(float64: None) -> None:
    up = Told(0.5, weight_decay=0.5)
    up.factor = 3.0
    up.exclude_from_weight_decay(var_names=["kernel"])
    down = keras.optimizers.SGD(0.5, weight_decay=0.5)
    down.exclude_from_weight_decay(var_names=["bias"])
    model = small()
    rules = keras.optimizers.OptimizerMap(down, {"up/kernel": up, "up/bias": up})
    model.compile(keras.optimizers.MultiOptimizer(rules), "mse")
    twin = make_twin(model, "float64", batch()[0])
    compile_alike(model, twin, "float64")
    copy_optimizers(model, twin)
    for variable in twin.variables:
        variable.assign(tf.ones(variable.shape, variable.dtype))
    ones = [tf.ones(v.shape, v.dtype) for v in twin.variables]
    twin.optimizer.apply(ones, twin.trainable_variables)
    after = {v.path: float(np.mean(v.value)) for v in twin.variables}
    # One, less a decay of a quarter, less a rate of a half times the factor.
    expected = {"up/kernel": -0.5, "up/bias": -0.75, "down/kernel": 0.25, "down/bias": 0.5}
    assert after == expected


def penalized(**config: Any) -> keras.Model:
    """A model that cannot be made again, with penalties and `add_loss` in its stages."""
    penalty = keras.regularizers.L2(0.1)
    chain = [
        layers.Dense(8, name="up", kernel_regularizer=penalty),
        layers.ActivityRegularization(l2=0.1, name="middle"),
        layers.Dense(2, name="down"),
    ]
    model = Chained(chain)
    model(np.zeros((2, 6)))
    stages = [chain[:1], chain[1:]]
    pipeline = kdist.PipelineConfig(micro_batches=2, stages=stages)
    mesh = kdist.mesh(pipe=2, data=2)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, pipeline=pipeline, **config))
    return model


class Chained(keras.Model):
    """Calls its layers one after the other; holds what nobody knows how to copy."""

    def __init__(self, chain):
        super().__init__()
        self.chain, self.held = chain, object()

    def call(self, inputs):
        for layer in self.chain:
            inputs = layer(inputs)
        return inputs


@pytest.mark.parametrize("metrics", [[], ["mae"]])
def test_all_of_the_loss_of_stages_is_seen_in_a_model_itself(
    metrics: list[str], float64: None
) -> None:
    model = penalized()
    model.compile("sgd", "mse", metrics=metrics)
    report = kdist.verify(model, *batch(8))
    assert report.ok and "the model itself" in report.way, report
    assert report.compared["loss"] == 4 and report.compared["training_output"] == 1, report
    model.fit(*batch(8), verbose=0)
    again = kdist.verify(model, *batch(8))
    assert again.ok and again.compared == report.compared, again


class Normed(layers.Layer):
    """Divides by a norm of its weights that it keeps as state."""

    def build(self, shape):
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="gain")
        self.norm = self.add_weight(shape=(), initializer="ones", trainable=False, name="norm")

    def call(self, inputs):
        self.norm.assign(ops.sum(ops.square(self.gain)))
        return inputs * self.gain / self.norm


def test_what_a_layer_writes_and_reads_has_no_gradient_in_a_model_itself():
    report = kdist.verify(wrapped(Normed(name="normed")), *batch())
    assert report.ok and "the model itself" in report.way, report


class Measured(layers.Layer):
    """Has a metric of its own, which sees what the layer is called with."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, inputs):
        self.seen.update_state(ops.mean(inputs, axis=-1))
        return inputs


def test_a_model_itself_has_the_batch_once_in_the_metrics_of_layers():
    layer = Measured(name="measured")
    report = kdist.verify(wrapped(layer), *batch())
    assert report.ok and "the model itself" in report.way, report
    assert report.compared["state"] >= 2, report
    assert [float(v) for v in layer.seen.variables] == [0.0, 0.0], "nothing is left of it"


def spread_of_rows(y, p):
    return ops.mean(ops.square(y - p)) + ops.std(p)


def test_losses_of_outputs_are_as_they_were_after_a_model_itself_was_compared():
    x, y = batch()
    first = keras.Input((6,))
    inner = keras.layers.Lambda(lambda t: t, name="own")(first)
    model = keras.Model(first, {name: layers.Dense(2, name=name)(inner) for name in "ab"})
    model.get_layer("own").get_config = lambda: {}  # so that there is no twin
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2), verify="first_step"))
    model.compile("sgd", {"a": spread_of_rows, "b": "mse"})
    logs = model.fit(x, {"a": y, "b": y}, verbose=0, batch_size=len(x)).history
    assert logs["loss"][0] == pytest.approx(logs["a_loss"][0] + logs["b_loss"][0], rel=1e-5)
    report = kdist.verify(model, x, {"a": y, "b": y})
    assert report.ok and "the model itself" in report.way, report
    assert [float(v) for m in model.metrics for v in m.variables if "_loss" in m.name][1::2] == [
        len(x),
        len(x),
    ]


class Hidden(layers.Layer):
    """Has a factor that its configuration does not have."""

    def call(self, inputs):
        return inputs * getattr(self, "_factor", 1.0)


@pytest.mark.parametrize(
    "options",
    [{"state_on": "host"}, {"state_format": kdist.StateFormatConfig(first="bf16")}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("scaled", [False, True])
def test_one_device_has_what_is_inside_of_a_sharded_optimizer(options, scaled):
    model = small()
    optimizer = kdist.ShardedOptimizer("adam", level=1, threshold_kb=0, **options)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
    model.compile(optimizer, "mse")
    report = kdist.verify(model, *batch(), dtype="own" if scaled else "float64")
    assert report.ok, report
    assert report.way.startswith("a twin of the model on one device"), report.way
    assert report.explained_by == (("state_format",) if report.differences else ())
    assert bool(report.differences) == ("state_format" in options)


def test_a_model_that_does_not_run_on_one_device_is_compared_itself(monkeypatch):
    """Not: ends with what one device says of it, in its own dtype too."""

    def on_one_device(*_):
        raise RuntimeError("it needs two devices")

    monkeypatch.setattr("kdist.verification.trial.on_one_device", on_one_device)
    report = kdist.verify(small(), *batch())
    assert report.ok, report
    assert "the model itself, in float32" in report.way
    assert report.way.endswith("its twin does not run on one device: it needs two devices")


def test_a_twin_that_predicts_otherwise_is_no_twin():
    layer = Hidden()
    layer._factor = 3.0
    report = kdist.verify(small(layer), *batch())
    assert report.ok, report
    assert "predicts another output" in report.way


def test_what_was_set_after_construction_is_the_twins_too():
    dropout = layers.Dropout(0.5, name="noise")
    model = small(dropout)
    dropout.rate = 0.0
    assert kdist.verify(model, *batch()).differences == ()


def test_a_model_that_does_not_fit_one_device_is_refused():
    model = small()
    weights = 8 * sum(int(np.prod(v.shape)) for v in model.weights)
    # Gradients, the outputs of both layers, the optimizer's two scalars.
    least = 2 * weights + 8 * 6 * (8 + 2) + 8 * 2
    assert kdist.verify(model, *batch(), memory_limit=least).ok
    with pytest.raises(ValueError, match=f"{least} bytes at least.*has {least - 1} bytes"):
        kdist.verify(model, *batch(), memory_limit=least - 1)


class Norm(layers.Layer):
    """Divides by the root of the mean square, in float32 whatever the policy; then a product."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 8), name="kernel")

    def call(self, inputs):
        x = ops.cast(inputs, "float32")
        x = x / ops.sqrt(ops.mean(x * x, axis=-1, keepdims=True) + 1e-5)
        return ops.matmul(ops.cast(x, self.compute_dtype), self.kernel)


def test_a_model_that_rounds_inside_gets_a_wider_tolerance_and_says_so():
    layout = {".*mid/kernel": (None, "model")}
    middle = Norm(), Norm(), Norm(), layers.Dense(4, name="mid")
    report = kdist.verify(small(*middle, axes={"data": 2, "model": 2}, layout_map=layout), *batch())
    assert report.ok, report
    assert report.tolerance.relative["loss"] == 1e-5
    assert any("rounds to fewer bits" in note for note in report.notes)


def test_twins_get_every_kind_of_declaration() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("kdist.")]
    known = {one for module in modules for one in vars(module).values() if isinstance(one, Setting)}
    assert known == set(SETTINGS)
