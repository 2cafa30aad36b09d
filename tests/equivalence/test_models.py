"""Every kind of model, on every kind of mesh, equals one plain device."""

from __future__ import annotations

import pytest

from .harness import compare
from .matrix import MESHES, product, spread
from .optimizer_zoo import OPTIMIZERS
from .zoo import BY_NAME

# test_pairwise has every model and every mesh by default.
DEFAULT = [("mlp", "data2_model2")]


@pytest.mark.parametrize(("name", "mesh"), spread(product(BY_NAME, MESHES), DEFAULT))
def test_model_on_mesh_equals_one_device(name: str, mesh: str, engine: str) -> None:
    compare(BY_NAME[name], MESHES[mesh], optimizer=OPTIMIZERS["adam"], engine=engine)


def test_a_dataset_equals_arrays(engine: str) -> None:
    compare(
        BY_NAME["two_tower"],
        {"data": 2},
        optimizer=OPTIMIZERS["sgd_momentum"],
        engine=engine,
        source="dataset",
    )


BATCH_MESHES = {"batch2": {"batch": 2}, "batch2_model2": {"batch": 2, "model": 2}}


@pytest.mark.parametrize(
    ("name", "mesh"), spread(product(BY_NAME, BATCH_MESHES), [("mlp", "batch2")])
)
def test_axis_called_batch_is_the_data_axis(name: str, mesh: str, engine: str) -> None:
    compare(BY_NAME[name], BATCH_MESHES[mesh], optimizer=OPTIMIZERS["adam"], engine=engine)
