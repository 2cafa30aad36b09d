"""Each feature that changes a loss, a gradient or an update, alone."""

from __future__ import annotations

import pytest

from .features import BY_NAME as FEATURES
from .harness import compare
from .matrix import MESHES, spread
from .optimizer_zoo import OPTIMIZERS
from .zoo import BY_NAME, ZOO

# Where a feature behaves differently from model to model, its long rows name the model.
ROWS = [
    (feature.name, case.name, mesh)
    for feature in FEATURES.values()
    for case in ZOO
    for mesh in ("data4", "data2_model2")
    if feature.fits(case) and case.name in ("mlp", "encoder", "resnet", "two_tower", "dlrm")
]
# What must be whole, or counted once, on cut weights; test_pairwise has every feature by default.
DEFAULT = [
    ("kernel_regularizer", "mlp", "data2_model2"),
    ("constraint", "mlp", "data2_model2"),
    ("global_clipnorm", "mlp", "data2_model2"),
]


@pytest.mark.parametrize(("feature", "name", "mesh"), spread(ROWS, DEFAULT))
def test_feature_equals_one_device(feature: str, name: str, mesh: str, engine: str) -> None:
    compare(
        BY_NAME[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS["adamw" if feature.startswith("weight_decay") else "adam"],
        engine=engine,
        features=(FEATURES[feature],),
    )
