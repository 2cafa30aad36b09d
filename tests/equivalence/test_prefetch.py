"""Tables that are looked up a step ahead train as on one plain device, whatever rows repeat."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import pytest

from .features import BY_NAME as FEATURES
from .harness import compare
from .host_tables import SUBCLASSED, TABLES
from .matrix import LEVELS, MESHES, level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .test_lazy_optimizers import several


def ahead(model: keras.Model) -> None:
    """Places every table of a model on the host, to be looked up ahead."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Embedding):
            kdist.place(layer, "host", prefetch=True)


def some_ahead(model: keras.Model) -> None:
    """The same, but for the table that Adam updates, which is looked up when its step begins."""
    ahead(model)
    for layer in model._flatten_layers():
        if layer.name == "places":
            kdist.place(layer, "host")


STEPS = FEATURES["three_steps_per_execution"]
UPDATES = {"lazy": (several("adam"), some_ahead), "sgd": (OPTIMIZERS["sgd"], ahead)}
AXES = ("data2", "data4", "model2", "data2_model2")
ROWS = product(UPDATES, LEVELS, AXES)
DEFAULT = [("lazy", "level1", "data2"), ("sgd", "level0", "data2_model2")]


@pytest.mark.parametrize(("update", "level", "mesh"), spread(ROWS, DEFAULT))
def test_levels(update: str, level: str, mesh: str) -> None:
    optimizer, declare = UPDATES[update]
    compare(
        TABLES,
        MESHES[mesh],
        optimizer=optimizer,
        features=[STEPS],
        config=level_config(level),
        declare=declare,
    )


def test_steps_without_a_barrier() -> None:
    """Rows of the next batch are looked up while steps of one graph follow each other."""
    compare(
        TABLES,
        MESHES["data2"],
        optimizer=UPDATES["lazy"][0],
        features=[FEATURES["steps_without_barrier"]],
        config=level_config("level1"),
        declare=UPDATES["lazy"][1],
    )


FEATURED = ("global_clipnorm", "sample_weight", "own_compute_loss", "loss_scale", "weight_decay")


@pytest.mark.parametrize(
    ("feature", "mesh"),
    spread(product(FEATURED, ("data2", "data2_model2")), [("loss_scale", "data2")]),
)
def test_features(feature: str, mesh: str) -> None:
    scaled = feature == "loss_scale"
    compare(
        TABLES,
        MESHES[mesh],
        optimizer=_scaled if scaled else several("adagrad"),
        features=[STEPS] if scaled else [STEPS, FEATURES[feature]],
        declare=some_ahead,
    )


def _scaled(**_: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(
        several("adam")(), initial_scale=64.0, dynamic_growth_steps=2
    )


@pytest.mark.long
@pytest.mark.parametrize("mesh", AXES)
def test_subclassed(mesh: str) -> None:
    compare(
        SUBCLASSED,
        MESHES[mesh],
        optimizer=several("ftrl"),
        features=[STEPS],
        declare=some_ahead,
    )


STAGED = {
    "pipe2": {"pipe": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_model2": {"pipe": 2, "model": 2},
}


@pytest.mark.parametrize(
    ("schedule", "level", "mesh"),
    spread(
        product(("1f1b", "zero_bubble"), ("level0", "level3"), STAGED),
        [("1f1b", "level0", "pipe2_data2")],
    ),
)
def test_pipelines(schedule: Any, level: str, mesh: str) -> None:
    pipeline = kdist.PipelineConfig(micro_batches=2, schedule=schedule)
    compare(
        TABLES,
        STAGED[mesh],
        optimizer=several("adam"),
        features=[STEPS],
        config={"pipeline": pipeline, **level_config(level)},
        declare=some_ahead,
    )
