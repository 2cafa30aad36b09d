"""Training with optimizer state and updates on the host equals one plain device."""

from __future__ import annotations

from typing import Any

import kdist

import pytest

from .features import BY_NAME as FEATURES
from .harness import compare
from .matrix import MESHES, product, spread
from .optimizer_zoo import OPTIMIZERS
from .zoo import BY_NAME


def on_host(level: int, partition: Any = "auto", **options: Any) -> dict[str, Any]:
    cut = {"threshold_kb": 0, "partition": partition} if level else {}
    return {"optimizer": kdist.OptimizerConfig(level=level, state_on="host", **cut), **options}


ROWS = product(
    ("gpt_tied", "dlrm", "mlp"), (0, 1, 2, 3), ("data2", "data4", "model2", "data2_model2")
)


@pytest.mark.parametrize(
    ("name", "level", "mesh"), spread(ROWS, [("gpt_tied", 3, "data2_model2"), ("dlrm", 0, "data2")])
)
def test_levels(name: str, level: int, mesh: str) -> None:
    case, config = BY_NAME[name], on_host(level)
    compare(case, MESHES[mesh], optimizer=OPTIMIZERS["adam"], config=config)


@pytest.mark.parametrize(
    ("partition", "mesh"),
    spread(product(("slice", "parameter"), ("data2", "data2_model2")), [("parameter", "data2")]),
)
def test_weights_are_stored_as_partition_says(partition: str, mesh: str) -> None:
    config = on_host(3, partition=partition)
    compare(BY_NAME["mlp"], MESHES[mesh], optimizer=OPTIMIZERS["adam"], config=config)


STAGED = product((0, 3), ({"pipe": 2}, {"pipe": 2, "data": 2}, {"pipe": 2, "data": 2, "model": 2}))


@pytest.mark.long
@pytest.mark.parametrize(("level", "mesh"), STAGED)
def test_pipelines(level: int, mesh: dict[str, int]) -> None:
    config = on_host(level, pipeline=kdist.PipelineConfig(micro_batches=2))
    compare(BY_NAME["gpt_tied"], mesh, optimizer=OPTIMIZERS["adam"], config=config)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str) -> None:
    config = on_host(3)
    compare(BY_NAME["mlp"], MESHES["data2"], optimizer=OPTIMIZERS[optimizer], config=config)


FEATURED = ("gradient_accumulation", "global_clipnorm", "ema_overwrite", "constraint", "frozen")


@pytest.mark.long
@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize("feature", FEATURED)
def test_features(feature: str, level: int) -> None:
    case, features = BY_NAME["mlp"], [FEATURES[feature]]
    config = on_host(level)
    compare(case, MESHES["data2"], optimizer=OPTIMIZERS["adam"], features=features, config=config)
