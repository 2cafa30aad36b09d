"""At levels 2 and 3 sums of gradients are used, and new values written, while others are made."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.graphs.live_tensors import LiveTensors
from kdist.optimizer import early
from kdist.runtime import step

import keras
import numpy as np
import pytest

from .memory_parts import KERNEL, ROWS, WIDTH, analysed, prepared

MESHES: dict[str, dict[str, int]] = {"data4": {"data": 4}, "data2_model2": {"data": 2, "model": 2}}
IN_TURN = {r".*_0/kernel": (None, "model"), r".*_1/kernel": ("model", None)}
"""Columns and rows in turn, as blocks of large models are cut: activations stay small."""


def stack(layers: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((WIDTH,))
    for n in range(layers):
        x = keras.layers.Dense(WIDTH, "tanh", use_bias=False, name=f"dense{n}_{n % 2}")(x)
    return keras.Model(inputs, x)


def made(
    level: int, mesh: str, layers: int, optimizer: Any = "adam", partition: Any = "slice"
) -> LiveTensors:
    axes = MESHES[mesh]
    model = prepared(
        level,
        mesh=kdist.mesh(**axes),
        layout_map=IN_TURN if "model" in axes else {},
        make=lambda: stack(layers),
        partition=partition,
    )
    model.compile(optimizer, "mse")
    batch = np.zeros((ROWS, WIDTH), np.float32)
    attached(model).prepare("train", (batch, batch, None))
    return analysed(model)


def parameters_alive(live: LiveTensors, device: str = "/device:CPU:0") -> float:
    """Of the most that is alive, in kernels: gradients, gathered weights, new values."""
    found = live.peak(device)
    return sum(t.nbytes for t in found.tensors if t.kind != "activation") / KERNEL


@pytest.mark.parametrize("partition", ["slice", "auto"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_deeper_model_needs_no_more_at_level_3(mesh: str, partition: str) -> None:
    found = (made(3, mesh, layers, partition=partition) for layers in (6, 12))
    shallow, deep = map(parameters_alive, found)
    assert deep <= shallow + 0.5


@pytest.mark.parametrize("partition", ["slice", "auto"])
def test_inner_axes_at_level_3_have_three_fifths_of_level_0(partition: str) -> None:
    whole = made(0, "data2_model2", 16, partition="auto")
    cut = made(3, "data2_model2", 16, partition=partition)
    for device in ("/device:CPU:0", "/device:CPU:3"):
        assert cut.peak(device).nbytes <= 0.6 * whole.peak(device).nbytes


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_without_the_edges_all_sums_may_wait(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "update_early", lambda reduction: 0)
    shallow, deep = (parameters_alive(made(3, mesh, layers)) for layers in (6, 12))
    assert deep > shallow + 1


def test_what_needs_all_sums_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What clips by the norm of all gradients cannot be early, and is left as it is."""
    added = []

    def noted(reduction: Any) -> int:
        added.append(early.update_early(reduction))
        *rounds, last = reduction.rounds
        assert all(one.sums for one in rounds), "each Reduce of the work has sums of its own"
        assert not last.sums, "nothing is left for the end"
        return added[-1]

    monkeypatch.setattr(step, "update_early", noted)
    made(3, "data4", 8)
    made(3, "data4", 8, keras.optimizers.Adam(global_clipnorm=1.0))
    made(3, "data4", 16, partition="auto")
    assert [n > 0 for n in added] == [True, False, True]
