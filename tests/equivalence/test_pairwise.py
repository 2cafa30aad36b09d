"""Model x mesh x optimizer x feature, so that every pair of choices meets at least once."""

from __future__ import annotations

import pytest

from .features import BY_NAME as FEATURES
from .harness import compare
from .matrix import MESHES, spread
from .optimizer_zoo import OPTIMIZERS
from .pairwise import Row, cover, pairs_of, spanning
from .zoo import BY_NAME

FACTORS = {
    "feature": tuple(FEATURES),
    "optimizer": tuple(OPTIMIZERS),
    "name": tuple(BY_NAME),
    "mesh": tuple(MESHES),
}


def allowed(row: Row) -> bool:
    """Whether plain Keras itself gives the combination a meaning."""
    chosen = "feature" in row and "name" in row
    if chosen and not FEATURES[row["feature"]].fits(BY_NAME[row["name"]]):
        return False
    wrapper = row.get("optimizer") in ("loss_scale_sgd", "multi")
    # LossScaleOptimizer and MultiOptimizer set their inner optimizers' loss scale themselves.
    return not (wrapper and row.get("feature") == "loss_scale_factor")


# Relative times of first steps, measured: where the default suite spends its time.
MODEL_COST = {"gpt": 4, "gpt_tied": 4, "encoder": 3, "dlrm": 2, "lstm": 2, "two_tower": 2}
MODEL_COST |= {"post_norm": 3, "lstm_attention": 4, "siamese": 1.5, "resnet": 1.5}
MESH_COST = {"data4": 1.3, "model2": 1.3, "data8": 2, "model4": 1.6, "data2_model2": 1.6}
MESH_COST["data2_model4"] = 2


def _cost(row: Row) -> float:
    if row["name"] in ("gpt", "encoder") and row["mesh"] == "model2":
        # Attention on cut heads is what the default suite must see of these models.
        return 2
    return MODEL_COST.get(row["name"], 1) * MESH_COST.get(row["mesh"], 1)


def _keys(rows: list[Row]) -> list[tuple[str, str, str, str]]:
    return [(row["name"], row["mesh"], row["optimizer"], row["feature"]) for row in rows]


COVERED = cover(FACTORS, allowed)
ROWS = _keys(COVERED)
# By default every model, mesh, optimizer and feature appears, each at least once.
DEFAULT = _keys(spanning(COVERED, _cost))


@pytest.mark.parametrize(("name", "mesh", "optimizer", "feature"), spread(ROWS, DEFAULT))
def test_combination_equals_one_device(
    name: str, mesh: str, optimizer: str, feature: str, engine: str
) -> None:
    compare(
        BY_NAME[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS[optimizer],
        engine=engine,
        features=(FEATURES[feature],),
    )


def test_every_feasible_pair_is_covered() -> None:
    covered: set = set()
    for name, mesh, optimizer, feature in ROWS:
        row = {"feature": feature, "optimizer": optimizer, "name": name, "mesh": mesh}
        assert allowed(row)
        covered |= pairs_of(row)
    names = list(FACTORS)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            for a in FACTORS[first]:
                for b in FACTORS[second]:
                    if allowed({first: a, second: b}):
                        assert ((first, a), (second, b)) in covered


def test_default_rows_reach_every_choice() -> None:
    for position, factor in enumerate(("name", "mesh", "optimizer", "feature")):
        assert {row[position] for row in DEFAULT} == set(FACTORS[factor])
    assert len(DEFAULT) < len(ROWS) / 10
