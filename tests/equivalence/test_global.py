"""`batch_semantics="global"`: what couples rows sees the whole batch, as on one device."""

from __future__ import annotations

from typing import Any

import pytest

from .coupled import LAYERS, case
from .harness import compare
from .matrix import product, spread
from .optimizer_zoo import OPTIMIZERS
from .zoo import BY_NAME

MESHES = {"data4": {"data": 4}, "data2_model2": {"data": 2, "model": 2}}


@pytest.mark.parametrize(
    ("name", "mesh"), spread(product(BY_NAME, MESHES), [("resnet", "data2_model2")])
)
def test_model_equals_one_device(name: str, mesh: str, engine: str) -> None:
    # Batches of 8, 8 and 3 examples: one that does not divide, and is smaller than four replicas.
    compare(
        BY_NAME[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        reference="plain",
        samples=19,
        config={"batch_semantics": "global"},
    )


# Layers in which rows meet ------------------------------------------------------------------------


def _compare_coupled(name: str, mesh: str, engine: str, **options: Any) -> None:
    compare(
        case(name),
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        reference="plain",
        samples=19,
        epochs=1,
        **options,
    )


@pytest.mark.parametrize(("name", "mesh"), spread(product(LAYERS, MESHES), []))
def test_layer_that_couples_rows_equals_one_device(name: str, mesh: str, engine: str) -> None:
    _compare_coupled(name, mesh, engine, config={"batch_semantics": "global"})
