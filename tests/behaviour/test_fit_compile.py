"""What is said to `compile`, before, between and after training, means what it means in Keras."""

from __future__ import annotations

import kdist

import keras
import numpy as np
import pytest

from ..parity import (
    MESHES,
    assert_close,
    assert_same_history,
    assert_same_weights,
    compile_all,
    config,
    data,
    everywhere,
    fit_all,
    mlp,
    pair,
)

pytestmark = pytest.mark.usefixtures("float64")
DATA = MESHES[0]


def test_run_eagerly():
    models = everywhere()
    compile_all(models, run_eagerly=True)
    fit_all(models, batch_size=8)
    x, y = data(10)
    assert_close(*[m.evaluate(x, y, batch_size=4, verbose=0) for m in models])
    assert_close(*[m.predict(x, batch_size=4, verbose=0) for m in models])


@pytest.mark.parametrize("weighted", [False, True])
def test_run_eagerly_on_a_batch_of_arrays(weighted: bool) -> None:
    models = everywhere()
    compile_all(models, run_eagerly=True, metrics=["mae"], weighted_metrics=["mse"])
    x, y = data(10)
    weights = np.linspace(0.1, 2.0, 10) if weighted else None
    for _ in range(2):
        assert_close(*[np.array(m.train_on_batch(x, y, weights)) for m in models])
    assert_close(*[np.array(m.test_on_batch(x, y, weights)) for m in models])
    assert_close(*[m.predict_on_batch(x) for m in models])
    assert_close(*[m.get_weights() for m in models])


def test_jit_compile_on_a_data_mesh():
    models = pair(DATA)
    compile_all(models, jit_compile=True)
    fit_all(models, batch_size=8, epochs=2)
    assert_close(*[m.predict(data(10)[0], verbose=0) for m in models])


def test_jit_compile_of_a_loop_on_a_data_mesh():
    """What its forward pass hands on cannot leave what XLA compiles, which stays whole."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        steps = keras.layers.Reshape((3, 2))(keras.layers.Dense(6, name="up")(inputs))
        return keras.Model(
            inputs, keras.layers.Dense(3, name="down")(keras.layers.LSTM(4, name="rnn")(steps))
        )

    models = pair({"data": 2}, build)
    compile_all(models, jit_compile=True)
    fit_all(models, batch_size=8)


@pytest.mark.parametrize("level", [0, 1])
def test_weight_decay_excludes_by_the_name_of_a_layer(level):
    """As for BERT: `var_names=["norm", "bias"]`; Keras searches in names such as "up/kernel:0"."""
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0)
    models = pair(DATA, optimizer=optimizer)

    def decaying() -> keras.optimizers.Optimizer:
        made = keras.optimizers.SGD(1.0, weight_decay=0.5)
        made.exclude_from_weight_decay(var_names=["up", "down/bias"])
        return made

    compile_all(models, optimizer=decaying)
    fit_all(models, batch_size=8)


def test_averages_move_on_where_no_gradient_arrives():
    """With eight devices, some have nothing to update but a layer that the loss leaves out."""

    class Left(keras.layers.Layer):
        def build(self, shape):
            self.left = self.add_weight(shape=(4, 4), initializer="ones", name="left")

        def call(self, x):
            return x

    def build() -> keras.Model:
        model = mlp()
        return keras.Model(model.inputs, Left(name="left")(model.outputs[0]))

    optimizer = kdist.OptimizerConfig(level=1, threshold_kb=0, partition="parameter")
    models = pair({"data": 8}, build, optimizer=optimizer)
    options = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    compile_all(models, optimizer=lambda: keras.optimizers.Nadam(0.1, **options))
    with pytest.warns(UserWarning, match="left"):
        fit_all(models, batch_size=8)
    assert (models[1].get_layer("left").left.numpy() == 1).all()


def test_compile_again_with_another_optimizer_and_loss():
    models = everywhere()
    compile_all(models)
    fit_all(models, batch_size=8)
    compile_all(models, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9), loss="mae")
    fit_all(models, batch_size=8, epochs=2)


def test_compile_again_with_the_same_optimizer():
    models = everywhere()
    compile_all(models)
    fit_all(models, batch_size=8)
    for model in models:
        model.compile(model.optimizer, loss="mae")
    fit_all(models, batch_size=8)


def test_whole_tensor_optimizer_then_another():
    """Lamb keeps whole copies of cut weights; after it these must neither lag nor come back."""
    models = everywhere()
    compile_all(models, optimizer=lambda: keras.optimizers.Lamb(0.01))
    fit_all(models, batch_size=8)
    compile_all(models)
    fit_all(models, batch_size=8)
    compile_all(models, optimizer=lambda: keras.optimizers.Lamb(0.01))
    fit_all(models, batch_size=8)


def test_freeze_then_compile_again():
    models = everywhere()
    compile_all(models)
    fit_all(models, batch_size=8)
    before = [m.get_layer("up").kernel.numpy() for m in models[1:]]
    for model in models:
        model.get_layer("up").trainable = False
    compile_all(models)
    fit_all(models, batch_size=8)
    for model, kernel in zip(models[1:], before):
        np.testing.assert_array_equal(model.get_layer("up").kernel.numpy(), kernel)
    for model in models:
        model.get_layer("up").trainable = True
    compile_all(models)
    fit_all(models, batch_size=8)


def test_frozen_before_parallelize():
    def build() -> keras.Model:
        model = mlp()
        model.get_layer("up").trainable = False
        return model

    models = everywhere(build)
    compile_all(models)
    fit_all(models, batch_size=8)


def test_freeze_without_compile_equals_plain():
    """Keras trains on what was trainable at compile time only after another compile."""
    models = pair(DATA)
    compile_all(models)
    fit_all(models, batch_size=8)
    for model in models:
        model.get_layer("up").trainable = False
    fit_all(models, batch_size=8)


def test_trained_model_goes_on_from_its_optimizer_state():
    models = [mlp() for _ in range(3)]
    compile_all(models)
    fit_all(models, batch_size=8)
    for model, axes in zip(models[1:], MESHES):
        kdist.parallelize(model, config(axes))
    fit_all(models, batch_size=8, epochs=2)
    assert [int(m.optimizer.iterations) for m in models] == [9, 9, 9]


def test_two_models_on_two_meshes():
    first, second = (pair(axes) for axes in MESHES)
    for models in (first, second):
        compile_all(models)
    for _ in range(2):
        for models in (first, second):
            fit_all(models, batch_size=8)


def test_learning_rate_set_between_epochs():
    models = everywhere()
    compile_all(models)
    fit_all(models, batch_size=8)
    for model in models:
        model.optimizer.learning_rate = 0.1
    fit_all(models, batch_size=8)


def test_learning_rate_schedule():
    """In its sixth step TensorFlow rounds this one otherwise unless it folds constants."""
    models = everywhere()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.7)
    compile_all(models, optimizer=lambda: keras.optimizers.SGD(schedule, momentum=0.9))
    fit_all(models, batch_size=4)
    assert_close(*[m.optimizer.learning_rate for m in models])


def test_shuffle_draws_the_same_order():
    models = everywhere()
    compile_all(models)
    histories = []
    for model in models:
        keras.utils.set_random_seed(11)
        histories.append(model.fit(*data(), batch_size=8, shuffle=True, verbose=0))
    assert_same_history(*histories)
    assert_same_weights(*models)


def test_prepared_functions_survive_reset():
    """`reset_metrics` and `make_*_function(force=True)` are public; nothing is lost by them."""
    models = everywhere()
    compile_all(models)
    fit_all(models, batch_size=8)
    for model in models:
        model.reset_metrics()
        model.make_train_function(force=True)
    fit_all(models, batch_size=8)
