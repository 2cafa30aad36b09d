"""Every model at every level of optimizer parallelism, and without overlap, equals one device.

These are the ways in which a model runs in chunks (gradients leave early; from level 2 on they are
freed; at level 3 parameters are gathered) or whole (without overlap).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from .harness import Run, reference_engine, train
from .matrix import LEVELS, MESHES, level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .outcome import TOLERANCES, Outcome, check
from .zoo import BY_NAME

ROWS = product(BY_NAME, LEVELS[1:], ("data4", "data2_model2"))

BOTH = ("data4", "data2_model2")
# Every pair of model and mesh, and of level and mesh.
DEFAULT = [
    (name, LEVELS[1:][(i + j) % len(LEVELS[1:])], mesh)
    for i, name in enumerate(BY_NAME)
    for j, mesh in enumerate(BOTH)
]


@functools.cache
def _reference(name: str, replicas: int) -> Outcome:
    run = _run(name, {"data": replicas})
    return train(run, reference_engine(run))


def _run(name: str, mesh_axes: Any, **config: Any) -> Run:
    case = BY_NAME[name]
    return Run(
        case=case, mesh_axes=mesh_axes, optimizer=OPTIMIZERS["adam"], epochs=1, config=config
    )


@pytest.mark.parametrize(("name", "level", "mesh"), spread(ROWS, DEFAULT))
def test_model_at_level_equals_one_device(name: str, level: str, mesh: str, engine: str) -> None:
    run = _run(name, MESHES[mesh], **level_config(level))
    # What the replicas have to do with the reference is BatchNormalization alone.
    expected = _reference(name, run.replicas if run.case.has_batchnorm else 1)
    check(
        expected,
        train(run, engine),
        TOLERANCES["float64"],
        run.case.zero_gradient_paths,
        title=f"{run.title}, {level}",
    )
