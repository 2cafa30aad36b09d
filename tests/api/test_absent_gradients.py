"""Loops in which not every step has a gradient of every weight equal a plain optimizer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kdist

import keras
import pytest
import tensorflow as tf

from ..parity import MESHES, assert_every_copy, assert_same_weights, both_meshes, data, mlp, pair
from .loop_parts import plain_gradients

pytestmark = pytest.mark.usefixtures("float64")

ALL, DOWN, UP = (1, 1, 1, 1), (0, 0, 1, 1), (1, 0, 0, 0)
FIT: dict[str, Any] = {"batch_size": 8, "verbose": 0, "shuffle": False}


def by_hand(model: keras.Model, kept: Sequence[int], parallel: bool) -> None:
    """A step with the gradients of some weights alone."""
    x, y = map(tf.constant, data(8))
    find = kdist.gradients if parallel else plain_gradients
    found = [g if keep else None for g, keep in zip(find(model, x, y)[1], kept)]
    if parallel:
        kdist.apply_gradients(model, found)
        return
    there = [(g, v) for g, v in zip(found, model.trainable_variables) if g is not None]
    model.optimizer.apply_gradients(there)


def models(axes: dict[str, int], options: dict[str, Any], **config: Any) -> Any:
    """Plain and parallel, each after a first `fit`."""
    both = pair(axes, mlp, **config)
    for model in both:
        model.compile(keras.optimizers.Adam(0.01, **options), "mse")
        model.fit(*data(16), **FIT)
    return both


def check(both: Any) -> None:
    assert_same_weights(*both)
    for variable in both[1].weights:
        assert_every_copy(variable, variable.numpy())


@both_meshes
@pytest.mark.parametrize("level", [0, 1, 3])
def test_between_fits(axes, level):
    both = models(axes, {}, optimizer=kdist.OptimizerConfig(level=level))
    for model, parallel in zip(both, (False, True)):
        for kept in (DOWN, UP, ALL):
            by_hand(model, kept, parallel)
            model.fit(*data(16), **FIT)
    check(both)


OPTIONS = {
    "decay_and_averages": {"weight_decay": 0.1, "use_ema": True, "ema_overwrite_frequency": 2},
    "sums": {"gradient_accumulation_steps": 2, "global_clipnorm": 0.1},
    "amsgrad": {"amsgrad": True, "clipvalue": 0.01},
}


@both_meshes
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_functions_that_take_turns(axes, level, name):
    config = kdist.OptimizerConfig(level=level, threshold_kb=0) if level else None
    both = models(axes, OPTIONS[name], **({"optimizer": config} if config else {}))
    for model, parallel in zip(both, (False, True)):
        steps = {
            kept: tf.function(lambda m=model, k=kept, p=parallel: by_hand(m, k, p))
            for kept in (ALL, DOWN, UP)
        }
        for kept in (ALL, DOWN, UP, ALL, DOWN, ALL, UP):
            steps[kept]()
    check(both)


def test_codes_of_what_has_no_gradient_stay():
    form = kdist.StateFormatConfig(first="1-6-9", second="0-6-10", rounding="stochastic")
    _, parallel = models(MESHES[0], {}, optimizer=kdist.OptimizerConfig(state_format=form))
    before = [v.numpy() for v in parallel.optimizer.variables[2:6]]
    by_hand(parallel, DOWN, True)
    after = [v.numpy() for v in parallel.optimizer.variables[2:6]]
    for old, new in zip(before, after, strict=True):
        assert (old == new).all()
