"""The checks of placement fail on an engine that is wrong while its losses stay right."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import kdist
from kdist.api import prepared_model
from kdist.dtensor.inputs import SliceInputs
from kdist.dtensor.sharded import Sharded
from kdist.optimizer import slice_gradients, update_jobs
from kdist.program.batch import SplitBatch
from kdist.runtime import plain_runner
from kdist.runtime.step import Step

import keras
import pytest
import tensorflow as tf

from .placement_checks import (
    FIRST,
    ROWS,
    Trained,
    X,
    Y,
    blocks,
    check_batch_is_cut,
    check_collectives,
    check_every_device_computes,
    check_every_part,
    check_transfers,
    check_updates,
    trained,
)
from .step_parts import first_step


@functools.cache
def plain_loss() -> float:
    """The first loss of the same model on one device."""
    model = blocks()
    model.compile("sgd", "mse")
    return float(model.evaluate(X, Y, batch_size=ROWS, verbose=0))


def assert_only(failing: Callable[[Trained], Any], run: Trained) -> None:
    """The loss is right, and a check fails."""
    loss = float(run.model.get_metrics_result()["loss"])
    assert loss == pytest.approx(plain_loss(), rel=1e-4)
    with pytest.raises(AssertionError):
        failing(run)


def test_work_on_the_first_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = property(lambda self: [self.topology.devices[0]] * self.topology.data_size)
    monkeypatch.setattr(plain_runner.PlainRunner, "devices", devices)
    assert_only(check_every_device_computes, trained({"data": 4}))


def test_a_moved_update_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    update = prepared_model.DistributedUpdate

    def moved(optimizer: Any, entries: Any, topology: Any, units: Any, *rest: Any, **options: Any):
        owner = ((units[0].owner[0] + 1) % 4, 0)
        first = dataclasses.replace(units[0], owner=owner)
        return update(optimizer, entries, topology, (first, *units[1:]), *rest, **options)

    monkeypatch.setattr(prepared_model, "DistributedUpdate", moved)
    assert_only(check_updates, trained({"data": 4}))


def test_optimizer_math_on_another_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an `apply` outside of its device's scope."""
    local = update_jobs.LocalOptimizer

    def elsewhere(logical: Any, device: str, *rest: Any) -> Any:
        one = local(logical, device, *rest)
        one.device = FIRST
        return one

    monkeypatch.setattr(update_jobs, "LocalOptimizer", elsewhere)
    assert_only(check_transfers, trained({"data": 4}))


@pytest.mark.parametrize("part", ["_total", "_logs"])
def test_a_stray_transfer_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(Step, part)

    def through_another_device(self: Step, *args: Any) -> Any:
        result = right(self, *args)
        with tf.device("/device:CPU:3"):
            return tf.nest.map_structure(lambda t: t + 0.0 * tf.sin(t), result)

    monkeypatch.setattr(Step, part, through_another_device)
    assert_only(check_transfers, trained({"data": 4}))


def test_a_gradient_that_is_sent_to_all_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an all-reduce where a reduce is planned."""
    right = slice_gradients.add_gradients

    def everywhere(*args: Any) -> Any:
        with tf.device("/device:CPU:2"):
            there = tf.reduce_sum(tf.sin(right(*args)))
        return right(*args) + 0.0 * there

    monkeypatch.setattr(slice_gradients, "add_gradients", everywhere)
    assert_only(check_transfers, trained({"data": 4}))


def test_a_whole_batch_for_every_slice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Step.split

    def cut_there(self: Step, *args: Any) -> SplitBatch:
        batch = right(self, *args)
        rows = ROWS // self.topology.data_size
        parts = []
        for r, device in enumerate(self.runner.devices):
            with tf.device(device):
                x, y, _ = (None if t is None else t[r * rows : (r + 1) * rows] for t in batch.whole)
            parts.append((x, y, None))
        return dataclasses.replace(batch, parts=parts)

    monkeypatch.setattr(Step, "split", cut_there)
    assert_only(lambda run: check_batch_is_cut(run, X.nbytes + Y.nbytes), trained({"data": 4}))


def test_weights_that_pass_the_first_device_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As results of a `tf.function` do."""
    right = SliceInputs.state_of

    def state_of(self: SliceInputs, s: int, unread: Any = ()) -> Any:
        params, carried = right(self, s, unread)
        with tf.device("/device:CPU:0"):
            there = [
                Sharded(tuple(tf.identity(part) for part in one.parts), one.layout)
                for one in params
            ]
        return there, carried

    monkeypatch.setattr(SliceInputs, "state_of", state_of)
    run = trained({"data": 2, "model": 2})
    assert_only(check_transfers, run)


def test_another_cut_is_found() -> None:
    cuts = {r".*up_\d/kernel": ("model", None), r".*down_\d/kernel": (None, "model")}
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=cuts)
    model = kdist.parallelize(blocks(), config)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    run = Trained(model, *first_step(model, X, Y))
    assert_only(check_collectives, run)
    assert_only(check_every_part, run)
