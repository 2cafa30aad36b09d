"""Wrong settings: every error says the value, the rule and the fix, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import MESHES, assert_close, config, data, mlp, pair

pytestmark = pytest.mark.usefixtures("float64")
INNER = {"data": 2, "model": 2}


def parallel(cuts: Any = None, axes: dict | None = None, **options: Any) -> keras.Model:
    mesh = kdist.mesh(**(axes or INNER))
    return kdist.parallelize(mlp(), kdist.ParallelConfig(mesh=mesh, layout_map=cuts, **options))


# Each: what is wrong, and the words that must be in the message (rule, fix, value), in order.
WRONG: dict[str, tuple[Callable, str]] = {
    "mesh-larger-than-devices": (lambda: kdist.mesh(data=16), r"16.*devices.*Received"),
    "mesh-axis-of-size-zero": (lambda: kdist.mesh(data=0), r"at least 1.*Received: .*0"),
    "mesh-axis-not-an-integer": (lambda: kdist.mesh(data=2.0), r"integer.*Received: .*2\.0"),
    "mesh-without-axes": (lambda: kdist.mesh(), r"axis.*Received"),
    "mesh-devices-do-not-cover": (
        lambda: kdist.mesh(data=2, devices=["cpu:0", "cpu:1", "cpu:2"]),
        r"2 positions.*as many device names.*Received: devices=",
    ),
    "mesh-device-twice": (
        lambda: kdist.mesh(data=2, devices=["cpu:0", "cpu:0"]),
        r"Received.*cpu:0|Received.*CPU:0",
    ),
    "mesh-device-unknown": (
        lambda: kdist.mesh(data=2, devices=["cpu:0", "cpu:77"]),
        r"(cpu|CPU):77",
    ),
    "config-without-a-mesh": (
        lambda: kdist.ParallelConfig(mesh=None),
        r"mesh.*Received",
    ),
    "axis-unknown": (
        lambda: parallel({"down/kernel": ("modle", None)}),
        r"modle.*model.*Received",
    ),
    "axis-on-two-dims": (
        lambda: parallel({"down/kernel": ("model", "model")}),
        r"model.*Received",
    ),
    "dim-not-divisible": (
        lambda: parallel({"down/kernel": (None, "model")}),
        r"down/kernel.*Received",
    ),
    "layout-of-another-rank": (
        lambda: parallel({"down/kernel": ("model",)}),
        r"down/kernel.*Received",
    ),
    "pattern-without-a-variable": (
        lambda: parallel({"dwon/kernel": ("model", None)}),
        r"dwon/kernel.*down/kernel.*Received",
    ),
    "two-patterns-for-one-variable": (
        lambda: parallel({"down/.*el": ("model", None), ".*/kernel": ("model", None)}),
        r"down/kernel.*Received",
    ),
    "pattern-not-a-regex": (
        lambda: parallel({"down/(kernel": ("model", None)}),
        r"Received.*down/\(kernel",
    ),
    "layout-map-of-another-type": (
        lambda: parallel([("down/kernel", ("model", None))]),
        r"dict.*LayoutMap.*Received: layout_map=",
    ),
    "loss-from-layers": (
        lambda: parallel(loss_from_layers="max"),
        r"'mean'.*'sum'.*Received: loss_from_layers='max'",
    ),
    "enable-alltoall": (
        lambda: parallel(enable_alltoall=1),
        r"True or False.*Received: enable_alltoall=1",
    ),
    "shard-and-layout-map-differ": (
        lambda: differing(),
        r"kdist.shard.*Keep one.*Received",
    ),
    "not-a-model": (
        lambda: kdist.parallelize(keras.layers.Dense(2), config(MESHES[0])),
        r"keras.Model.*Received: model=",
    ),
    "no-config": (lambda: kdist.parallelize(mlp()), r"ParallelConfig.*Received: config=None"),
    "mesh-instead-of-config": (
        lambda: kdist.parallelize(mlp(), kdist.mesh(data=2)),
        r"ParallelConfig.*Received: config=",
    ),
    "parallelized-twice": (
        lambda: kdist.parallelize(parallel(), config(INNER)),
        r"already.*new one.*Received: model='mlp'",
    ),
    "weights-on-two-meshes": (lambda: sharing(), r"one mesh.*new model.*Received: '.*/kernel'"),
}


def differing() -> None:
    model = mlp()
    kdist.shard(model.get_layer("up"), weights={"kernel": ("model", None)})
    cuts = {"up/kernel": (None, "model")}
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**INNER), layout_map=cuts))


def sharing() -> None:
    model = parallel()
    other = keras.Model(model.inputs, model.layers[1].output)
    kdist.parallelize(other, config(MESHES[0]))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings(name):
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()


def test_a_refused_model_is_left_as_it_was():
    model = mlp()
    before, kinds = model.get_weights(), [type(v) for v in model.weights]
    wrong = kdist.ParallelConfig(mesh=kdist.mesh(**INNER), layout_map={"none/such": ("model",)})
    with pytest.raises(ValueError, match="none/such"):
        kdist.parallelize(model, wrong)
    assert [type(v) for v in model.weights] == kinds
    assert_close(before, model.get_weights())
    kdist.parallelize(model, config(INNER))
    model.compile("sgd", "mse")
    model.train_on_batch(*data(8))


def test_two_models_may_share_weights_on_one_mesh():
    model = parallel(axes=MESHES[0])
    inner = keras.Model(model.inputs, model.layers[1].output)
    kdist.parallelize(inner, config(MESHES[0]))
    for one, width in ((model, 3), (inner, 8)):
        one.compile("sgd", "mse")
        one.fit(np.ones((8, 6)), np.ones((8, width)), verbose=0)
    x = np.ones((2, 6))
    assert_close(inner.predict(x, verbose=0), inner(x))
    assert_close(model.predict(x, verbose=0), model(x))


def test_weights_of_one_layout_are_not_taken_by_another():
    model = parallel({".*up/kernel": (None, "model")})
    inner = keras.Model(model.inputs, model.layers[1].output)
    with pytest.raises(ValueError, match="parallel with the same layouts and stages"):
        kdist.parallelize(inner, kdist.ParallelConfig(mesh=kdist.mesh(**INNER)))


# -- what is refused on first use ----------------------------------------------------------------


@pytest.mark.parametrize("axes", MESHES, ids=["data", "inner"])
def test_fit_before_compile_is_keras_own_error(axes):
    models = pair(axes)
    messages = []
    for model in models:
        with pytest.raises(ValueError, match="compile") as caught:
            model.fit(*data(8), verbose=0)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("axes", MESHES, ids=["data", "inner"])
def test_fit_without_an_optimizer_says_so(axes):
    """What needs none works: evaluating."""
    models = pair(axes)
    for model in models:
        model.compile(optimizer=None, loss="mse")
    assert_close(*(model.evaluate(*data(8), verbose=0) for model in models))
    with pytest.raises(ValueError, match=r"compile\(optimizer=.*Received: model="):
        models[1].fit(*data(8), verbose=0)


@pytest.mark.parametrize("axes", MESHES, ids=["data", "inner"])
@pytest.mark.parametrize("wrong", ["input", "target"])
def test_wrong_shapes_are_refused_as_keras_does(axes, wrong):
    models = pair(axes)
    x, y = data(8)
    x, y = (x[:, :5], y) if wrong == "input" else (x, np.ones((8, 5)))
    for model in models:
        model.compile("sgd", "mse")
        with pytest.raises(Exception, match=r"(?i)shape|dimension|incompatible"):
            model.fit(x, y, verbose=0)
    for model in models:
        model.fit(*data(8), verbose=0)


@pytest.mark.parametrize("axes", MESHES, ids=["data", "inner"])
def test_an_error_in_a_callback_leaves_a_model_that_trains(axes):
    model = pair(axes)[1]
    model.compile("sgd", "mse")

    def fail(batch: int, logs: Any) -> None:
        raise KeyError("mine")

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    with pytest.raises(KeyError, match="mine"):
        model.fit(*data(8), callbacks=[callback], verbose=0)
    model.fit(*data(8), verbose=0)


def test_a_plan_of_an_unbuilt_model_is_refused():
    layers = [keras.layers.Dense(8), keras.layers.Dense(3)]
    model = kdist.parallelize(keras.Sequential(layers), config(MESHES[0]))
    with pytest.raises(ValueError, match=r"(?s)Build the model.*Received: model="):
        model.plan()


@pytest.mark.filterwarnings("ignore:.*any trainable weights.*")
@pytest.mark.parametrize("axes", MESHES, ids=["data", "inner"])
def test_a_model_without_trainable_weights_is_fit_as_keras_does(axes):
    """Keras warns and computes the loss: for a frozen model, or one that only has statistics."""
    models = pair(axes)
    for model in models:
        model.trainable = False
        model.compile("sgd", "mse")
    histories = [m.fit(*data(8), epochs=2, verbose=0).history for m in models]
    assert_close(*histories)


@pytest.mark.parametrize(
    ("axes", "level"), [({"data": 4}, 0), ({"data": 4}, 3), ({"pipe": 2, "data": 2}, 0)]
)
def test_what_fails_on_a_device_is_what_the_user_reads(axes: dict[str, int], level: int) -> None:
    """An id outside a table: the message names it, and not a transfer that was cancelled."""
    layers = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(30, 8)]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(3)])
    kdist.parallelize(
        model,
        kdist.ParallelConfig(
            mesh=kdist.mesh(**axes),
            optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
            pipeline=kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None,
        ),
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids = np.zeros((24, 3), "int32")
    ids[7, 1] = 30
    for call in (lambda: model.fit(ids, np.zeros(24), verbose=0), lambda: model.predict(ids)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="= 30 is not in"):
            call()


@pytest.mark.parametrize(
    "declare",
    [
        lambda layer: kdist.shard(layer, weights={"embeddings": ("model", None)}),
        lambda layer: kdist.shard(layer, manual_split=(10, 20)),
        lambda layer: kdist.place(layer, "host"),
        lambda layer: kdist.set_stage(layer, 0),
    ],
    ids=["shard", "manual_split", "place", "set_stage"],
)
@pytest.mark.parametrize("axes", [INNER, {"model": 1}], ids=["inner", "one_device"])
def test_a_declaration_that_comes_too_late(declare: Callable, axes: dict[str, int]) -> None:
    table = keras.layers.Embedding(30, 8)
    model = keras.Sequential([keras.Input((3,), dtype="int32"), table])
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map={}))
    with pytest.raises(ValueError, match="before parallelize. Received: layer"):
        declare(table)
