"""What `kdist._compat.keras_trainer` knows of losses and metrics is as it takes it to be."""

from __future__ import annotations

from typing import Any

from kdist._compat import keras_trainer

import keras
import numpy as np
import tensorflow as tf

from ..parity import assert_close, data, mlp
from .private_checks import compiled, two_outputs


def test_add_loss_values():
    layer = keras.layers.ActivityRegularization(l2=1.0)
    layer.build((1, 2))
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(tf.constant([[1.0, 2.0]]))
    assert [float(v) for v in keras_trainer.add_loss_values(scope)] == [5.0]


def added_five() -> tuple[keras.Model, Any]:
    """A model in which one layer adds a loss, and what it added in a call."""
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.ActivityRegularization(l2=1.0)(inputs))
    with keras.StatelessScope(collect_losses=True) as scope:
        model(tf.constant([[1.0, 2.0]]))
    return model, keras_trainer.add_loss_values(scope)[0]


def test_adder_of():
    model, value = added_five()
    assert keras_trainer.adder_of(model.layers, value) is model.layers[1]
    assert keras_trainer.adder_of(model.layers, tf.constant(5.0)) is None


def test_clear_losses():
    model, value = added_five()
    keras_trainer.clear_losses(model.layers[1])
    assert keras_trainer.adder_of(model.layers, value) is None


def test_add_loss_for():
    """A value in another scope counts among the model's losses."""
    model, _ = added_five()
    with keras.StatelessScope(collect_losses=True) as scope:
        assert model.losses == []
        keras_trainer.add_loss_for(model.layers[1], tf.constant(7.0), scope)
        assert [float(v) for v in model.losses] == [7.0]


def test_loss_function():
    class Own(keras.losses.MeanSquaredError):
        def call(self, y_true, y_pred):
            return super().call(y_true, y_pred)

    function, options = keras_trainer.loss_function(keras.losses.CosineSimilarity(axis=1))
    assert function is keras.losses.cosine_similarity
    assert options == {"axis": 1}
    assert keras_trainer.loss_function(Own()) == (None, {})


def test_compiled_loss():
    model = mlp()
    model.compile("sgd", "mse")
    x, y = data(4)
    loss = float(model.train_on_batch(x, y))
    model.set_weights(mlp().get_weights())
    assert_close(loss, float(keras_trainer.compiled_loss(model)(y, model(x))))


def test_regularization_losses():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(2, kernel_regularizer="l2")(inputs))
    kernel = model.layers[1].kernel
    ((variable, found),) = keras_trainer.regularization_losses(model)
    assert variable is kernel
    np.testing.assert_allclose(found, 0.01 * (kernel.numpy() ** 2).sum(), rtol=1e-6)
    with keras.StatelessScope([(kernel, tf.ones((2, 2)))]):
        ((_, found),) = keras_trainer.regularization_losses(model)
    np.testing.assert_allclose(found, 0.04, rtol=1e-6)


def test_compiled_losses():
    model = two_outputs()
    entries = keras_trainer.compiled_losses(model)
    assert [(tuple(e.path), e[2], e.name) for e in entries] == [
        (("down",), 1.0, "down"),
        (("other",), 2.0, "other"),
    ]
    assert all(isinstance(e.loss, keras.Loss) for e in entries)
    assert [e[1] for e in entries] == [e.loss for e in entries]
    plain = mlp()
    plain.compile("sgd")
    assert keras_trainer.compiled_losses(plain) == []


def test_loss_trackers():
    names = [m.name for m in keras_trainer.loss_trackers(two_outputs())]
    assert names == ["down_loss", "other_loss"]
    assert keras_trainer.loss_trackers(compiled()) == []
    plain = mlp()
    plain.compile("sgd")
    assert keras_trainer.loss_trackers(plain) == []


def test_replaced_losses():
    model = two_outputs()
    x, y = data(4)
    before = list(keras_trainer.compiled_losses(model))
    trackers = [float(m.result()) for m in keras_trainer.loss_trackers(model)]
    given = [lambda *args: tf.constant(1.0), lambda *args: tf.constant(10.0)]
    with keras_trainer.replaced_losses(model, given):
        value = model._compile_loss({"down": y, "other": y}, model(x))
    assert float(value) == 21.0
    assert keras_trainer.compiled_losses(model) == before
    assert [float(m.result()) for m in keras_trainer.loss_trackers(model)] == trackers


def test_losses_built():
    model = mlp()
    model.compile("sgd", "mse")
    assert not keras_trainer.losses_built(model)
    x, y = data(4)
    model.train_on_batch(x, y)
    assert keras_trainer.losses_built(model)
    model.compile("sgd")
    assert keras_trainer.losses_built(model)


def test_noted_losses():
    model = two_outputs()
    x, y = data(4)
    before = list(keras_trainer.compiled_losses(model))
    with keras_trainer.noted_losses(model) as values:
        total = keras_trainer.compiled_loss(model)({"down": y, "other": y}, model(x))
    np.testing.assert_allclose(float(values[0]) + 2 * float(values[1]), total, rtol=1e-6)
    assert keras_trainer.compiled_losses(model) == before


def test_replaced_losses_without_a_loss():
    model = mlp()
    model.compile("sgd")
    with keras_trainer.replaced_losses(model, []):
        pass


def test_compute_loss():
    """An old-fashioned `compute_loss`, without `training`, is called without it."""

    class Old(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return keras.ops.mean(sample_weight * keras.ops.sum(y - y_pred, axis=-1))

    model = Old(inputs=(model := mlp()).inputs, outputs=model.outputs)
    model.compile("sgd")
    x, y = data(4)
    weight = np.arange(4.0)
    found = keras_trainer.compute_loss(model, x, y, y + 1, weight, True)
    assert_close(float(found), -3 * weight.mean())


def test_loss_tracker():
    model = compiled()
    assert keras_trainer.loss_tracker(model).name == "loss"
    assert keras_trainer.loss_tracker(model) in model.metrics
    keras_trainer.loss_tracker(model).update_state(4.0, sample_weight=3)


def test_compiled_metrics():
    model = compiled(metrics=["mae"])
    container = keras_trainer.compiled_metrics(model)
    assert container in model.metrics
    assert len(container.variables) == 2
    assert keras_trainer.compiled_metrics(compiled()) is None


def metrics_twice() -> tuple[keras.Model, list[keras.metrics.Metric]]:
    model = compiled(metrics=["mae", "mse"], weighted_metrics=["mape"])
    return model, keras_trainer.compiled_metrics(model).metrics


def test_only_metrics():
    model, (first, second, weighted) = metrics_twice()
    container = keras_trainer.compiled_metrics(model)
    container.reset_state()
    x, y = data(4)
    with keras_trainer.only_metrics(container, {id(second), id(weighted)}):
        assert len(container.variables) == 4
        container.update_state(y, y + 1.0, sample_weight=np.ones(4))
    assert [float(metric.count) for metric in (first, second, weighted)] == [0, 4, 4]
    assert container.metrics == [first, second, weighted]
    assert [*container.result()] == ["mae", "mse", "mape"]


def test_replaced_metrics():
    model, metrics = metrics_twice()
    container = keras_trainer.compiled_metrics(model)
    entries = container._flat_metrics
    with keras_trainer.replaced_metrics(container, lambda entry: None):
        assert container.metrics == []
    assert container._flat_metrics is entries
    assert container.metrics == metrics


def test_metric_calls():
    model, metrics = metrics_twice()
    container = keras_trainer.compiled_metrics(model)
    before = [float(v) for v in container.variables]
    y, y_pred = tf.ones((4, 3)), tf.zeros((4, 3))
    calls = keras_trainer.metric_calls(container, y, y_pred, None)
    assert [metric for metric, _, _ in calls] == metrics
    assert all(a is y and b is y_pred for _, a, b in calls)
    assert [float(v) for v in container.variables] == before


def test_wrapped_function():
    cosine = keras_trainer.wrapped_function(keras.metrics.CosineSimilarity(axis=0))
    assert cosine(tf.ones((4, 3)), tf.ones((4, 3))).shape == (3,)
    assert keras_trainer.wrapped_function(keras.metrics.AUC()) is None
