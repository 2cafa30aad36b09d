"""Models with a `train_step` of their own learn over a mesh what they learn on one device."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import kdist
from kdist.calls.over_mesh import OverMesh

import keras
import numpy as np
import pytest

from .outcome import check_arrays
from .own_steps import ZOO

CUTS = {
    "(.*/)?up/kernel": (None, "model"),
    "(.*/)?up/bias": ("model",),
    "(.*/)?down/kernel": ("model", None),
    "(.*/)?words/embeddings": (None, "model"),
}
AGAIN = kdist.RecomputeConfig(layers=["(|.*/)(?:up|down)"])
"""Both products of a network run again as one block."""
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data 3": ({"data": 3}, {}),
    "data 2 x model 2": ({"data": 2, "model": 2}, {}),
    "data 2, level 1": ({"data": 2}, {"level": 1}),
    "data 2 x model 2, level 3": ({"data": 2, "model": 2}, {"level": 3}),
    "data 2 x model 2, global": ({"data": 2, "model": 2}, {"batch_semantics": "global"}),
    "model 2": ({"model": 2}, {}),
    "data 3, recompute": ({"data": 3}, {"recompute": AGAIN}),
    "data 2 x model 2, recompute": ({"data": 2, "model": 2}, {"recompute": AGAIN}),
}
DEFAULT = {
    "data 3": (
        "around, loss scaling",
        "normalized",
        "penalized",
        "autoencoder",
        "distillation",
        "float8",
    ),
    "data 2 x model 2, level 3": ("taped", "tables", "adversaries", "views", "structured"),
    "model 2": ("two outputs",),
    "data 2 x model 2, recompute": ("structured", "adversaries"),
}
"""The rows of the default suite."""

pytestmark = pytest.mark.usefixtures("float64")


def configuration(mesh: str, model: keras.Model) -> kdist.ParallelConfig:
    """What is said of a mesh, with the cuts that the model's weights have."""
    axes, options = MESHES[mesh]
    options = dict(options)
    cuts: dict[str, Any] = {}
    if "model" in axes:
        paths = [v.path for v in model.variables]
        cuts = {p: cut for p, cut in CUTS.items() if any(re.fullmatch(p, path) for path in paths)}
    level = options.pop("level", 0)
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)
    return kdist.ParallelConfig(
        mesh=kdist.mesh(**axes), layout_map=cuts, optimizer=optimizer, **options
    )


def trained(name: str, mesh: str = "") -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Logs of two epochs, and of an evaluation if it has one; weights and seeds."""
    keras.utils.set_random_seed(0)
    case = ZOO[name]
    model, data = case.build(), case.data()
    if mesh:
        known = model
        if not model.variables:  # built by its first step: another one tells the paths
            known = case.build()
            known.compile(**case.options())
            known.fit(*(one[:4] for one in data), verbose=0)
        kdist.parallelize(model, configuration(mesh, known))
    model.compile(**case.options())
    logs = model.fit(*data, batch_size=10, epochs=2, verbose=0, shuffle=False).history
    found = {key: np.asarray(values, float) for key, values in logs.items()}
    if "test_step" in vars(type(model)):
        evaluated = model.evaluate(*data, batch_size=10, verbose=0, return_dict=True)
        found |= {f"test {key}": np.asarray(value, float) for key, value in evaluated.items()}
        found["predicted"] = model.predict(data[0], batch_size=10, verbose=0)
    return found, {str(n): v.numpy().astype(float) for n, v in enumerate(model.variables)}


@functools.cache
def one_device(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    return trained(name)


ROWS = [
    pytest.param(name, mesh, marks=() if name in DEFAULT.get(mesh, ()) else pytest.mark.wide)
    for name in ZOO
    for mesh in MESHES
]


@pytest.mark.parametrize(("name", "mesh"), ROWS)
def test_own_steps_equal_one_device(name: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    run = OverMesh.__call__

    def counted(call: OverMesh) -> Any:
        calls.append(len(call.functions))
        return run(call)

    monkeypatch.setattr(OverMesh, "__call__", counted)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        logs, weights = trained(name, mesh)
    replicas = 1 if "global" in mesh else MESHES[mesh][0].get("data", 1)
    if name == "normalized":  # synchronized: rows of all replicas are one batch
        replicas = 1
    assert calls and set(calls) == {replicas}
    texts = [str(one.message) for one in said]
    assert any("gradient of a gradient" in text for text in texts) == (name == "critics"), texts
    assert not any("gathered weights" in text for text in texts), texts
    expected, its_weights = one_device(name)
    check_arrays("logs", expected, logs)
    check_arrays("weights", its_weights, weights)
