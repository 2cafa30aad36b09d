"""Every internal behind `kdist._compat.keras_optimizers` is there and does what is expected."""

from __future__ import annotations

from pathlib import Path

from kdist._compat import keras_optimizers, keras_trainer, mirrored_internals
from kdist.storage.row_views import rows_view

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import assert_close, data, mlp
from .private_checks import untested


def test_each_function_has_a_test():
    """So that what moves is named by what fails."""
    updates = Path(__file__).with_name("test_keras_updates.py")
    assert untested(keras_optimizers, __file__, updates) == []


def test_positions():
    optimizer = keras.optimizers.SGD(0.5)
    variables = [keras.Variable(1.0, name=name) for name in "ab"]
    optimizer.build(variables)
    assert keras_optimizers.positions(optimizer, variables[::-1]) == [1, 0]
    with pytest.raises(ValueError, match=r"built for other variables.*\['c'\]"):
        keras_optimizers.positions(optimizer, [keras.Variable(1.0, name="c")])


def test_carry_decay_rules():
    optimizer = keras.optimizers.AdamW(weight_decay=0.5)
    bias = keras.Variable(1.0, name="bias")
    optimizer.exclude_from_weight_decay([bias], ["gamma"])
    config = optimizer.get_config()
    assert keras.optimizers.AdamW.from_config(config)._use_weight_decay(bias), "configs carry it"
    copy = keras.optimizers.AdamW.from_config(config)
    keras_optimizers.carry_decay_rules(copy, optimizer)
    gamma, kernel = (keras.Variable(1.0, name=name) for name in ("gamma", "kernel"))
    assert [copy._use_weight_decay(one) for one in (bias, gamma, kernel)] == [False, False, True]


def test_steps_through():
    optimizer = keras.optimizers.SGD(0.5)
    variables = [keras.Variable(1.0), keras.Variable(2.0)]
    optimizer.build(variables)
    seen = []

    def step(own, gradient, variable, rate):
        seen.append(keras_optimizers.index_of(optimizer, variable))
        own(2 * gradient, variable, rate)

    with keras_optimizers.steps_through(optimizer, step):
        optimizer.apply([tf.constant(1.0)] * 2, variables)
    optimizer.apply([tf.constant(1.0)] * 2, variables)
    assert seen == [0, 1]
    assert [float(v) for v in variables] == [-0.5, 0.5]


def test_index_of():
    variables = [keras.Variable(0.0), keras.Variable(0.0)]
    optimizer = keras.optimizers.SGD()
    optimizer.build(variables)
    assert keras_optimizers.index_of(optimizer, variables[1]) == 1
    assert keras_optimizers.index_of(optimizer, variables[1].value) == 1


def test_handle():
    variable = keras.Variable(1.0)
    graph = tf.function(lambda: variable.assign(2.0)).get_concrete_function()
    assert graph.captured_inputs[0] is keras_optimizers.handle(variable)


def test_iterations_variable():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    variable = keras.Variable(1.0)
    optimizer.build([variable])
    for step in range(1, 4):
        optimizer.apply([tf.constant(1.0)], [variable])
        assert int(keras_optimizers.iterations_variable(optimizer)) == step
        assert int(optimizer.iterations) == step // 2


def test_accumulator():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    variables = [keras.Variable(1.0), keras.Variable(1.0)]
    optimizer.build(variables)
    optimizer.apply([tf.constant(3.0), tf.constant(4.0)], variables)
    assert [float(keras_optimizers.accumulator(optimizer, v)) for v in variables] == [3.0, 4.0]
    assert keras_optimizers.accumulator(keras.optimizers.SGD(), variables[0]) is None


def test_exclude_from_decay():
    a, b, c = (keras.Variable(np.ones(2), name=name) for name in "abc")
    optimizer = keras.optimizers.SGD(0.1, weight_decay=1.0)
    optimizer.exclude_from_weight_decay(var_names=["c"])
    assert keras_optimizers.decays(optimizer, a)  # which Keras remembers
    keras_optimizers.exclude_from_decay(optimizer, [a, b])
    optimizer.build([a, b, c])
    optimizer.apply([tf.zeros(2)] * 3, [a, b, c])
    assert_close([np.ones(2), np.ones(2)], [a, b])
    np.testing.assert_allclose(c.numpy(), [0.9, 0.9], rtol=1e-6)


def test_variable_key():
    optimizer = keras.optimizers.SGD()
    a, b = keras.Variable(1.0), keras.Variable(1.0)
    assert keras_optimizers.variable_key(optimizer, a) == keras_optimizers.variable_key(
        optimizer, a
    )
    assert keras_optimizers.variable_key(optimizer, a) != keras_optimizers.variable_key(
        optimizer, b
    )


def test_built_without_values(monkeypatch):
    variable, optimizer = keras.Variable(np.ones((2, 3))), keras.optimizers.Adam()
    object.__setattr__(variable, keras_trainer.KEY, "known")
    reads = []
    value = type(variable).value
    with keras_optimizers.built_without_values():
        monkeypatch.setattr(
            keras.Variable, "value", property(lambda self: reads.append(self) or value.fget(self))
        )
        optimizer.build([variable])
        assert not any(one is variable for one in reads)
        assert list(optimizer._trainable_variables_indices) == ["known"]
    plain = keras.optimizers.Adam()
    plain.build([variable])
    assert any(one is variable for one in reads)
    assert [tuple(v.shape) for v in optimizer.variables] == [
        tuple(v.shape) for v in plain.variables
    ]


def test_set_optimizer_strategy():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        optimizer = keras.optimizers.SGD()
    assert optimizer._distribution_strategy is not None
    keras_optimizers.set_optimizer_strategy(optimizer, None)
    assert optimizer._distribution_strategy is None


@pytest.mark.parametrize("built", [False, True])
def test_member_optimizer(built):
    members = {"kernel": keras.optimizers.SGD(), "bias": keras.optimizers.Adam()}
    optimizer = keras.optimizers.MultiOptimizer(lambda v: members[v.name])
    model = mlp()
    if built:
        optimizer.build(model.trainable_variables)
    for variable in model.trainable_variables:
        assert keras_optimizers.member_optimizer(optimizer, variable) is members[variable.name]


def test_build_scope():
    """Slot paths are those of a model that Keras has trained."""
    expected = compiled_adam(train=True)
    model = compiled_adam(train=False)
    with keras_optimizers.build_scope(model.optimizer):
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
    keras_optimizers.swap_keras_variables(callback)
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
        keras_optimizers.update_through_keras_variables(optimizer, scatter)
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
    keras_optimizers.update_through_keras_variables(ours, lambda *_: False)
    for optimizer, variable in ((ours, view), (keras_s, plain)):
        optimizer.build([variable])
        for _ in range(2):
            optimizer.apply([tf.constant([1.0, -2.0, 3.0, 0.0])], [variable])
    np.testing.assert_allclose(local.numpy(), plain.numpy(), rtol=1e-6)
    assert type(ours).__name__ == "Nadam" and isinstance(ours, keras.optimizers.Nadam)


def test__update_each():
    """What is no view is updated as Keras hands it over, and waits for no gradient but its own."""

    class Own(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            assert isinstance(variable, tf.Variable) and variable.shape.as_list() == [3]
            variable.assign_sub(tf.cast(learning_rate, variable.dtype) * gradient)

    optimizer = Own(0.5)
    variables = [keras.Variable(np.ones((3,)), dtype="float32") for _ in range(2)]
    keras_optimizers.update_through_keras_variables(optimizer, lambda *_: False)
    optimizer.build(variables)

    @tf.function
    def update(gradients):
        optimizer.apply(gradients, variables)

    graph = update.get_concrete_function([tf.ones(3), tf.ones(3)]).graph
    assert "IdentityN" not in {op.type for op in graph.get_operations()}
    update([tf.ones(3), 2 * tf.ones(3)])
    assert [one.numpy().tolist() for one in variables] == [[0.5] * 3, [0.0] * 3]


def test_attributes_of_keras():
    class Own(keras.optimizers.Nadam):
        def __init__(self, **more):
            super().__init__(0.1, **more)
            self._gain, self.rate = 2.0, tf.Variable(1.0)

        def build(self, variables):
            super().build(variables)
            self.seen = self.add_variable((), name="seen")

    own = Own()
    own.exclude_from_weight_decay(var_names=["b"])
    own.build([keras.Variable(1.0)])
    left = set(vars(own)) - keras_optimizers.attributes_of_keras(own)
    assert left == {"_gain", "rate", "seen"}


def test_attributes_of_keras_in_the_scope_of_a_strategy():
    """The first look at a class may be there, while variables are made plain ones."""
    keras_optimizers._attributes.cache_clear()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope(), mirrored_internals.plain_variables():
        found = keras_optimizers.attributes_of_keras(keras.optimizers.Lamb())
    assert {"_momentums", "_velocities", "_learning_rate"} <= found


def test_own_class():
    optimizer = keras.optimizers.Nadam()
    assert keras_optimizers.own_class(optimizer) is keras.optimizers.Nadam
    keras_optimizers.update_through_keras_variables(
        optimizer, lambda variable, method, slices: False
    )
    assert type(optimizer) is not keras.optimizers.Nadam
    assert keras_optimizers.own_class(optimizer) is keras.optimizers.Nadam


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

    keras_optimizers.route_assignments(optimizer, write)
    gradients = [tf.ones_like(v) for v in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    assert seen == ["assign_add", "assign_add", "assign_sub"] * len(gradients)
    twin = mlp()
    plain.build(twin.trainable_variables)
    plain.apply(gradients, twin.trainable_variables)
    assert_close(plain.variables, optimizer.variables)
    assert_close(twin.get_weights(), model.get_weights())


def test_keep_one_copy():
    """Keras asks the strategy in scope to colocate a slot, which fails for a plain variable."""
    plain = keras.Variable(np.zeros(2, np.float32))
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        optimizer = keras.optimizers.SGD(momentum=0.9)
        with pytest.raises(ValueError, match="colocate_vars_with"):
            optimizer.build([plain])
        keras_optimizers.keep_one_copy(optimizer)
        optimizer.build([plain])


def test_families():
    model = mlp()
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    count = len(model.trainable_variables)
    found = keras_optimizers.families(optimizer)
    assert set(found) == {"_momentums", "_velocities"}
    assert all(len(slots) == count for slots in found.values())


def test_scalars():
    optimizer = keras.optimizers.Nadam()
    optimizer.build(mlp().trainable_variables)
    assert {"_iterations", "_u_product"} <= set(keras_optimizers.scalars(optimizer))
    assert "_learning_rate" not in keras_optimizers.scalars(optimizer)


def test_updated_by() -> None:
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    optimizer.build(layer.trainable_variables)
    found = keras_optimizers.updated_by(optimizer)
    assert [*map(id, found)] == [*map(id, layer.trainable_variables)]
