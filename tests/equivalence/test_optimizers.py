"""Every optimizer that Keras ships leaves the same weights and the same slots."""

from __future__ import annotations

import pytest

from .harness import compare
from .matrix import MESHES, product, spread
from .optimizer_zoo import OPTIMIZERS, shipped
from .zoo import BY_NAME

# An update that needs the whole of a cut tensor; test_pairwise has every optimizer by default.
DEFAULT = [("muon", "mlp", "data2_model2")]
ROWS = product(OPTIMIZERS, ("mlp", "gpt_tied", "dlrm"), ("data2", "data2_model2", "model4"))


@pytest.mark.parametrize(("optimizer", "name", "mesh"), spread(ROWS, DEFAULT))
def test_optimizer_equals_one_device(optimizer: str, name: str, mesh: str, engine: str) -> None:
    compare(BY_NAME[name], MESHES[mesh], optimizer=OPTIMIZERS[optimizer], engine=engine)


def test_no_shipped_optimizer_is_left_out() -> None:
    tested = {type(factory()).__name__ for factory in OPTIMIZERS.values()}
    assert tested == shipped()
