"""`kdist.function`: loops of one's own, over the mesh."""

from __future__ import annotations

import functools
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

ROWS = (8, 8, 6, 3)  # the last two of other sizes
CUTS = {".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}
MESHES = {
    "data 4": ({"data": 4}, 0),
    "data 2 x model 2": ({"data": 2, "model": 2}, 0),
    "data 4, level 3": ({"data": 4}, 3),
    "data 2 x model 2, level 3": ({"data": 2, "model": 2}, 3),
}

pytestmark = pytest.mark.usefixtures("float64")


def network(inputs: int, outputs: int, name: str) -> keras.Model:
    first = keras.Input((inputs,))
    hidden = layers.Dense(8, "tanh", name="up")(first)
    return keras.Model(first, layers.Dense(outputs, name="down")(hidden), name=name)


def spread(models: list[keras.Model], mesh: str) -> list[keras.Model]:
    """The models, each with a config of `mesh`; as they are without one."""
    if not mesh:
        return models
    axes, level = MESHES[mesh]
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)
    cuts = CUTS if "model" in axes else {}
    for model in models:
        config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts, optimizer=optimizer)
        kdist.parallelize(model, config)
    return models


def networks(mesh: str = "") -> list[keras.Model]:
    """A generator and a discriminator; neither is compiled."""
    keras.utils.set_random_seed(0)
    made = [network(2, 6, "g"), network(6, 1, "d")]
    return spread(made, mesh)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 6)), rng.normal(size=(n, 2))) for n in ROWS]


def adversaries(g: keras.Model, d: keras.Model) -> Any:
    """The usual step of two networks, with optimizers of its own."""
    of_g, of_d = keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01)
    judge = keras.losses.BinaryCrossentropy(from_logits=True)

    def step(real: Any, noise: Any) -> dict[str, Any]:
        with tf.GradientTape() as of_generator, tf.GradientTape() as of_discriminator:
            fake = g(noise, training=True)
            seen, made = d(real, training=True), d(fake, training=True)
            g_loss = judge(ops.ones_like(made), made)
            d_loss = judge(ops.ones_like(seen), seen) + judge(ops.zeros_like(made), made)
        of_g.apply(of_generator.gradient(g_loss, g.trainable_variables), g.trainable_variables)
        gradients = of_discriminator.gradient(d_loss, d.trainable_variables)
        of_d.apply_gradients(zip(gradients, d.trainable_variables))
        return {"g": g_loss, "d": d_loss}

    return step


def trained(mesh: str = "") -> tuple[list[list[float]], list[np.ndarray]]:
    models = networks(mesh)
    step = adversaries(*models)
    run = kdist.function(step, *models) if mesh else tf.function(step, autograph=False)
    logs = [run(*batch) for _ in range(2) for batch in batches()]
    weights = [w for model in models for w in model.get_weights()]
    return [[float(one["g"]), float(one["d"])] for one in logs], weights


@functools.cache
def one_device() -> tuple[list[list[float]], list[np.ndarray]]:
    return trained()


@pytest.mark.parametrize("mesh", MESHES)
def test_a_loop_over_two_models_equals_one_device(mesh: str) -> None:
    (losses, weights), (expected, its_weights) = trained(mesh), one_device()
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    for one, other in zip(weights, its_weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "model": 2}], ids=["data", "inner"])
def test_as_a_decorator_with_the_compiled_optimizer(axes: dict[str, int]) -> None:
    found = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        model = network(6, 3, "mlp")
        if parallel:
            cuts = CUTS if "model" in axes else {}
            kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts))
        model.compile(keras.optimizers.Adam(0.01), "mse")

        def step(data: dict[str, Any], model: keras.Model = model) -> Any:
            with tf.GradientTape() as tape:
                loss = ops.mean((model(data["x"], training=True) - data["y"]) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        run = kdist.function(model)(step) if parallel else step
        for real, noise in batches():
            run({"x": real, "y": np.tile(noise[:, :1], 3)})
        # What fit and a loop train is the same model.
        model.fit(batches()[0][0], np.ones((8, 3)), batch_size=4, shuffle=False, verbose=0)
        found.append([*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)


def test_it_can_be_called_in_a_graph() -> None:
    model = networks("data 4")[1]
    run = kdist.function(lambda x: model(x) * 2.0, model)
    x = batches()[0][0]
    both = tf.function(lambda x: run(x) + run(x), autograph=False)(x)
    np.testing.assert_allclose(both, 4.0 * np.asarray(model(x)), rtol=1e-9)


def test_what_it_needs() -> None:
    plain = network(6, 3, "plain")
    with pytest.raises(ValueError, match=r"Name the models: kdist\.function\(step, model\)"):
        kdist.function(lambda x: x)
    with pytest.raises(ValueError, match="Pass it through kdist.parallelize"):
        kdist.function(lambda x: x, plain)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=2), compression=kdist.CompressionConfig(rest="bf16")
    )
    with pytest.raises(ValueError, match=r"in kdist\.function goes without compression"):
        kdist.function(lambda x: x, kdist.parallelize(plain, config))


def test_keywords_over_inner_axes_are_refused() -> None:
    """They would have to run on gathered weights."""
    model = networks("data 2 x model 2")[1]
    run = kdist.function(lambda x, scale=1.0: model(x) * scale, model)
    x = batches()[0][0]
    np.testing.assert_allclose(run(x), model(x), rtol=1e-9)
    with pytest.raises(ValueError, match=r"by position.*functools\.partial.*\['scale'\]"):
        run(x, scale=2.0)


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "model": 2}], ids=["data", "inner"])
def test_what_a_step_does_by_values_of_tensors(axes: dict[str, int]) -> None:
    """As in `tf.function`, which converts `if` and `for`."""
    found = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        model, optimizer = network(6, 3, "mlp"), keras.optimizers.Adam(0.01)
        if parallel:
            cuts = {".*up/kernel": (None, "model")} if "model" in axes else {}
            config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts)
            kdist.parallelize(model, config)
        optimizer.build(model.trainable_variables)

        def step(x: Any, times: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            loss = tf.zeros((), x.dtype)
            for _ in tf.range(times):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(model(x) ** 2)
                weights = model.trainable_variables
                optimizer.apply(tape.gradient(loss, weights), weights)
            if loss > 0.1:
                loss = 2.0 * loss
            return loss

        run = kdist.function(step, model) if parallel else tf.function(step)
        x = tf.constant(np.random.default_rng(0).normal(size=(8, 6)))
        found.append([[float(run(x, tf.constant(n))) for n in (2, 3)], *model.get_weights()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)


def shared(*meshes: str) -> list[np.ndarray]:
    """What a step of two models with one backbone leaves, each with an optimizer of its own.

    Args:
        *meshes: One for both, or one of each.
    """
    keras.utils.set_random_seed(0)
    backbone, models = network(6, 8, "backbone"), []
    for outputs in (3, 2):
        first = keras.Input((6,))
        head = layers.Dense(outputs, name=f"head{outputs}")
        models.append(keras.Model(first, head(backbone(first))))
    for model, mesh in zip(models, meshes if len(meshes) == 2 else meshes * 2):
        spread([model], mesh)
    optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)]

    def step(x: Any) -> None:
        with tf.GradientTape(persistent=True) as tape:
            far = [ops.mean((model(x, training=True) - x[:, :1]) ** 2) for model in models]
        for model, loss, optimizer in zip(models, far, optimizers):
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)

    run = kdist.function(step, *models) if meshes else tf.function(step)
    for x, _ in batches():
        run(tf.constant(x))
    return [w for model in models for w in model.get_weights()]


def test_weights_that_another_model_has_moved_are_refused() -> None:
    """Each model of a kdist.function has to find them where its own config says."""
    with pytest.raises(ValueError, match=r"one config, or a level up to 2.*moved=\[.*up/kernel"):
        shared("data 4", "data 4, level 3")


@pytest.mark.parametrize("mesh", MESHES)
def test_two_models_with_one_backbone_equal_one_device(mesh: str) -> None:
    for one, other in zip(shared(mesh), shared(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
