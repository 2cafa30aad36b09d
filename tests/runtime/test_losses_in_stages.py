"""Losses over the whole batch, and layers that run op by op, in a pipeline."""

from __future__ import annotations

from collections import Counter
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.graphs.executed import PRODUCTS, largest, watch
from kdist.pipeline import get_schedule
from kdist.runtime.recorder import TimelineRecorder

import keras
import pytest
import tensorflow as tf

from .pipeline_parts import WIDTH, chain, data, own, recorded


def test_a_loss_over_the_whole_batch_refuses_other_orders() -> None:
    with pytest.raises(ValueError, match=r"'auto'.*Received: schedule='1f1b', and an overridden"):
        kdist.PipelineModel(own(), 2, 2, "1f1b")
    model = kdist.PipelineModel(chain(2), 2, 2, "zero_bubble")
    model.compile("sgd", keras.losses.Dice())
    with pytest.raises(ValueError, match="Received: schedule='zero_bubble', and the loss 'dice'"):
        model.train_on_batch(*data())
    kdist.PipelineModel(own(), 2, 1, "1f1b")  # one micro-batch has no other order
    kdist.PipelineModel(own(), 2, 2, "gpipe")


def test_a_loss_over_the_whole_batch_runs_all_forwards_once_and_first() -> None:
    products = []
    for make in (chain, own):
        model = kdist.PipelineModel(make(4), 2, 4, data=2)
        model.compile("sgd", "mse")
        attached(model).prepare("train", data())
        step = largest(watch(lambda model=model: model.train_on_batch(*data())))
        products.append(Counter(n.device for n in step.select(PRODUCTS)))
    assert products[0] == products[1]
    model = kdist.PipelineModel(own(4), 2, 4, data=2)
    model.compile("sgd", "mse")
    recorder = recorded(model)
    planned = get_schedule("gpipe", stages=2, micro_batches=4)
    for replica in range(2):
        assert recorder.executed(replica) == [list(row) for row in planned.stages]
    notes = "\n".join(model.plan().notes)
    assert "pipeline: gpipe, 2 stages" in notes
    assert "activations of 4 micro-batches at once, where 1f1b keeps (2, 1)" in notes
    model.compile("sgd", "mse")
    assert "pipeline: gpipe" in "\n".join(model.plan().notes)


def test_stages_stay_cut_under_a_loss_over_the_whole_batch() -> None:
    """Its stages compute what those of another loss do: parts, on every device."""
    products, collectives = [], []
    for make in (chain, own):
        config = kdist.ParallelConfig(
            mesh=kdist.mesh(pipe=2, data=2, model=2),
            layout_map={"layer[02]/kernel": (None, "model"), "layer[13]/kernel": ("model", None)},
            pipeline=kdist.PipelineConfig(micro_batches=2),
        )
        model = kdist.parallelize(make(4), config)
        model.compile("sgd", "mse")
        attached(model).prepare("train", data())
        step = largest(watch(lambda model=model: model.train_on_batch(*data())))
        products.append(Counter(n.device for n in step.select(PRODUCTS)))
        collectives.append(Counter((c.kind, c.shape) for c in kdist.inspect(model).collectives))
    assert products[0] == products[1] and len(products[1]) == 8
    assert collectives[0] == collectives[1] and collectives[1]
    assert not attached(model).fallbacks


def test_another_loss_gets_the_usual_schedule_back() -> None:
    model = kdist.PipelineModel(chain(2), 2, 2)
    for loss, schedule in ((keras.losses.Dice(), "gpipe"), ("mse", "1f1b")):
        model.compile("sgd", loss)
        model.train_on_batch(*data())
        assert attached(model).staged.schedule.name == schedule


class Looks(keras.layers.Layer):
    """Notes whether it is called with values."""

    def __init__(self) -> None:
        super().__init__(name="looks")
        self.seen: list[bool] = []

    def call(self, x: Any) -> Any:
        self.seen.append(tf.executing_eagerly())
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_layers_run_op_by_op(schedule: str) -> None:
    looks = Looks()
    x = inputs = keras.Input((WIDTH,))
    x = looks(keras.layers.Dense(WIDTH, name="first")(x))
    network = keras.Model(inputs, keras.layers.Dense(WIDTH, name="head")(x))
    model = kdist.PipelineModel(network, 2, 3, schedule, data=2)
    model.compile("sgd", "mse", run_eagerly=True)
    recorder = attached(model).recorder = TimelineRecorder()
    for _ in range(2):
        looks.seen.clear()
        model.train_on_batch(*data())
        assert sum(looks.seen) == 2 * 3  # replicas and micro-batches
    planned = get_schedule(schedule, stages=2, micro_batches=3)
    assert recorder.executed(1) == [list(row) for row in planned.stages]
    looks.seen.clear()
    model.evaluate(*data(), verbose=0)
    model.predict(data()[0], verbose=0)
    assert sum(looks.seen) == 2 * 2 * 3
