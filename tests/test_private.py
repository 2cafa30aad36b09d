"""Every Keras internal that kdist needs exists and does what kdist takes it to do.

When Keras moves one, the test that fails is named after the function of `kdist._private` to mend.
Those of optimizers and of models as graphs are in files of their own.
"""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from kdist import _private, _private_strategy

import keras
import numpy as np
import tensorflow as tf

from .parity import assert_close, data, mlp


def compiled(loss: object = "mse", **options: object) -> keras.Model:
    """A compiled model that has seen one batch, so that everything is built."""
    model = mlp()
    model.compile("sgd", loss, **options)
    model.train_on_batch(*data(4))
    return model


def two_outputs() -> keras.Model:
    model = mlp()
    other = keras.layers.Dense(3, name="other")(model.layers[1].output)
    model = keras.Model(model.inputs, {"down": model.outputs[0], "other": other})
    model.compile("sgd", {"down": "mse", "other": "mae"}, loss_weights={"down": 1.0, "other": 2.0})
    x, y = data(4)
    model.train_on_batch(x, {"down": y, "other": y})
    return model


def untested(module: ModuleType, tests: str) -> list[str]:
    """Functions of a module without a `test_<function>` in a file of tests."""
    functions = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    assert len(functions) > 9
    source = Path(tests).read_text()
    return [name for name in functions if f"def test_{name}(" not in source]


def test_each_function_has_a_test():
    """So that what moves is named by what fails."""
    assert untested(_private, __file__) == []


def test_exported_names():
    assert all(hasattr(_private, name) for name in _private.__all__)
    assert issubclass(keras.Model, _private.TensorFlowTrainer)
    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        assert name in vars(_private.TensorFlowTrainer)


def test_get_mask():
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(np.array([[0, 1]]))
    assert np.asarray(_private.get_mask(embedded)).tolist() == [[False, True]]
    assert _private.get_mask(tf.ones(2)) is None


def test_set_mask():
    tensor, mask = tf.ones((1, 2)), tf.constant([[True, False]])
    _private.set_mask(tensor, mask)
    assert _private.get_mask(tensor) is mask
    loss = keras.losses.MeanAbsoluteError()(tf.constant([[1.0], [9.0]])[None, :, 0:1], masked())
    assert float(loss) == 1.0


def masked() -> tf.Tensor:
    tensor = tf.zeros((1, 2, 1))
    _private.set_mask(tensor, tf.constant([[True, False]]))
    return tensor


def test_apply_mask():
    merged = _private.apply_mask(
        tf.constant([2.0, 3.0]), tf.constant([True, False]), dtype="float32", reduction="sum"
    )
    assert np.asarray(merged).tolist() == [2.0, 0.0]


def test_squeeze_or_expand_to_same_rank():
    a, b = _private.squeeze_or_expand_to_same_rank(tf.ones((3, 1)), tf.ones(3))
    assert a.shape == b.shape


def test_current_value():
    variable = keras.Variable(1.0)
    assert _private.current_value(variable) is None
    with keras.StatelessScope([(variable, tf.constant(2.0))]):
        assert float(_private.current_value(variable)) == 2.0
        variable.assign(3.0)
        assert float(_private.current_value(variable)) == 3.0
    assert float(variable.value) == 1.0


def test_add_loss_values():
    layer = keras.layers.ActivityRegularization(l2=1.0)
    layer.build((1, 2))
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(tf.constant([[1.0, 2.0]]))
    assert [float(v) for v in _private.add_loss_values(scope)] == [5.0]


def added_five() -> tuple[keras.Model, Any]:
    """A model in which one layer adds a loss, and what it added in a call."""
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.ActivityRegularization(l2=1.0)(inputs))
    with keras.StatelessScope(collect_losses=True) as scope:
        model(tf.constant([[1.0, 2.0]]))
    return model, _private.add_loss_values(scope)[0]


def test_adder_of():
    model, value = added_five()
    assert _private.adder_of(model, value) is model.layers[1]
    assert _private.adder_of(model, tf.constant(5.0)) is None


def test_add_loss_for():
    """A value in another scope counts among the model's losses."""
    model, _ = added_five()
    with keras.StatelessScope(collect_losses=True) as scope:
        assert model.losses == []
        _private.add_loss_for(model.layers[1], tf.constant(7.0), scope)
        assert [float(v) for v in model.losses] == [7.0]


def test_loss_function():
    class Own(keras.losses.MeanSquaredError):
        def call(self, y_true, y_pred):
            return super().call(y_true, y_pred)

    function, options = _private.loss_function(keras.losses.CosineSimilarity(axis=1))
    assert function is keras.losses.cosine_similarity
    assert options == {"axis": 1}
    assert _private.loss_function(Own()) == (None, {})


def test_build_from_loss():
    class Head(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(self.head(y_pred))

    model = Head(inputs=(model := mlp()).inputs, outputs=model.outputs)
    model.head = keras.layers.Dense(2)
    specs = (keras.KerasTensor((None, 6)), keras.KerasTensor((None, 3)))
    _private.build_from_loss(model, specs)
    assert model.head.built
    assert len(model.trainable_variables) == 6


def test_compiled_loss():
    model = mlp()
    model.compile("sgd", "mse")
    x, y = data(4)
    loss = float(model.train_on_batch(x, y))
    model.set_weights(mlp().get_weights())
    assert_close(loss, float(_private.compiled_loss(model)(y, model(x))))


def test_regularization_losses():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(2, kernel_regularizer="l2")(inputs))
    kernel = model.layers[1].kernel
    (found,) = _private.regularization_losses(model)
    np.testing.assert_allclose(found, 0.01 * (kernel.numpy() ** 2).sum(), rtol=1e-6)
    with keras.StatelessScope([(kernel, tf.ones((2, 2)))]):
        (found,) = _private.regularization_losses(model)
    np.testing.assert_allclose(found, 0.04, rtol=1e-6)


def test_compiled_losses():
    model = two_outputs()
    entries = _private.compiled_losses(model)
    assert [(tuple(e.path), e[2], e.name) for e in entries] == [
        (("down",), 1.0, "down"),
        (("other",), 2.0, "other"),
    ]
    assert all(isinstance(e.loss, keras.Loss) for e in entries)
    assert [e[1] for e in entries] == [e.loss for e in entries]
    plain = mlp()
    plain.compile("sgd")
    assert _private.compiled_losses(plain) == []


def test_loss_trackers():
    names = [m.name for m in _private.loss_trackers(two_outputs())]
    assert names == ["down_loss", "other_loss"]
    assert _private.loss_trackers(compiled()) == []
    plain = mlp()
    plain.compile("sgd")
    assert _private.loss_trackers(plain) == []


def test_replaced_losses():
    model = two_outputs()
    x, y = data(4)
    before = list(_private.compiled_losses(model))
    trackers = [float(m.result()) for m in _private.loss_trackers(model)]
    given = [lambda *args: tf.constant(1.0), lambda *args: tf.constant(10.0)]
    with _private.replaced_losses(model, given):
        value = model._compile_loss({"down": y, "other": y}, model(x))
    assert float(value) == 21.0
    assert _private.compiled_losses(model) == before
    assert [float(m.result()) for m in _private.loss_trackers(model)] == trackers


def test_replaced_losses_without_a_loss():
    model = mlp()
    model.compile("sgd")
    with _private.replaced_losses(model, []):
        pass


def test_build_from_specs():
    model = mlp()
    model.compile("sgd", "mse", metrics=["mae"])
    specs = (keras.KerasTensor((None, 6)), keras.KerasTensor((None, 3)), None)
    _private.build_from_specs(model, specs)
    assert len(_private.compiled_losses(model)) == 1
    assert model.optimizer.built
    assert _private.compiled_metrics(model).built


def test_loss_tracker():
    model = compiled()
    assert _private.loss_tracker(model).name == "loss"
    assert _private.loss_tracker(model) in model.metrics
    _private.loss_tracker(model).update_state(4.0, sample_weight=3)


def test_compiled_metrics():
    model = compiled(metrics=["mae"])
    container = _private.compiled_metrics(model)
    assert container in model.metrics
    assert len(container.variables) == 2
    assert _private.compiled_metrics(compiled()) is None


def metrics_twice() -> tuple[keras.Model, list[keras.metrics.Metric]]:
    model = compiled(metrics=["mae", "mse"], weighted_metrics=["mape"])
    return model, _private.compiled_metrics(model).metrics


def test_only_metrics():
    model, (first, second, weighted) = metrics_twice()
    container = _private.compiled_metrics(model)
    container.reset_state()
    x, y = data(4)
    with _private.only_metrics(container, {id(second), id(weighted)}):
        assert len(container.variables) == 4
        container.update_state(y, y + 1.0, sample_weight=np.ones(4))
    assert [float(metric.count) for metric in (first, second, weighted)] == [0, 4, 4]
    assert container.metrics == [first, second, weighted]
    assert [*container.result()] == ["mae", "mse", "mape"]


def test_replaced_metrics():
    model, metrics = metrics_twice()
    container = _private.compiled_metrics(model)
    entries = container._flat_metrics
    with _private.replaced_metrics(container, lambda entry: None):
        assert container.metrics == []
    assert container._flat_metrics is entries
    assert container.metrics == metrics


def test_metric_calls():
    model, metrics = metrics_twice()
    container = _private.compiled_metrics(model)
    before = [float(v) for v in container.variables]
    y, y_pred = tf.ones((4, 3)), tf.zeros((4, 3))
    calls = _private.metric_calls(container, y, y_pred, None)
    assert [metric for metric, _, _ in calls] == metrics
    assert all(a is y and b is y_pred for _, a, b in calls)
    assert [float(v) for v in container.variables] == before


def test_wrapped_function():
    cosine = _private.wrapped_function(keras.metrics.CosineSimilarity(axis=0))
    assert cosine(tf.ones((4, 3)), tf.ones((4, 3))).shape == (3,)
    assert _private.wrapped_function(keras.metrics.AUC()) is None


def test_tf_variable():
    variable = keras.Variable(np.ones(3), name="w")
    found = _private.tf_variable(variable)
    assert isinstance(found, tf.Variable)
    assert found is variable.value
    assert isinstance(found._unique_id, str)


def test_set_tf_variable():
    variable = keras.Variable(1.0)
    other = tf.Variable(2.0)
    _private.set_tf_variable(variable, other)
    assert variable.value is other


def test_is_view():
    variable = keras.Variable(1.0)
    assert not _private.is_view(variable)
    _private.set_tf_variable(variable, None)
    assert _private.is_view(variable)


def test_autocast():
    variable = keras.Variable(np.ones(2), dtype="float32")
    assert _private.autocast(variable, tf.ones(2)).dtype == tf.float32
    layer = keras.layers.Dense(1, dtype="mixed_bfloat16")
    layer.build((None, 2))
    seen = []
    layer.call = lambda inputs: seen.append(_private.autocast(layer.kernel, tf.ones(2))) or inputs
    layer(np.ones((1, 2), "float32"))
    assert seen[-1].dtype == tf.bfloat16


def test_as_stored():
    layer = keras.layers.Dense(1, dtype="mixed_bfloat16")
    layer.build((None, 2))
    seen = []

    def call(inputs):
        for scope in (contextlib.nullcontext(), _private.as_stored(), contextlib.nullcontext()):
            with scope:
                seen.append((layer.kernel.dtype, layer.kernel.value.dtype.name))
        return inputs

    layer.call = call
    layer(np.ones((1, 2), "float32"))
    half = ("bfloat16", "bfloat16")
    assert seen[-3:] == [half, ("float32", "float32"), half]


def test_rename():
    like = mlp().get_layer("up").kernel
    local = keras.Variable(1.0, name="local")
    _private.rename(local, like)
    assert (local.path, local.name) == (like.path, like.name) == ("up/kernel", "kernel")


def test_call_flat():
    captured, other = tf.constant(2.0), tf.constant(5.0)
    concrete = tf.function(lambda x: {"y": x * captured}).get_concrete_function(
        tf.TensorSpec((), tf.float32)
    )
    assert len(concrete.captured_inputs) == 1
    assert float(_private.call_flat(concrete, [tf.constant(3.0)], [other])["y"]) == 15.0


def test_model_strategy():
    assert _private.model_strategy(mlp()) is None
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        assert _private.model_strategy(mlp()) is strategy


def test_set_model_strategy():
    model = mlp()
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    _private.set_model_strategy(model, strategy)
    assert model.distribute_strategy is strategy
    _private.set_model_strategy(model, None)
    assert _private.model_strategy(model) is None


def test_compute_loss():
    """An old-fashioned `compute_loss`, without `training`, is called without it."""

    class Old(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return keras.ops.mean(sample_weight * keras.ops.sum(y - y_pred, axis=-1))

    model = Old(inputs=(model := mlp()).inputs, outputs=model.outputs)
    model.compile("sgd")
    x, y = data(4)
    weight = np.arange(4.0)
    found = _private.compute_loss(model, x, y, y + 1, weight, True)
    assert_close(float(found), -3 * weight.mean())


def test_run_after():
    with tf.Graph().as_default():
        first, second = tf.constant(1.0), tf.constant(2.0)
        _private.run_after(second.op, [first.op, second.op])
        assert list(second.op.control_inputs) == [first.op]


def test_run_independently():
    @tf.function
    def clocks(independent):
        times = [tf.timestamp(), tf.timestamp()]
        for time in times if independent else ():
            _private.run_independently(time.op)
        return times

    for independent, waits in ((False, True), (True, False)):
        graph = clocks.get_concrete_function(independent).graph
        second = [op for op in graph.get_operations() if op.type == "Timestamp"][1]
        assert bool(second.control_inputs) == waits
    _private.run_independently(None)


def test_write():
    variable = keras.Variable(np.zeros(2, np.float32))
    assert _private.write(variable, tf.ones(2)) is None
    np.testing.assert_array_equal(variable.numpy(), [1, 1])
    with tf.Graph().as_default():
        variable = keras.Variable(np.zeros(2, np.float32))
        assert _private.write(variable, tf.ones(2, tf.float64)).type == "AssignVariableOp"


def test_private_strategy():
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope() as strategy:
        mirrored = tf.Variable(1.0)
        with _private_strategy.plain_variables(), tf.device("cpu:1"):
            plain, wrapped = tf.Variable(1.0), keras.Variable(2.0)
    assert [v.numpy() for v in _private_strategy.copies(mirrored)] == [1.0, 1.0]
    assert _private_strategy.strategy_of(mirrored) is strategy
    for variable in (plain, wrapped.value):
        assert _private_strategy.copies(variable) == ()
        assert _private_strategy.strategy_of(variable) is None
        assert variable.device.endswith("CPU:1")


def test_unseeded_generator() -> None:
    keras.utils.clear_session(free_memory=False)
    assert _private.unseeded_generator() is None
    keras.random.normal((1,))
    state = _private.unseeded_generator()
    assert state is not None
    before = keras.ops.convert_to_numpy(state).copy()
    keras.random.normal((1,))
    assert not np.array_equal(before, keras.ops.convert_to_numpy(state))
