"""Every optimizer at every level of optimizer parallelism equals one device."""

from __future__ import annotations

from typing import Any

import pytest

from .features import BY_NAME as FEATURES
from .harness import compare
from .matrix import MESHES, product, spread
from .optimizer_zoo import OPTIMIZERS
from .zoo import BY_NAME

LEVELS = (1, 2, 3)
MODELS = ("mlp", "gpt_tied", "dlrm")

# Ways to spread a parameter that `test_every_level` has with Adam alone.
DEFAULT = [
    ("muon", 3, "mlp", "data2_model2"),
    ("sgd_momentum", 2, "dlrm", "data4"),
]
ROWS = product(OPTIMIZERS, LEVELS, MODELS, ("data4", "data2_model2"))

COMPOSED = (
    "gradient_accumulation",
    "global_clipnorm",
    "clipnorm",
    "constraint",
    "ema",
    "ema_overwrite",
    "weight_decay_exclude",
)
DEFAULT_COMPOSED = [
    ("gradient_accumulation", 2, "data4"),
    ("global_clipnorm", 3, "data2_model2"),
    ("ema", 1, "data2_model2"),
]


def config(level: int, **options: Any) -> dict[str, Any]:
    import kdist

    # Every parameter, however small: these models have no big ones.
    return {"optimizer": kdist.OptimizerConfig(level=level, threshold_kb=0, **options)}


@pytest.mark.parametrize(("optimizer", "level", "name", "mesh"), spread(ROWS, DEFAULT))
def test_level_equals_one_device(
    optimizer: str, level: int, name: str, mesh: str, engine: str
) -> None:
    compare(
        BY_NAME[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS[optimizer],
        engine=engine,
        config=config(level),
    )


@pytest.mark.parametrize(
    ("feature", "level", "mesh"),
    spread(product(COMPOSED, LEVELS, ("data4", "data2_model2")), DEFAULT_COMPOSED),
)
def test_level_composes(feature: str, level: int, mesh: str, engine: str) -> None:
    compare(
        BY_NAME["mlp"],
        MESHES[mesh],
        optimizer=OPTIMIZERS["adamw"],
        engine=engine,
        features=[FEATURES[feature]],
        config=config(level),
    )


@pytest.mark.long
@pytest.mark.parametrize("partition", ["slice", "parameter"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mesh", ["data2", "data8", "data2_model4"])
def test_partition_equals_one_device(partition: Any, level: int, mesh: str, engine: str) -> None:
    compare(
        BY_NAME["gpt"],
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        config=config(level, partition=partition),
    )


ACCUMULATING = product(
    ("adamw", "lamb", "loss_scale_sgd"), LEVELS, (False, True), ("data4", "data2_model2")
)


@pytest.mark.parametrize(
    ("optimizer", "level", "shard", "mesh"),
    spread(
        ACCUMULATING,
        [("adamw", 3, True, "data4"), ("loss_scale_sgd", 1, False, "data2_model2")],
    ),
)
def test_accumulated_gradients_equal_one_device(
    optimizer: str, level: int, shard: bool, mesh: str, engine: str
) -> None:
    """The sums of an unfinished accumulation are state, and compared too."""
    make = OPTIMIZERS[optimizer]

    def accumulating(**options: Any) -> Any:
        found = make(**options)
        inner = getattr(found, "inner_optimizer", found)
        inner.gradient_accumulation_steps = 3
        return found

    compare(
        BY_NAME["mlp"],
        MESHES[mesh],
        optimizer=accumulating,
        engine=engine,
        config=config(level, gradient_accumulation_shard=shard),
    )


ONE_EXCHANGE = product(
    ("mlp", "gpt_tied", "resnet", "encoder", "dlrm"),
    (0, 1),
    ("none", "global_clipnorm", "gradient_accumulation", "ema_overwrite"),
)


@pytest.mark.parametrize(
    ("name", "level", "feature"),
    # test_every_level has a model with attention.
    spread(ONE_EXCHANGE, [("mlp", 1, "gradient_accumulation")]),
)
def test_one_exchange_equals_one_device(name: str, level: int, feature: str, engine: str) -> None:
    import kdist

    compare(
        BY_NAME[name],
        MESHES["data4"],
        optimizer=OPTIMIZERS["adamw"],
        engine=engine,
        features=[FEATURES[feature]],
        config={**config(level), "fusion": kdist.FusionConfig(overlap=False)},
    )
