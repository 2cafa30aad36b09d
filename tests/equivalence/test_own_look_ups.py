"""Tables of layers that do more than look up equal one plain device: own calls, penalties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import pytest

from .case import Case
from .features import BY_NAME as FEATURES
from .harness import compare
from .host_tables import (
    CHUNKS,
    FROZEN_IN_CHUNKS,
    IN_CHUNKS,
    MASKED_BY_ROWS,
    OWN_CALLS,
    PENALIZED,
    TWICE,
    on_host,
)
from .matrix import MESHES, level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .test_split_tables import STAGED, split

OVER = {**{name: MESHES[name] for name in ("data2", "model2", "data2_model2")}, **STAGED}


def on(mesh: str, level: str) -> dict[str, Any]:
    """Settings of a level, and of stages where the mesh has them."""
    staged = {"pipeline": kdist.PipelineConfig(micro_batches=2)} if "pipe" in OVER[mesh] else {}
    return {**level_config(level), **staged}


OWN = [
    *product(("host",), ("level0", "level3"), OVER),
    ("data", "level0", "data2"),
    ("model", "level3", "data2_model2"),
    ("data", "level0", "pipe2_data2"),
]
DEFAULT = [
    ("host", "level0", "data2"),
    ("host", "level0", "data2_model2"),
    ("host", "level0", "pipe2_data2"),
    ("data", "level0", "data2"),
]


@pytest.mark.parametrize(("place", "level", "mesh"), spread(OWN, DEFAULT, quick=3))
def test_a_layer_with_a_call_of_its_own(place: str, level: str, mesh: str) -> None:
    compare(
        OWN_CALLS,
        OVER[mesh],
        optimizer=OPTIMIZERS["adam"],
        config=on(mesh, level),
        declare=on_host if place == "host" else split(mesh, place),
    )


@pytest.mark.parametrize(
    ("optimizer", "level", "mesh"),
    spread(
        product(("adam", "sgd_momentum"), ("level0", "level2", "level3"), OVER),
        [
            ("adam", "level0", "data2"),
            ("adam", "level3", "data2_model2"),
            ("adam", "level0", "pipe2_data2"),
        ],
        quick=3,
    ),
)
def test_a_penalty_over_all_rows(optimizer: str, level: str, mesh: str) -> None:
    compare(
        PENALIZED,
        OVER[mesh],
        optimizer=OPTIMIZERS[optimizer],
        config=on(mesh, level),
        declare=on_host,
    )


SPLIT = [
    ("data", "data2"),
    *(("model", mesh) for mesh in ("model2", "data2_model2", "pipe2_data2_model2")),
    ("data", "pipe2_data2"),
    ("data", "data4"),
    ("model", "model4"),
]


@pytest.mark.parametrize(
    ("optimizer", "level", "axis", "mesh"),
    spread(
        [
            (*row, *where)
            for row in product(("adam", "sgd_momentum"), ("level0", "level2", "level3"))
            for where in SPLIT
        ],
        [
            ("adam", "level0", "data", "data2"),
            ("adam", "level3", "model", "data2_model2"),
            ("adam", "level0", "data", "pipe2_data2"),
        ],
        quick=3,
    ),
)
def test_a_penalty_of_a_table_that_is_split(
    optimizer: str, level: str, axis: str, mesh: str
) -> None:
    compare(
        PENALIZED,
        {**MESHES, **STAGED}[mesh],
        optimizer=OPTIMIZERS[optimizer],
        config=on(mesh, level) if mesh in OVER else level_config(level),
        declare=split(mesh, axis),
    )


LOSS_SCALE = "loss_scale_sgd"
FEATURED = ("gradient_accumulation", "global_clipnorm", LOSS_SCALE, "run_eagerly")


def featured(feature: str) -> dict[str, Any]:
    """What a run takes; losses are scaled by the optimizer around the one that updates.

    Keras's `loss_scale_factor` fails on gradients of embeddings.
    """
    if feature == LOSS_SCALE:
        return {"optimizer": OPTIMIZERS[LOSS_SCALE]}
    return {"optimizer": OPTIMIZERS["adam"], "features": [FEATURES[feature]]}


@pytest.mark.parametrize(
    ("feature", "level", "mesh"),
    spread(
        product(FEATURED, ("level0", "level2"), OVER),
        [("gradient_accumulation", "level2", "data2")],
    ),
)
def test_a_penalty_with(feature: str, level: str, mesh: str) -> None:
    compare(
        PENALIZED,
        OVER[mesh],
        config=on(mesh, level),
        declare=on_host,
        **featured(feature),
    )


@pytest.mark.parametrize(
    ("place", "level", "mesh"),
    spread(
        [
            *product(("host",), ("level0", "level3"), OVER),
            ("data", "level0", "data2"),
            ("data", "level0", "pipe2_data2"),
        ],
        [("host", "level0", "pipe2_data2"), ("host", "level0", "data2")],
    ),
)
def test_masks_that_follow_from_rows(place: str, level: str, mesh: str) -> None:
    compare(
        MASKED_BY_ROWS,
        OVER[mesh],
        optimizer=OPTIMIZERS["sgd"],
        config=on(mesh, level),
        declare=on_host if place == "host" else split(mesh, place),
    )


@pytest.mark.long
@pytest.mark.parametrize("feature", FEATURED)
def test_a_penalty_of_a_table_that_is_split_with(feature: str) -> None:
    compare(
        PENALIZED,
        OVER["data2"],
        declare=split("data2", "data"),
        **featured(feature),
    )


STAGED_OVER = [name for name in OVER if "pipe" in name]


@pytest.mark.parametrize(
    ("place", "optimizer", "level", "mesh"),
    spread(
        product(("host", "data"), ("adam", "adagrad", "sgd"), ("level0", "level3"), STAGED_OVER),
        [
            ("host", "adagrad", "level0", "pipe2_data2"),
            ("data", "adam", "level0", "pipe2_data2"),
            ("host", "sgd", "level3", "pipe2_data2_model2"),
        ],
    ),
)
def test_look_ups_in_two_stages(place: str, optimizer: str, level: str, mesh: str) -> None:
    def declare(model: keras.Model) -> None:
        (on_host if place == "host" else split(mesh, place))(model)
        kdist.set_stage(model.get_layer("down"), 0)
        kdist.set_stage(model.get_layer("both"), 1)

    compare(
        TWICE,
        OVER[mesh],
        optimizer=OPTIMIZERS[optimizer],
        config=on(mesh, level),
        declare=declare,
    )


INTERLEAVED = kdist.PipelineConfig(micro_batches=2, schedule="interleaved", chunks=2)


def in_chunks(declare: Callable[[keras.Model], None]) -> Callable[[keras.Model], None]:
    """Declares where tables are, and the virtual stages of layers."""

    def declared(model: keras.Model) -> None:
        declare(model)
        for name, virtual in CHUNKS.items():
            kdist.set_stage(model.get_layer(name), virtual)

    return declared


@pytest.mark.parametrize(
    ("place", "optimizer", "level", "mesh"),
    spread(
        product(("host", "data"), ("adam", "sgd"), ("level0", "level3"), STAGED_OVER),
        [
            ("host", "adam", "level0", "pipe2_data2"),
            ("data", "sgd", "level3", "pipe2_data2"),
            ("host", "sgd", "level0", "pipe2_data2_model2"),
        ],
    ),
)
def test_look_ups_in_two_chunks_of_a_device(
    place: str, optimizer: str, level: str, mesh: str
) -> None:
    compare(
        IN_CHUNKS,
        OVER[mesh],
        optimizer=OPTIMIZERS[optimizer],
        config={**level_config(level), "pipeline": INTERLEAVED},
        declare=in_chunks(on_host if place == "host" else split(mesh, place)),
    )


@pytest.mark.long
@pytest.mark.parametrize("feature", [*FEATURED, "steps_per_execution", "ema_overwrite"])
@pytest.mark.parametrize("case", [IN_CHUNKS, FROZEN_IN_CHUNKS], ids=lambda case: case.name)
def test_look_ups_in_two_chunks_with(case: Case, feature: str) -> None:
    compare(
        case,
        OVER["pipe2_data2"],
        config={"pipeline": INTERLEAVED},
        declare=in_chunks(on_host),
        **featured(feature),
    )
