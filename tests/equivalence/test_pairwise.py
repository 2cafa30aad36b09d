"""Model x mesh x optimizer x feature, so that every pair of choices meets at least once."""

from __future__ import annotations

import pytest

from .features import BY_NAME as FEATURES
from .harness import compare
from .matrix import MESHES, spread
from .optimizer_zoo import OPTIMIZERS
from .pairwise import Row, cover, pairs_of
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


def _rows() -> list[tuple[str, str, str, str]]:
    return [
        (row["name"], row["mesh"], row["optimizer"], row["feature"])
        for row in cover(FACTORS, allowed)
    ]


ROWS = _rows()
# Every 100th row: a handful that changes only when a factor does.
DEFAULT = ROWS[7::100]


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
