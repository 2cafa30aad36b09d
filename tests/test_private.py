"""Every Keras internal that kdist needs exists and does what kdist takes it to do.

When Keras moves one, the test that fails is named after the function of `kdist._private` to mend.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from kdist import _private, _private_strategy
from kdist.variables import rows_view

import keras
import numpy as np
import pytest
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


def test_each_function_has_a_test():
    """`test_<function>` for each function, so that what moves is named by what fails."""
    source = Path(__file__).read_text()
    functions = [
        name
        for name, value in vars(_private).items()
        if inspect.isfunction(value) and value.__module__ == _private.__name__
    ]
    assert len(functions) > 20
    assert [name for name in functions if f"def test_{name}(" not in source] == []


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


def test_override_losses():
    model = mlp()
    with _private.override_losses(model, [tf.constant(7.0)]):
        assert [float(v) for v in model.losses] == [7.0]
    assert model.losses == []


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


def test_rename():
    like = mlp().get_layer("up").kernel
    local = keras.Variable(1.0, name="local")
    _private.rename(local, like)
    assert (local.path, local.name) == (like.path, like.name) == ("up/kernel", "kernel")


def test_adopt_learning_rate():
    source, reader = keras.optimizers.SGD(0.5), keras.optimizers.SGD(0.1)
    _private.adopt_learning_rate(reader, source)
    source.learning_rate = 0.25
    assert float(reader.learning_rate) == 0.25
    schedule = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    _private.adopt_learning_rate(reader, keras.optimizers.SGD(schedule))
    assert float(reader.learning_rate) == 1.0


def test_fixed_learning_rate():
    optimizer = keras.optimizers.SGD(0.5)
    variable = keras.Variable(1.0)
    optimizer.build([variable])
    own = optimizer._learning_rate
    with _private.fixed_learning_rate(optimizer):
        own.assign(100.0)
        assert float(optimizer.learning_rate) == 0.5
        optimizer.apply([tf.constant(1.0)], [variable])
    assert float(variable) == 0.5
    assert optimizer._learning_rate is own
    assert float(optimizer.learning_rate) == 100.0


def test_fixed_learning_rate_leaves_a_schedule_alone():
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5))
    schedule = optimizer._learning_rate
    with _private.fixed_learning_rate(optimizer):
        assert optimizer._learning_rate is schedule


def test_iterations_variable():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    variable = keras.Variable(1.0)
    optimizer.build([variable])
    for step in range(1, 4):
        optimizer.apply([tf.constant(1.0)], [variable])
        assert int(_private.iterations_variable(optimizer)) == step
        assert int(optimizer.iterations) == step // 2


def test_accumulator():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    variables = [keras.Variable(1.0), keras.Variable(1.0)]
    optimizer.build(variables)
    optimizer.apply([tf.constant(3.0), tf.constant(4.0)], variables)
    assert [float(_private.accumulator(optimizer, v)) for v in variables] == [3.0, 4.0]
    assert _private.accumulator(keras.optimizers.SGD(), variables[0]) is None


def excluding() -> tuple:
    a, b = keras.Variable(np.ones(2), name="kernel"), keras.Variable(np.ones(2), name="bias")
    optimizer = keras.optimizers.SGD(0.1, weight_decay=1.0)
    optimizer.exclude_from_weight_decay(var_list=[a], var_names=["bias"])
    return optimizer, a, b


def test_weight_decay_rules():
    optimizer, a, _ = excluding()
    keys, pattern = _private.weight_decay_rules(optimizer)
    assert keys == {_private.variable_key(optimizer, a)}
    assert pattern.search("x/bias")
    none, no_pattern = _private.weight_decay_rules(keras.optimizers.SGD())
    assert (set(none), no_pattern) == (set(), None)


def test_set_weight_decay_rules():
    source, a, b = excluding()
    c = keras.Variable(np.ones(2), name="other")
    optimizer = keras.optimizers.SGD(0.1, weight_decay=1.0)
    _private.set_weight_decay_rules(optimizer, *_private.weight_decay_rules(source))
    optimizer.build([a, b, c])
    optimizer.apply([tf.zeros(2)] * 3, [a, b, c])
    assert_close([np.ones(2), np.ones(2)], [a, b])
    np.testing.assert_allclose(c.numpy(), [0.9, 0.9], rtol=1e-6)


def test_variable_key():
    optimizer = keras.optimizers.SGD()
    a, b = keras.Variable(1.0), keras.Variable(1.0)
    assert _private.variable_key(optimizer, a) == _private.variable_key(optimizer, a)
    assert _private.variable_key(optimizer, a) != _private.variable_key(optimizer, b)


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


def test_set_optimizer_strategy():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        optimizer = keras.optimizers.SGD()
    assert optimizer._distribution_strategy is not None
    _private.set_optimizer_strategy(optimizer, None)
    assert optimizer._distribution_strategy is None


@pytest.mark.parametrize("built", [False, True])
def test_member_optimizer(built):
    members = {"kernel": keras.optimizers.SGD(), "bias": keras.optimizers.Adam()}
    optimizer = keras.optimizers.MultiOptimizer(lambda v: members[v.name])
    model = mlp()
    if built:
        optimizer.build(model.trainable_variables)
    for variable in model.trainable_variables:
        assert _private.member_optimizer(optimizer, variable) is members[variable.name]


def test_build_scope():
    """Slot paths are those of a model that Keras has trained."""
    expected = compiled_adam(train=True)
    model = compiled_adam(train=False)
    with _private.build_scope(model.optimizer):
        model.optimizer.build(model.trainable_variables)
    assert [v.path for v in model.optimizer.variables] == [
        v.path for v in expected.optimizer.variables
    ]


def compiled_adam(train: bool) -> keras.Model:
    model = mlp()
    model.compile(keras.optimizers.Adam(name="adam"), "mse")
    if train:
        model.train_on_batch(*data(4))
    return model


def test_swap_keras_variables():
    """The callback then swaps with `keras.Variable.assign` alone."""
    callback = keras.callbacks.SwapEMAWeights()
    _private.swap_keras_variables(callback)
    model = mlp()
    optimizer = keras.optimizers.SGD(use_ema=True)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    weights = [v.numpy() for v in model.trainable_variables]
    averages = [v.numpy() + 1 for v in optimizer._model_variables_moving_average]
    for variable, value in zip(optimizer._model_variables_moving_average, averages):
        variable.assign(value)
    callback.set_model(model)
    callback._swap_variables()
    assert_close(averages, model.trainable_variables)
    assert_close(weights, optimizer._model_variables_moving_average)
    callback._finalize_ema_values()
    assert_close(averages, optimizer._model_variables_moving_average)


def test_update_through_keras_variables():
    local = keras.Variable(np.zeros((4, 2)), dtype="float32", name="kernel")
    view = rows_view(local, local, (slice(2, 4),))
    rows = []

    def scatter(variable, method, slices):
        rows.append(method)
        return False

    for optimizer in (
        keras.optimizers.AdamW(0.1, weight_decay=0.1, gradient_accumulation_steps=2),
        keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=1),
    ):
        _private.update_through_keras_variables(optimizer, scatter)
        optimizer.build([view])
        optimizer.apply([tf.ones((2, 2))], [view])
    assert (local.numpy()[:2] == 0).all()
    assert (local.numpy()[2:] < 0).all()
    optimizer.apply([tf.IndexedSlices(tf.ones((1, 2)), [0], [2, 2])], [view])
    assert "scatter_sub" in rows


def test__without_strategies():
    """Nadam's own part of the update stays: without it, it divides by zero."""
    plain, local = (keras.Variable(np.ones((4,)), dtype="float32") for _ in range(2))
    view = rows_view(local, local, (slice(0, 4),))
    ours, keras_s = keras.optimizers.Nadam(0.1), keras.optimizers.Nadam(0.1)
    _private.update_through_keras_variables(ours, lambda *_: False)
    for optimizer, variable in ((ours, view), (keras_s, plain)):
        optimizer.build([variable])
        for _ in range(2):
            optimizer.apply([tf.constant([1.0, -2.0, 3.0, 0.0])], [variable])
    np.testing.assert_allclose(local.numpy(), plain.numpy(), rtol=1e-6)
    assert type(ours).__name__ == "Nadam" and isinstance(ours, keras.optimizers.Nadam)


def test_own_class():
    optimizer = keras.optimizers.Nadam()
    assert _private.own_class(optimizer) is keras.optimizers.Nadam
    _private.update_through_keras_variables(optimizer, lambda variable, method, slices: False)
    assert type(optimizer) is not keras.optimizers.Nadam
    assert _private.own_class(optimizer) is keras.optimizers.Nadam


def test_functional_of():
    model = mlp()
    assert _private.functional_of(model) is model
    layers = [keras.Input((2,)), keras.layers.Dense(1)]
    built = _private.functional_of(keras.Sequential(layers))
    assert [t.shape for t in built.inputs] == [(None, 2)]
    assert _private.functional_of(keras.Sequential([keras.layers.Dense(1)])) is None
    assert _private.functional_of(keras.layers.Dense(1)) is None

    class Own(keras.Model):
        def call(self, inputs):
            return super().call(inputs)

    assert _private.functional_of(Own(model.inputs, model.outputs)) is None


def test_nodes_in_order():
    model = mlp()
    nodes = _private.nodes_in_order(model)
    assert [node.operation for node in nodes] == model.layers[1:]
    up, down = nodes
    assert up.arguments.args[0] is up.arguments.keras_tensors[0] is model.inputs[0]
    assert down.arguments.keras_tensors[0] is up.outputs[0]
    assert down.arguments.kwargs == {}
    args, kwargs = up.arguments.fill_in({id(model.inputs[0]): 3})
    assert (args, kwargs) == ((3,), {})


def test_route_assignments():
    """Slots and parameters are written by these three methods, and by nothing else."""
    model = mlp()
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    plain = keras.optimizers.Adam()
    mine = optimizer._momentums[0]
    seen = []

    def write(name: str, variable: object, value: object) -> bool:
        seen.append(name)
        if variable is mine:
            getattr(mine, name)(value)
        return variable is mine

    _private.route_assignments(optimizer, write)
    gradients = [tf.ones_like(v) for v in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    assert seen == ["assign_add", "assign_add", "assign_sub"] * len(gradients)
    twin = mlp()
    plain.build(twin.trainable_variables)
    plain.apply(gradients, twin.trainable_variables)
    assert_close(plain.variables, optimizer.variables)
    assert_close(twin.get_weights(), model.get_weights())


def test_flat_layers():
    inner = mlp()
    outer = keras.Sequential([inner, keras.layers.Dense(2, name="last")])
    found = _private.flat_layers(outer)
    assert found[0] is outer
    assert {layer.name for layer in found[1:]} >= {"mlp", "up", "down", "last"}


def test_calls_of():
    shared = keras.layers.Dense(3)
    first, second = keras.Input((3,)), keras.Input((3,))
    outputs = [shared(first), shared(second)]
    calls = _private.calls_of(shared)
    assert [call.arguments.keras_tensors for call in calls] == [[first], [second]]
    assert [call.outputs for call in calls] == [[output] for output in outputs]


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


def test_pack_outputs():
    model = two_outputs()
    found = _private.pack_outputs(model, [1, 2])
    assert found == dict(zip(model.output_names, [1, 2]))


def test_interpreted():
    model = mlp()
    x = data(4)[0]
    expected = model(x)
    with _private.interpreted(model, lambda functional, inputs, operation_fn: inputs[0] * 2):
        assert_close(model(x), 2 * x.astype("float32"))
    assert_close(model(x), expected)


def test_run_after():
    with tf.Graph().as_default():
        first, second = tf.constant(1.0), tf.constant(2.0)
        _private.run_after(second.op, [first.op, second.op])
        assert list(second.op.control_inputs) == [first.op]


def test_decays():
    kernel, bias = keras.Variable(np.ones((2, 2)), name="kernel"), keras.Variable(1.0, name="bias")
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build([kernel, bias])
    assert _private.decays(optimizer, kernel)
    assert not _private.decays(optimizer, bias)


def test_flat_inputs():
    model = two_inputs()
    x = {"b": tf.ones((2, 1)), "a": tf.zeros((2,))}
    first, second = _private.flat_inputs(model, x)
    assert np.ptp(first) == 0 == first[0, 0] and first.shape == (2, 1)  # as the model expects
    assert second[0, 0] == 1


def two_inputs():
    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    return keras.Model({"a": a, "b": b}, keras.layers.Add()([a, b]))


def test_as_model_call():
    class Part(keras.layers.Layer):
        def call(self, inputs):
            return inputs

    part = Part(dtype="float32")
    with _private.as_model_call(part):
        assert part([tf.ones(2, tf.float64)])[0].dtype == tf.float64
    assert part([tf.ones(2, tf.float64)])[0].dtype == tf.float32


def test_takes_training():
    assert _private.takes_training(keras.layers.Dropout(0.5))
    assert not _private.takes_training(keras.layers.Flatten())
    (node,) = _private.nodes_in_order(keras.Model(x := keras.Input((1,)), x * 2))
    assert not _private.takes_training(node.operation)


def test_model_outputs():
    model = two_outputs()
    assert _private.model_outputs(model, [1, 2]) == dict(zip(model.output_names, [1, 2]))
    x = keras.Input((1,))
    assert _private.model_outputs(keras.Model(x, [x * 2]), [3]) == 3


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


def test_keep_one_copy():
    """Keras asks the strategy in scope to colocate a slot, which fails for a plain variable."""
    plain = keras.Variable(np.zeros(2, np.float32))
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        optimizer = keras.optimizers.SGD(momentum=0.9)
        with pytest.raises(ValueError, match="colocate_vars_with"):
            optimizer.build([plain])
        _private.keep_one_copy(optimizer)
        optimizer.build([plain])


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
