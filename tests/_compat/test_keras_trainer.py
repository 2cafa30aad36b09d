"""Every Keras internal that kdist needs exists and does what kdist takes it to do.

When Keras moves one, the test that fails is named after the function of
`kdist._compat.keras_trainer` to mend. Those of losses and metrics are in a file of their own.
"""

from __future__ import annotations

from pathlib import Path

from kdist._compat import keras_trainer, mirrored_internals

import keras
import numpy as np
import tensorflow as tf

from ..parity import mlp
from .private_checks import untested


def test_each_function_has_a_test():
    """So that what moves is named by what fails."""
    losses = Path(__file__).with_name("test_keras_losses.py")
    assert untested(keras_trainer, __file__, losses) == []


def test_exported_names():
    assert all(hasattr(keras_trainer, name) for name in keras_trainer.__all__)
    assert issubclass(keras.Model, keras_trainer.TensorFlowTrainer)
    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        assert name in vars(keras_trainer.TensorFlowTrainer)


def test_running_scope():
    assert keras_trainer.running_scope() is None
    with keras.StatelessScope() as scope:
        assert keras_trainer.running_scope() is scope
    assert keras_trainer.running_scope() is None


def test_inferring():
    assert not keras_trainer.inferring()
    seen = []

    @tf.function
    def traced():
        seen.append(keras_trainer.inferring())
        with keras.StatelessScope():
            seen.append(keras_trainer.inferring())

    with keras.StatelessScope():
        assert not keras_trainer.inferring()
    traced()
    assert seen == [False, True]


def test_at_once():
    made = []

    @tf.function
    def traced():
        with keras.StatelessScope() as scope:
            with keras_trainer.at_once():
                if not made:  # tf.function traces twice what makes variables
                    made.append(keras.Variable(np.ones(2)))
                made[0].assign(np.zeros(2))
            assert keras_trainer.running_scope() is scope

    traced()
    assert made[0].numpy().tolist() == [0, 0]


def test_get_mask():
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(np.array([[0, 1]]))
    assert np.asarray(keras_trainer.get_mask(embedded)).tolist() == [[False, True]]
    assert keras_trainer.get_mask(tf.ones(2)) is None


def test_set_mask():
    tensor, mask = tf.ones((1, 2)), tf.constant([[True, False]])
    keras_trainer.set_mask(tensor, mask)
    assert keras_trainer.get_mask(tensor) is mask
    loss = keras.losses.MeanAbsoluteError()(tf.constant([[1.0], [9.0]])[None, :, 0:1], masked())
    assert float(loss) == 1.0


def masked() -> tf.Tensor:
    tensor = tf.zeros((1, 2, 1))
    keras_trainer.set_mask(tensor, tf.constant([[True, False]]))
    return tensor


def test_apply_mask():
    merged = keras_trainer.apply_mask(
        tf.constant([2.0, 3.0]), tf.constant([True, False]), dtype="float32", reduction="sum"
    )
    assert np.asarray(merged).tolist() == [2.0, 0.0]


def test_squeeze_or_expand_to_same_rank():
    a, b = keras_trainer.squeeze_or_expand_to_same_rank(tf.ones((3, 1)), tf.ones(3))
    assert a.shape == b.shape


def test_current_value():
    variable = keras.Variable(1.0)
    assert keras_trainer.current_value(variable) is None
    with keras.StatelessScope([(variable, tf.constant(2.0))]):
        assert float(keras_trainer.current_value(variable)) == 2.0
        variable.assign(3.0)
        assert float(keras_trainer.current_value(variable)) == 3.0
    assert float(variable.value) == 1.0


def test_tf_variable():
    variable = keras.Variable(np.ones(3), name="w")
    found = keras_trainer.tf_variable(variable)
    assert isinstance(found, tf.Variable)
    assert found is variable.value
    assert isinstance(found._unique_id, str)


def test_set_tf_variable():
    variable = keras.Variable(1.0)
    other = tf.Variable(2.0)
    keras_trainer.set_tf_variable(variable, other)
    assert variable.value is other


def test_is_view():
    variable = keras.Variable(1.0)
    assert not keras_trainer.is_view(variable)
    keras_trainer.set_tf_variable(variable, None)
    assert keras_trainer.is_view(variable)


def test_autocast():
    variable = keras.Variable(np.ones(2), dtype="float32")
    assert keras_trainer.autocast(variable, tf.ones(2)).dtype == tf.float32
    layer = keras.layers.Dense(1, dtype="mixed_bfloat16")
    layer.build((None, 2))
    seen = []
    layer.call = lambda inputs: (
        seen.append(keras_trainer.autocast(layer.kernel, tf.ones(2))) or inputs
    )
    layer(np.ones((1, 2), "float32"))
    assert seen[-1].dtype == tf.bfloat16


def test_rename():
    like = mlp().get_layer("up").kernel
    local = keras.Variable(1.0, name="local")
    keras_trainer.rename(local, like)
    assert (local.path, local.name) == (like.path, like.name) == ("up/kernel", "kernel")
    assert local.value.name == like.value.name == "up/kernel:0"


def test_call_flat():
    captured, other = tf.constant(2.0), tf.constant(5.0)
    concrete = tf.function(lambda x: {"y": x * captured}).get_concrete_function(
        tf.TensorSpec((), tf.float32)
    )
    assert len(concrete.captured_inputs) == 1
    assert float(keras_trainer.call_flat(concrete, [tf.constant(3.0)], [other])["y"]) == 15.0


def test_model_strategy():
    assert keras_trainer.model_strategy(mlp()) is None
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        assert keras_trainer.model_strategy(mlp()) is strategy


def test_set_model_strategy():
    model = mlp()
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    keras_trainer.set_model_strategy(model, strategy)
    assert model.distribute_strategy is strategy
    keras_trainer.set_model_strategy(model, None)
    assert keras_trainer.model_strategy(model) is None


def test_run_after():
    with tf.Graph().as_default():
        first, second = tf.constant(1.0), tf.constant(2.0)
        keras_trainer.run_after(second.op, [first.op, second.op])
        assert list(second.op.control_inputs) == [first.op]


def test_run_independently():
    @tf.function
    def clocks(independent):
        times = [tf.timestamp(), tf.timestamp()]
        for time in times if independent else ():
            keras_trainer.run_independently(time.op)
        return times

    for independent, waits in ((False, True), (True, False)):
        graph = clocks.get_concrete_function(independent).graph
        second = [op for op in graph.get_operations() if op.type == "Timestamp"][1]
        assert bool(second.control_inputs) == waits
    keras_trainer.run_independently(None)


def test_runs_independently():
    @tf.function
    def clocks():
        times = [tf.timestamp(), tf.timestamp()]
        keras_trainer.run_independently(times[1].op)
        assert [keras_trainer.runs_independently(t.op) for t in times] == [False, True]
        return times

    clocks()


def test_write():
    variable = keras.Variable(np.zeros(2, np.float32))
    assert keras_trainer.write(variable, tf.ones(2)) is None
    np.testing.assert_array_equal(variable.numpy(), [1, 1])
    with tf.Graph().as_default():
        variable = keras.Variable(np.zeros(2, np.float32))
        assert keras_trainer.write(variable, tf.ones(2, tf.float64)).type == "AssignVariableOp"


def test_write_rows():
    variable = keras.Variable(np.zeros((3, 2)), dtype="float32")
    values = np.array([[1.0, 2.0]])
    assert keras_trainer.write_rows(variable, tf.constant([2]), values) is None
    np.testing.assert_array_equal(variable.numpy(), [[0, 0], [0, 0], [1, 2]])
    with tf.Graph().as_default():
        variable = keras.Variable(np.zeros((3, 2)), dtype="float32")
        op = keras_trainer.write_rows(variable, tf.constant([2]), values)
        assert op.type == "ResourceScatterUpdate"


def test_private_strategy():
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope() as strategy:
        mirrored = tf.Variable(1.0)
        with mirrored_internals.plain_variables(), tf.device("cpu:1"):
            plain, wrapped = tf.Variable(1.0), keras.Variable(2.0)
    assert [v.numpy() for v in mirrored_internals.copies(mirrored)] == [1.0, 1.0]
    assert mirrored_internals.strategy_of(mirrored) is strategy
    for variable in (plain, wrapped.value):
        assert mirrored_internals.copies(variable) == ()
        assert mirrored_internals.strategy_of(variable) is None
        assert variable.device.endswith("CPU:1")


def test_is_stateless() -> None:
    assert not keras_trainer.is_stateless()
    with keras.StatelessScope():
        assert keras_trainer.is_stateless()
    assert not keras_trainer.is_stateless()


def test_class_weighted():
    labels = np.array([[0.0], [2.0], [1.0], [0.0]])
    dataset = tf.data.Dataset.from_tensor_slices((labels, labels)).batch(3)
    batches = list(keras_trainer.class_weighted(dataset, {0: 0.5, 2: 3.0}))
    assert [weights.numpy().tolist() for *_, weights in batches] == [[0.5, 3.0, 1.0], [0.5]]


def test_weights_of_classes():
    labels = np.array([[0.0], [2.0], [1.0], [0.0]])
    made = keras_trainer.weights_of_classes(labels, {0: 0.5, 2: 3.0})
    assert made.tolist() == [0.5, 3.0, 1.0, 0.5]


def test_call_context():
    found = []

    class Inner(keras.layers.Layer):
        def call(self, x):
            found.append(keras_trainer.call_context())
            return x

    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def call(self, x, training=None):
            return self.inner(x)

    outer, inner = Outer(), Inner()
    for layer in (outer, outer.inner, inner):
        layer.build((1, 1))
    outer(np.ones((1, 1)), training=True)
    inner(np.ones((1, 1)))
    assert [dict(one).get("training") for one in found] == [True, None]
    assert keras_trainer.call_context() == ()


def test_function_of():
    model, taken = mlp(), []
    model.compile("sgd", "mse", steps_per_execution=2)

    def step(batch):
        taken.append(batch.dtype)
        return tf.cast(batch, "float32")

    function = keras_trainer.function_of(model, step)
    batches = iter(tf.data.Dataset.range(4))
    assert [float(function(batches)) for _ in range(2)] == [1.0, 3.0]
    assert set(taken) == {tf.int64}
