"""Training in float8: each layer's largest values, kept in variables that gradients overwrite.

In float64, rounded to float8 as on one device: a maximum that is summed, or of some rows or
micro-batches alone, changes scales, and with them every number.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

from .case import CLASSES, FEED_FORWARD, Case, labels
from .features import BY_NAME as FEATURES
from .harness import compare, compiled
from .matrix import LEVELS, MESHES, level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .run import Run


def _build() -> keras.Model:
    policy = keras.dtype_policies.get("float8_from_float64")
    x = inputs = keras.Input((6, 8), name="features")
    x = keras.layers.Dense(16, "relu", dtype=policy, name="up")(x)
    x = keras.layers.Dense(8, dtype=policy, name="down")(x)
    x = keras.layers.EinsumDense("abc,cd->ad", 12, bias_axes="d", dtype=policy, name="mixed")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="float8")


def _data(seed: int, samples: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    # Rows of very different size: no replica has the largest value by chance.
    size = rng.uniform(0.1, 30.0, (samples, 1, 1))
    return size * rng.normal(size=(samples, 6, 8)), labels(rng, samples), None


CASE = Case(name="float8", build=_build, data=_data, layout_map=FEED_FORWARD)
ALL_MESHES: dict[str, dict[str, int]] = {
    **{name: dict(axes) for name, axes in MESHES.items()},
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}


def _config(mesh: str, level: str) -> dict[str, Any]:
    pipeline = kdist.PipelineConfig(micro_batches=2, stages="auto")
    return {**level_config(level), **({"pipeline": pipeline} if "pipe" in mesh else {})}


@pytest.mark.parametrize(
    ("mesh", "level"),
    spread(
        product(ALL_MESHES, LEVELS),
        [
            ("data4", "level3"),
            ("pipe2_data2_model2", "level1"),
            ("data2_model2", "level0"),
            ("data2", "no_overlap"),
            ("model4", "level0"),
            ("pipe2_data2", "level0"),
        ],
        quick=3,
    ),
)
def test_levels(mesh: str, level: str) -> None:
    compare(CASE, ALL_MESHES[mesh], optimizer=OPTIMIZERS["adam"], config=_config(mesh, level))


@pytest.mark.parametrize(
    ("feature", "level", "mesh"),
    spread(
        product(
            (
                "gradient_accumulation",
                "global_clipnorm",
                "clipnorm",
                "weight_decay",
                "sample_weight",
                "reduction_sum",
                "own_compute_loss",
                "steps_per_execution",
                "frozen",
            ),
            ("level0", "level2"),
            ("data4", "data2_model2", "pipe2_data2"),
        ),
        [
            ("gradient_accumulation", "level2", "data4"),
            ("own_compute_loss", "level0", "data4"),
            ("gradient_accumulation", "level0", "data2_model2"),
            ("global_clipnorm", "level2", "data4"),
            ("steps_per_execution", "level0", "data2_model2"),
        ],
    ),
)
def test_features(feature: str, level: str, mesh: str) -> None:
    compare(
        CASE,
        ALL_MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        config=_config(mesh, level),
        features=(FEATURES[feature],),
    )


def test_computed_again() -> None:
    again = kdist.RecomputeConfig(layers=["up|down|mixed"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "recompute computes nothing again")
        compare(CASE, {"data": 4}, optimizer=OPTIMIZERS["adam"], config={"recompute": again})


@pytest.mark.wide
def test_state_on_the_host() -> None:
    config = {"optimizer": kdist.OptimizerConfig(state_on="host")}
    compare(CASE, {"data": 4}, optimizer=OPTIMIZERS["adam"], config=config)


@keras.saving.register_keras_serializable()
class Subclassed(keras.Model):
    """Calls its layers itself, one of them in its loss."""

    def __init__(self, layers: list[keras.layers.Layer], last: keras.layers.Layer) -> None:
        super().__init__(name="float8")
        self.inner, self.last = layers, last

    def call(self, inputs: Any) -> Any:
        for layer in self.inner:
            inputs = layer(inputs)
        return inputs

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, self.last(y_pred), sample_weight, training)


def _subclassed() -> keras.Model:
    first, *inner, head = _build().layers
    policy = keras.dtype_policies.get("float8_from_float64")
    model = Subclassed([*inner, head], keras.layers.Dense(CLASSES, dtype=policy, name="last"))
    model.last(model(first.output))
    return model


@pytest.mark.parametrize("mesh", ["data4", pytest.param("data2_model2", marks=pytest.mark.wide)])
def test_a_loss_with_a_layer_of_its_own(mesh: str) -> None:
    case = dataclasses.replace(CASE, name="float8_loss", build=_subclassed, metrics=list)
    compare(case, MESHES[mesh], optimizer=OPTIMIZERS["adam"])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"data": 2}, {}),
        ({"model": 2}, {"layout_map": {".*between/kernel": (None, "model")}}),
        ({"pipe": 2}, {"stages": {"shared": 0, "between": 0}}),
        ({"pipe": 2}, {"stages": "auto"}),
    ],
    ids=["data", "model", "one stage", "two stages"],
)
def test_a_layer_that_is_called_twice_is_refused(axes: Any, options: dict[str, Any]) -> None:
    policy = keras.dtype_policies.get("float8_from_float64")
    shared = keras.layers.Dense(8, dtype=policy, name="shared")
    between, last = keras.layers.Dense(8, "tanh", name="between"), keras.layers.Dense(2)
    first = keras.Input((8,))
    model = keras.Model(first, last(shared(between(shared(first)))))
    if "pipe" in axes:
        stages = (
            options["stages"]
            if options["stages"] == "auto"
            else {**options["stages"], last.name: 1}
        )
        options = {"pipeline": kdist.PipelineConfig(micro_batches=2, stages=stages)}
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), **options))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="is called once in a step.*'shared/"):
        model.fit(np.ones((4, 8)), np.ones((4, 2)), verbose=0)


@pytest.mark.wide
def test_loss_scaling() -> None:
    compare(CASE, {"data": 4}, optimizer=OPTIMIZERS["loss_scale_sgd"])


def _loop(parallel: bool, name: str) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Weights, and gradients of the last step, of a loop that applies gradients itself."""
    run = Run(case=CASE, mesh_axes={"data": 4}, optimizer=OPTIMIZERS[name])
    model = compiled(run, "kdist" if parallel else "plain")

    @tf.function  # Keras's float8 needs a graph
    def plain(x: Any, y: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
            loss = model.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return gradients

    for step in range(3):
        x, y, _ = CASE.data(step, 8)
        if parallel:
            _, gradients = kdist.gradients(model, x, y)
            kdist.apply_gradients(model, gradients)
        else:
            gradients = plain(tf.constant(x), tf.constant(y))
    news = [g for g, v in zip(gradients, model.trainable_variables) if v.overwrite_with_gradient]
    weights = {v.path: keras.ops.convert_to_numpy(v) for v in model.weights}
    return weights, [keras.ops.convert_to_numpy(g) for g in news]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("optimizer", ["adam", "loss_scale_sgd"])
def test_loops(optimizer: str) -> None:
    (expected, news), (actual, found) = _loop(False, optimizer), _loop(True, optimizer)
    assert any(len(np.unique(v)) > 3 for path, v in expected.items() if "amax" in path)
    for path, value in expected.items():
        np.testing.assert_allclose(actual[path], value, rtol=1e-9, atol=1e-9, err_msg=path)
    assert len(news) == 18
    for new, one in zip(news, found, strict=True):
        np.testing.assert_allclose(one, new, rtol=1e-6)  # of float32, as Keras keeps it
