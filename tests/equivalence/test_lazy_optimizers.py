"""Lazy optimizers of tables train over the mesh as on one plain device, wherever tables are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import pytest

from .features import BY_NAME as FEATURES
from .harness import compare
from .host_tables import TABLES, on_host
from .matrix import LEVELS, MESHES, level_config, product, spread
from .test_split_tables import split

_O = keras.optimizers
RULES: dict[str, Callable[..., Any]] = {
    "sgd": lambda **o: _O.SGD(**{"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, **o}),
    "adagrad": lambda **o: _O.Adagrad(**{"learning_rate": 0.1, **o}),
    "ftrl": lambda **o: _O.Ftrl(
        **{"learning_rate": 0.1, "l2_shrinkage_regularization_strength": 0.01, **o}
    ),
    "adam": lambda **o: _O.Adam(**{"learning_rate": 0.05, "amsgrad": True, **o}),
    "adamw": lambda **o: _O.AdamW(**{"learning_rate": 0.05, "weight_decay": 0.3, **o}),
}


def several(name: str) -> Callable[..., Any]:
    """A lazy optimizer for the vocabulary, another for the pairs, and Adam for all else."""

    def make(**options: Any) -> Any:
        rules = _O.OptimizerMap(_O.Adam(**{"learning_rate": 0.01, **options}))
        rules[".*vocabulary/embeddings"] = kdist.lazy(RULES[name](**options))
        rules[".*pairs/embeddings"] = kdist.lazy(RULES["adam"](**options))
        return _O.MultiOptimizer(rules)

    return make


PLACES: dict[str, Any] = {
    "host": on_host,
    "split": split("data2", "data"),
    "device": None,
}
ROWS = product(RULES, LEVELS, PLACES)
DEFAULT = [("adamw", "level0", "host"), ("adagrad", "level1", "device")]


@pytest.mark.parametrize(("name", "level", "place"), spread(ROWS, DEFAULT))
def test_levels(name: str, level: str, place: str) -> None:
    compare(
        TABLES,
        MESHES["data2"],
        optimizer=several(name),
        config=level_config(level),
        declare=PLACES[place],
    )


MESHED = product(("adam", "sgd"), ("data4", "model2", "data2_model2"), ("host", "device"))


@pytest.mark.parametrize(("name", "mesh", "place"), spread(MESHED, []))
def test_meshes(name: str, mesh: str, place: str) -> None:
    compare(TABLES, MESHES[mesh], optimizer=several(name), declare=PLACES[place])


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("level", LEVELS)
def test_for_all_weights(level: str, place: str) -> None:
    """Gradients that are not rows update as in Keras; so do those of rows cut by a layout."""
    compare(
        TABLES,
        MESHES["data2"],
        optimizer=lambda **options: kdist.lazy(RULES["adamw"](**options)),
        config=level_config(level),
        declare=PLACES[place],
    )


FEATURED = (
    *("clipnorm", "global_clipnorm", "clipvalue", "weight_decay", "schedule"),
    *("steps_per_execution", "run_eagerly", "loss_scale", "sample_weight"),
)


@pytest.mark.parametrize(
    ("feature", "place"), spread(product(FEATURED, PLACES), [("global_clipnorm", "host")])
)
def test_features(feature: str, place: str) -> None:
    """Eagerly, all are lazy: rows of positions, the same in all replicas, stay apart there."""
    optimizer, features = several("adagrad"), [FEATURES.get(feature)]
    if feature == "loss_scale":
        optimizer, features = _scaled, []
    elif feature == "run_eagerly":
        optimizer = lambda **options: kdist.lazy(RULES["adagrad"](**options))  # noqa: E731
    compare(
        TABLES,
        MESHES["data2"],
        optimizer=optimizer,
        features=features,
        declare=PLACES[place],
    )


def _scaled(**_: Any) -> Any:
    return _O.LossScaleOptimizer(several("adam")(), initial_scale=64.0, dynamic_growth_steps=2)


ACCUMULATED = product(
    ("adamw", "adagrad", "ftrl"), ("level0", "level1", "level3"), PLACES, ("data2", "data2_model2")
)


@pytest.mark.parametrize(
    ("name", "level", "place", "mesh"),
    spread(
        [row for row in ACCUMULATED if row[2] != "split" or row[3] == "data2"],
        [
            ("adamw", "level0", "host", "data2"),
            ("adagrad", "level1", "device", "data2"),
            ("adamw", "level3", "split", "data2"),
            ("ftrl", "level3", "host", "data2_model2"),
        ],
    ),
)
def test_accumulation(name: str, level: str, place: str, mesh: str) -> None:
    compare(
        TABLES,
        MESHES[mesh],
        optimizer=several(name),
        features=[FEATURES["gradient_accumulation"]],
        config=level_config(level),
        declare=PLACES[place],
    )


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("feature", ("global_clipnorm", "clipvalue", "run_eagerly", "weight_decay"))
def test_accumulation_with(feature: str, place: str) -> None:
    compare(
        TABLES,
        MESHES["data2"],
        optimizer=several("adam"),
        features=[FEATURES["gradient_accumulation"], FEATURES[feature]],
        declare=PLACES[place],
    )


@pytest.mark.long
@pytest.mark.parametrize("level", ("level0", "level2"))
@pytest.mark.parametrize("place", ("host", "device"))
def test_pipelines(level: str, place: str) -> None:
    compare(
        TABLES,
        {"pipe": 2, "data": 2},
        optimizer=several("adam"),
        config={"pipeline": kdist.PipelineConfig(micro_batches=2), **level_config(level)},
        declare=PLACES[place],
    )
