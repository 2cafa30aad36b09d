"""Dropout: the right rate, one mask along inner axes, another on each replica, repeatable.

No mask of a parallel run can equal a single device's, so the masks themselves are read. Each
example owns a block of a weight vector; with a loss that sums the outputs and one SGD step of rate
1, a weight falls by its mask entry times `1 / keep`.
"""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np
import pytest

from .case import Layout
from .harness import ENGINES, Run, precision
from .matrix import MESHES, spread
from .optimizer_zoo import OPTIMIZERS
from .zoo import MLP

EXAMPLES = 8
BLOCK = 64
RATE = 0.5
OUTPUTS = 4


class _Scale(keras.layers.Layer):
    """Multiplies by a weight per feature."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.factor = self.add_weight(shape=input_shape[1:], initializer="ones", name="factor")

    def call(self, inputs):
        return inputs * self.factor


def _model(seed: int | None) -> keras.Model:
    inputs = keras.Input((EXAMPLES * BLOCK,))
    x = keras.layers.Dropout(RATE, seed=seed, name="dropout")(_Scale(name="scale")(inputs))
    head = keras.layers.Dense(
        OUTPUTS, use_bias=False, kernel_initializer="ones", trainable=False, name="head"
    )
    return keras.Model(inputs, head(x))


class _Sum(keras.losses.Loss):
    """Sum of the predictions: every output sends a gradient of 1."""

    def __init__(self) -> None:
        super().__init__(reduction="sum", name="sum")

    def call(self, y_true, y_pred):
        return keras.ops.sum(y_pred, axis=-1)


def masks(
    engine: str,
    axes: Mapping[str, int],
    layout_map: Mapping[str, Layout] | None = None,
    seed: int | None = 7,
    steps: int = 2,
) -> np.ndarray:
    """Mask entries over `keep`, shape `(steps, examples, block)`, in units of 1 / keep."""
    with precision("float64"):
        keras.backend.clear_session()
        keras.utils.set_random_seed(11)
        run = Run(case=MLP, mesh_axes=axes, optimizer=OPTIMIZERS["sgd"], layout_map=layout_map)
        model = ENGINES[engine](_model(seed), run)
        model.compile(keras.optimizers.SGD(1.0), _Sum())
        x = np.kron(np.eye(EXAMPLES), np.ones(BLOCK))
        y = np.zeros((EXAMPLES, 1))
        found, before = [], 1.0
        for _ in range(steps):
            model.train_on_batch(x, y)
            after = np.array(keras.ops.convert_to_numpy(model.get_layer("scale").factor))
            found.append((before - after).reshape(EXAMPLES, BLOCK) * (1 - RATE) / OUTPUTS)
            before = after
    return np.stack(found)


LAYOUTS: Mapping[str, Mapping[str, Layout]] = {
    "whole": {"head/kernel": (None, "model")},
    "cut": {"scale/factor": ("model",), "head/kernel": ("model", None)},
}
ROWS = [(mesh, layout) for mesh in MESHES if "model" in mesh for layout in LAYOUTS]
ROWS += [(mesh, "none") for mesh in MESHES if "model" not in mesh]
DEFAULT = [("data4", "none"), ("data2_model2", "whole")]


@pytest.mark.parametrize(("mesh", "layout"), spread(ROWS, DEFAULT))
def test_masks_are_sound(mesh: str, layout: str, engine: str) -> None:
    axes = MESHES[mesh]
    found = masks(engine, axes, LAYOUTS.get(layout, {}))
    # Copies along an inner axis that disagreed would leave entries between 0 and 1.
    np.testing.assert_allclose(found, np.round(found), atol=1e-9)
    kept = np.round(found)
    assert set(np.unique(kept)) == {0.0, 1.0}
    # 1024 entries: a standard deviation of the mean is 0.016.
    assert abs(kept.mean() - (1 - RATE)) < 0.08
    rows = kept.reshape(-1, BLOCK)
    same = (rows[:, None, :] == rows[None, :, :]).mean(-1)
    np.fill_diagonal(same, 0.5)
    # Independent rows of 64 agree in half of the entries, +- 0.0625; equal rows in all of them.
    assert same.max() < 0.9, "two examples, replicas or steps share a mask"
    assert same.min() > 0.1, "two examples, replicas or steps have opposite masks"


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "model": 2}], ids=str)
def test_masks_repeat_from_the_seed(axes: Mapping[str, int], engine: str) -> None:
    layouts = LAYOUTS["whole"] if "model" in axes else {}
    first = masks(engine, axes, layouts)
    np.testing.assert_array_equal(first, masks(engine, axes, layouts))
    assert (first != masks(engine, axes, layouts, seed=8)).any()


def test_masks_without_a_seed_follow_the_global_seed(engine: str) -> None:
    first = masks(engine, {"data": 2}, seed=None)
    np.testing.assert_array_equal(first, masks(engine, {"data": 2}, seed=None))


def test_one_replica_without_inner_axes_equals_keras(engine: str) -> None:
    np.testing.assert_array_equal(masks(engine, {"data": 1}), masks("plain", {}))
