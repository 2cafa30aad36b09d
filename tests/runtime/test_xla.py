"""What XLA compiles where slices have several devices, read from executed graphs."""

from __future__ import annotations

from typing import Any

import kdist
from kdist._compat import keras_xla
from kdist._compat.run_metadata import function_graphs
from kdist.api.attached import attached

import keras
import numpy as np
import pytest

LAYOUTS = {
    r".*up/kernel": (None, "model"),
    r".*up/bias": ("model",),
    r".*down/kernel": ("model", None),
}


def model(dropout: float = 0.0) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="gelu", name="up"),
            layers.Dropout(dropout, seed=3),
            layers.Dense(8, name="down"),
            layers.LayerNormalization(),
            layers.Dense(4),
        ]
    )


def trained(axes: dict[str, int], xla: bool | str, dropout: float = 0.0, **options: Any) -> Any:
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes), layout_map=LAYOUTS if "model" in axes else {}, **options
    )
    found = kdist.parallelize(model(dropout), config)
    found.compile("adam", "mse", jit_compile=xla)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 8)), rng.normal(size=(16, 4))
    # Clusters are compiled from their second call on.
    return found, lambda: found.fit(x, y, batch_size=4, shuffle=False, verbose=0)


def compiled_on(call: Any) -> set[str]:
    graphs = function_graphs(call)
    nodes = [n for g in graphs for p in g.partition_graphs for n in p.node]
    return {n.device.rpartition("/device:")[2] for n in nodes if n.op == "_XlaRun"}


PIPE = kdist.PipelineConfig(micro_batches=2)
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data": (
        {"data": 2, "model": 2},
        {"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0)},
    ),
    "pipe": ({"pipe": 2, "model": 2}, {"pipeline": PIPE}),
    "model": ({"model": 2}, {}),
    "global": ({"data": 2, "model": 2}, {"batch_semantics": "global"}),
}
LONG = ("model", "global")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in CASES]
)
def test_every_device_runs_clusters_and_draws_the_same_masks(name: str, float64: None) -> None:
    axes, options = CASES[name]
    weights, where = [], []
    for xla in (False, True):
        one, fit = trained(axes, xla, dropout=0.4, **options)
        where.append(compiled_on(fit))
        weights.append(one.get_weights())
    assert where == [set(), {f"CPU:{k}" for k in range(int(np.prod(list(axes.values()))))}]
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("level", "told"), [(0, True), (2, False)])
def test_whole_programs_are_told(level: int, told: bool) -> None:
    options = {"optimizer": kdist.OptimizerConfig(level=level, threshold_kb=0)} if level else {}
    one, _ = trained({"data": 2}, True, **options)
    assert told == any("XLA compiles each replica's program whole" in n for n in one.plan().notes)


def test_recompute_beside_xla_is_told() -> None:
    one, _ = trained({"data": 2}, True, recompute=kdist.RecomputeConfig(layers=["up"]))
    assert any("jit_compile=True with recompute" in n for n in one.plan().notes)


@pytest.mark.parametrize(
    ("axes", "level", "expected"),
    [
        ({"data": 2}, 0, True),
        ({"data": 2}, 3, "auto"),
        ({"data": 2, "model": 2}, 0, "auto"),
    ],
)
def test_auto_is_what_keras_makes_of_it_where_programs_are_whole(
    axes: dict[str, int], level: int, expected: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if there were a GPU; without one, it is no XLA."""
    options = {"optimizer": kdist.OptimizerConfig(level=level, threshold_kb=0)} if level else {}
    plain, fit_plain = trained(axes, "auto", **options)
    assert attached(plain).jit_compile == "auto"
    monkeypatch.setattr(keras_xla, "compiles_by_itself", lambda model: True)
    one, fit = trained(axes, "auto", **options)
    assert attached(one).jit_compile == expected
    if expected is True:
        a, b = fit_plain().history["loss"], fit().history["loss"]
        np.testing.assert_allclose(a, b, rtol=1e-5)
