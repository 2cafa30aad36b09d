"""Training in float8: each layer's largest values, kept in variables that gradients overwrite.

In float64, rounded to float8 as on one device: a maximum that is summed, or of some rows or
micro-batches alone, changes scales, and with them every number.
"""

from __future__ import annotations

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
                "run_eagerly",
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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ring", {"fusion": kdist.FusionConfig(algorithm="ring")}),
        ("recompute", {"recompute": kdist.RecomputeConfig(layers=["up", "down"])}),
        pytest.param(
            "host",
            {"optimizer": kdist.OptimizerConfig(level=1, state_on="host")},
            marks=pytest.mark.wide,
        ),
    ],
)
def test_settings(name: str, options: dict[str, Any]) -> None:
    compare(CASE, {"data": 4}, optimizer=OPTIMIZERS["adam"], config=options)


@pytest.mark.wide
def test_loss_scaling() -> None:
    compare(CASE, {"data": 4}, optimizer=OPTIMIZERS["loss_scale_sgd"])


def _loop(parallel: bool, steps: int = 3) -> dict[str, np.ndarray]:
    """A loop that applies the gradients itself."""
    run = Run(case=CASE, mesh_axes={"data": 4}, optimizer=OPTIMIZERS["adam"])
    model = compiled(run, "kdist" if parallel else "plain")

    @tf.function  # Keras's float8 needs a graph
    def plain(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    for step in range(steps):
        x, y, _ = CASE.data(step, 8)
        if parallel:
            _, gradients = kdist.gradients(model, x, y)
            kdist.apply_gradients(model, gradients)
        else:
            plain(tf.constant(x), tf.constant(y))
    return {v.path: keras.ops.convert_to_numpy(v) for v in model.weights}


@pytest.mark.usefixtures("float64")
def test_loops() -> None:
    expected, actual = _loop(False), _loop(True)
    assert any(len(np.unique(v)) > 3 for path, v in expected.items() if "amax" in path)
    for path, value in expected.items():
        np.testing.assert_allclose(actual[path], value, rtol=1e-9, atol=1e-9, err_msg=path)
