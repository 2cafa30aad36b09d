"""A placed weight reads whole, writes everywhere, and stays an ordinary Keras variable."""

from __future__ import annotations

import copy
import pickle

import kdist
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import place
from kdist.storage.variables import (
    ATTRIBUTE,
    distribute,
    materialised,
    release,
    same_device,
    stored,
)

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import (
    MESHES,
    assert_close,
    assert_every_copy,
    compile_all,
    config,
    copies,
    data,
    fit_all,
    mlp,
    pair,
)

pytestmark = pytest.mark.usefixtures("float64")
both_meshes = pytest.mark.parametrize("axes", MESHES, ids=["data", "inner"])
INNER = MESHES[1]


def check_copies(model: keras.Model) -> None:
    for variable in model.weights:
        assert_every_copy(variable, variable.numpy())


class Empty(keras.layers.Layer):
    """Weights without elements, beside one that has some."""

    def build(self, shape):
        self.rows = self.add_weight(shape=(0, 4), name="rows")
        self.columns = self.add_weight(shape=(3, 0), name="columns")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale + keras.ops.sum(self.rows) + keras.ops.sum(self.columns)


def with_empty():
    keras.utils.set_random_seed(1)
    layers = keras.Input((6,)), Empty(name="empty"), keras.layers.Dense(3, name="down")
    return keras.Sequential(layers, name="model")


def test_a_weight_without_elements_reads_with_its_shape():
    mesh, model = kdist.mesh(data=2, model=2), with_empty()
    cuts = {".*/rows": (None, "model")}
    model = kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, layout_map=cuts))
    assert model.get_layer("empty").rows.numpy().shape == (0, 4)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_weight_without_elements_is_accumulated(level):
    options = kdist.OptimizerConfig(level=level, threshold_kb=0)
    models = pair({"data": 4}, with_empty, optimizer=options)
    compile_all(models, optimizer=lambda: keras.optimizers.Adam(gradient_accumulation_steps=2))
    fit_all(models, epochs=2, batch_size=8)


def test_same_device():
    assert same_device("/job:localhost/replica:0/task:0/device:CPU:1", "/device:CPU:1")
    assert not same_device("/device:CPU:0", "/device:CPU:1")
    assert not same_device("/device:CPU:0", "/device:GPU:0")


# -- placement ---------------------------------------------------------------------------------


def test_parts_live_on_their_devices():
    _, model = pair(INNER)
    entry = stored(model.get_layer("up").kernel)
    for (s, k), local in entry.locals.items():
        device = tf.DeviceSpec.from_string(local.value.device)
        assert f"CPU:{device.device_index}" in entry.topology.slices[s].devices[k]
        assert local.shape == (6, 4)
    assert {v.value.device for v in entry.locals.values()} == {
        f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(4)
    }


@both_meshes
def test_weights_read_as_before(axes):
    plain, parallel = pair(axes)
    assert_close(plain.get_weights(), parallel.get_weights())
    for a, b in zip(plain.weights, parallel.weights):
        assert (a.path, a.name, a.shape, a.dtype) == (b.path, b.name, b.shape, b.dtype)
        assert a.trainable == b.trainable
        assert isinstance(b, keras.Variable)
        assert_close(a, b)
        assert_close(keras.ops.convert_to_numpy(a * 2), keras.ops.convert_to_numpy(b * 2))
        assert_close(a[0], b[0])
    assert parallel.count_params() == plain.count_params()
    check_copies(parallel)


@both_meshes
def test_set_weights_reaches_every_copy(axes):
    _, model = pair(axes)
    wanted = [np.random.default_rng(i).normal(size=w.shape) for i, w in enumerate(model.weights)]
    model.set_weights(wanted)
    assert_close(wanted, model.get_weights())
    check_copies(model)


@both_meshes
def test_assign_add_and_sub_reach_every_copy(axes):
    _, model = pair(axes)
    kernel = model.get_layer("up").kernel
    before = kernel.numpy()
    kernel.assign_add(np.ones(kernel.shape))
    kernel.assign_sub(np.full(kernel.shape, 0.25))
    np.testing.assert_allclose(kernel.numpy(), before + 0.75)
    check_copies(model)


@both_meshes
def test_assign_refuses_another_shape(axes):
    _, model = pair(axes)
    with pytest.raises(ValueError, match="shape"):
        model.get_layer("up").kernel.assign(np.ones((2, 2)))


@both_meshes
def test_assignment_changes_what_a_compiled_step_uses(axes):
    models = pair(axes)
    x, y = data(8)
    for model in models:
        model.compile("sgd", "mse")
    assert_close(*[m.train_on_batch(x, y) for m in models])
    for model in models:
        model.set_weights([w * 2 for w in model.get_weights()])
    assert_close(*[m.test_on_batch(x, y) for m in models])
    assert_close(*[m.predict_on_batch(x) for m in models])
    assert_close(*[m.train_on_batch(x, y) for m in models])
    assert_close(*[m.get_weights() for m in models])


@both_meshes
def test_calls_in_the_users_own_function_are_never_stale(axes):
    models = pair(axes)
    x, y = data(8)
    functions = [tf.function(m, autograph=False) for m in models]
    for model in models:
        model.compile("sgd", "mse")
    for _ in range(2):
        assert_close(*[f(x) for f in functions])
        assert_close(*[m(x) for m in models])
        for model in models:
            model.train_on_batch(x, y)
    models[1].set_weights([w * 0 + 1 for w in models[1].get_weights()])
    models[0].set_weights(models[1].get_weights())
    assert_close(*[f(x) for f in functions])


@both_meshes
def test_the_users_own_tape_finds_gradients(axes):
    """Eagerly and in a `tf.function`, a tape outside kdist sees each weight."""
    models = pair(axes)
    x, y = data(8)

    def gradients(model: keras.Model) -> list:
        with tf.GradientTape() as tape:
            tape.watch([v.value for v in model.trainable_variables])
            loss = tf.reduce_mean(tf.square(model(x) - y))
        return [loss, *tape.gradient(loss, [v.value for v in model.trainable_variables])]

    plain = gradients(models[0])
    if "model" not in axes:
        assert_close(plain, gradients(models[1]))
        assert_close(plain, tf.function(lambda: gradients(models[1]), autograph=False)())
    else:
        # A cut weight is assembled anew at each read: kdist.gradients is for such meshes.
        models[1].compile("sgd", "mse")
        loss, found = kdist.gradients(models[1], x, y)
        assert_close(plain, [loss, *found])


# -- copies of the model -----------------------------------------------------------------------


@both_meshes
def test_clone_model_is_plain(axes):
    _, model = pair(axes)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert type(clone) is type(model) is type(mlp())
    assert all(stored(v) is None for v in clone.weights)
    x, y = data(8)
    assert_close(model(x), clone(x))
    clone.compile("sgd", "mse")
    before = model.get_weights()
    clone.fit(x, y, verbose=0)
    assert_close(before, model.get_weights())


@both_meshes
def test_clone_can_be_parallelized(axes):
    plain, model = pair(axes)
    clone = kdist.parallelize(keras.models.clone_model(model), config(axes))
    clone.set_weights(plain.get_weights())
    for m in (plain, clone):
        m.compile("sgd", "mse")
        m.fit(*data(8), verbose=0)
    assert_close(plain.get_weights(), clone.get_weights())


@both_meshes
@pytest.mark.parametrize("trained", [False, True])
def test_pickle_gives_a_plain_model(axes, trained):
    _, model = pair(axes)
    x, y = data(8)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    if trained:
        model.fit(x, y, verbose=0)
    other = pickle.loads(pickle.dumps(model))
    assert type(other) is type(model)
    assert all(stored(v) is None for v in other.weights)
    assert_close(model.get_weights(), other.get_weights())
    for m in (model, other):
        m.fit(x, y, verbose=0)
    assert_close(model.get_weights(), other.get_weights())


@both_meshes
@pytest.mark.parametrize("trained", [False, True])
def test_deepcopy_gives_a_plain_model(axes, trained):
    _, model = pair(axes)
    x, y = data(8)
    model.compile("sgd", "mse")
    if trained:
        model.fit(x, y, verbose=0)
    other = copy.deepcopy(model)
    assert_close(model.get_weights(), other.get_weights())
    before = model.get_weights()
    other.set_weights([w * 0 for w in other.get_weights()])
    assert_close(before, model.get_weights())
    other.compile("sgd", "mse")
    other.fit(x, y, verbose=0)
    assert_close(before, model.get_weights())


def test_deepcopy_of_a_variable_is_plain():
    _, model = pair(INNER)
    kernel = model.get_layer("up").kernel
    other = copy.deepcopy(kernel)
    other.assign(np.zeros(other.shape))
    assert stored(other) is None
    assert abs(kernel.numpy()).sum() > 0


# -- release -----------------------------------------------------------------------------------


@both_meshes
def test_materialised_gives_real_variables_meanwhile(axes):
    _, model = pair(axes)
    before = model.get_weights()
    classes = [type(v) for v in model.weights]
    with materialised(model.weights):
        for variable in model.weights:
            assert isinstance(variable.value, tf.Variable)
            assert ATTRIBUTE not in variable.__dict__
        assert_close(before, model.get_weights())
    assert [type(v) for v in model.weights] == classes
    assert_close(before, model.get_weights())
    model.set_weights([w + 1 for w in before])
    check_copies(model)


@both_meshes
def test_materialised_is_undone_after_an_error(axes):
    _, model = pair(axes)
    with pytest.raises(KeyError), materialised(model.weights):
        raise KeyError
    model.set_weights([w + 1 for w in model.get_weights()])
    check_copies(model)


@both_meshes
def test_training_goes_on_after_materialised(axes):
    models = pair(axes)
    for model in models:
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(*data(8), verbose=0)
    with materialised(models[1].weights):
        pass
    for model in models:
        model.fit(*data(8), verbose=0)
    assert_close(*[m.get_weights() for m in models])


def test_release_gives_a_plain_variable_back():
    variable = keras.Variable(np.arange(8.0).reshape(2, 4), name="w", trainable=False)
    topology = Topology.from_mesh(kdist.mesh(data=2, model=2))
    layouts = kdist.sharding.layout.resolve_layouts(
        [("w", (2, 4))], {"w": (None, "model")}, topology
    )[0]
    distribute(variable, place("w", (2, 4), 8, layouts[0], topology), topology)
    assert len(copies(variable)) == 4
    variable.assign(np.ones((2, 4)))
    release(variable)
    assert type(variable) is keras.Variable
    assert stored(variable) is None
    assert not variable.trainable
    np.testing.assert_array_equal(variable.numpy(), np.ones((2, 4)))
    variable.assign(np.zeros((2, 4)))
    np.testing.assert_array_equal(variable.numpy(), np.zeros((2, 4)))


@pytest.mark.parametrize("dtype", ["int32", "bool", "float16"])
def test_other_dtypes_keep_theirs(dtype):
    variable = keras.Variable(np.ones((4,)), dtype=dtype, trainable=False, name="w")
    topology = Topology.from_mesh(kdist.mesh(model=4))
    layouts = kdist.sharding.layout.resolve_layouts([("w", (4,))], {"w": ("model",)}, topology)[0]
    entry = distribute(variable, place("w", (4,), 1, layouts[0], topology), topology)
    assert variable.dtype == dtype
    assert {local.dtype for local in entry.locals.values()} == {dtype}
    variable.assign(np.array([1, 0, 0, 1]))
    assert variable.numpy().tolist() == [1, 0, 0, 1]
    assert variable.numpy().dtype == dtype


def test_the_model_class_is_untouched():
    model = mlp()
    before = type(model)
    kdist.parallelize(model, config(INNER))
    assert type(model) is before
    assert type(mlp().get_layer("up").kernel) is type(
        keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]).weights[0]
    )
