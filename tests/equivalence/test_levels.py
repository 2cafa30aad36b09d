"""Every optimizer at every level of optimizer parallelism equals one device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from .case import CLASSES
from .features import BY_NAME as FEATURES
from .harness import compare
from .matrix import MESHES, product, spread
from .odd_sizes import ODD
from .optimizer_zoo import OPTIMIZERS
from .zoo import BY_NAME

CASES = {**BY_NAME, "odd": ODD}
LEVELS = (1, 2, 3)
MODELS = ("mlp", "gpt_tied", "dlrm", "odd")

# Ways to spread a parameter that `test_every_level` has with Adam alone.
DEFAULT = [
    ("muon", 3, "mlp", "data2_model2"),
    ("sgd_momentum", 2, "dlrm", "data4"),
    ("sgd", 1, "odd", "data4"),
    ("adam", 2, "odd", "data2_model2"),
    ("adagrad", 3, "odd", "data4"),
    ("adamw", 1, "odd", "data2_model2"),
    ("lamb", 3, "odd", "data2_model2"),
    ("adam", 3, "odd", "data3"),
    ("sgd", 1, "dlrm", "data3"),
]
ROWS = product(OPTIMIZERS, LEVELS, MODELS, ("data4", "data2_model2", "data3"))
AXES = {**MESHES, "data3": {"data": 3}}
"""Three replicas divide next to nothing: what they share are whole parameters."""

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
    ("gradient_accumulation", 2, "mlp", "data4"),
    ("global_clipnorm", 3, "mlp", "data2_model2"),
    ("ema", 1, "mlp", "data2_model2"),
    ("gradient_accumulation", 1, "odd", "data4"),
    ("global_clipnorm", 2, "odd", "data4"),
    ("ema_overwrite", 1, "odd", "data2_model2"),
    ("weight_decay_exclude", 3, "odd", "data4"),
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
        CASES[name],
        AXES[mesh],
        optimizer=OPTIMIZERS[optimizer],
        engine=engine,
        config=config(level),
    )


@pytest.mark.parametrize("partition", ["auto", "slice"])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_odd_is_shared_evenly(level: int, partition: Any) -> None:
    """Optimizer state, and at level 3 parameters, whatever the first dim of a weight is."""
    import kdist

    model = ODD.build()
    settings = kdist.ParallelConfig(mesh=kdist.mesh(data=4), **config(level, partition=partition))
    kdist.parallelize(model, settings)
    model.compile("adam", "mse")
    model.train_on_batch(ODD.data(0, 8)[0], np.zeros((8, CLASSES)))
    memory = kdist.inspect(model).memory
    elements = sum(math.prod(one.shape) for one in model.weights)
    small = 8 * (5 + CLASSES)  # bytes of both moments of the two biases that do not divide
    even = elements * 8 / 4
    assert all(abs(one.slots - even) <= small for one in memory)
    if level == 3:
        assert all(abs(one.parameters - even / 2) <= small for one in memory)


@pytest.mark.parametrize(
    ("feature", "level", "name", "mesh"),
    spread(product(COMPOSED, LEVELS, ("mlp", "odd"), ("data4", "data2_model2")), DEFAULT_COMPOSED),
)
def test_level_composes(feature: str, level: int, name: str, mesh: str, engine: str) -> None:
    compare(
        CASES[name],
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


@pytest.mark.parametrize(
    ("level", "mesh"),
    spread(
        product(LEVELS, ("pipe2_data2", "pipe2_data2_model2")),
        [(2, "pipe2_data2"), (1, "pipe2_data2_model2"), (3, "pipe2_data2")],
        quick=1,
    ),
)
def test_replicas_of_stages_share_what_is_odd(level: int, mesh: str, engine: str) -> None:
    import kdist

    axes = {"pipe": 2, "data": 2, **({"model": 2} if "model" in mesh else {})}
    stages = kdist.PipelineConfig(micro_batches=2)
    compare(
        ODD,
        axes,
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        config={**config(level), "pipeline": stages},
    )


@pytest.mark.parametrize(
    ("level", "dtype", "mesh"),
    spread(
        product(LEVELS, ("mixed_float16", "mixed_bfloat16"), ("data4", "data2_model2")),
        [(1, "mixed_float16", "data4"), (3, "mixed_bfloat16", "data2_model2")],
        quick=1,
    ),
)
def test_what_is_odd_in_mixed_precision(level: int, dtype: str, mesh: str, engine: str) -> None:
    compare(
        ODD,
        MESHES[mesh],
        optimizer=OPTIMIZERS["loss_scale_sgd" if dtype == "mixed_float16" else "sgd_momentum"],
        engine=engine,
        dtype=dtype,
        config=config(level),
    )
