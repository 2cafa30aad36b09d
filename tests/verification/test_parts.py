"""Each part of the loss, and the outputs of training, are compared by themselves."""

from typing import Any

import kdist
from kdist.verification import trial

import keras
import numpy as np
import pytest
from keras import layers, ops

from ..equivalence.matrix import spread
from .models import MESHES, batch, small

ROWS = 13  # divides by no mesh here


class Added(layers.Layer):
    """Adds the mean of its squares, and a number, to the loss."""

    offset = 0.0

    def call(self, inputs):
        self.add_loss(ops.mean(ops.square(inputs)) + self.offset)
        return inputs


class Shifted(layers.Layer):
    """Adds a number to what goes through, in training."""

    offset = 0.0

    def call(self, inputs, training=False):
        return inputs + self.offset if training else inputs


class Coupled(keras.losses.Loss):
    """A root over the whole batch."""

    def call(self, y_true, y_pred):
        return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def two_outputs(mesh: str, loss: Any = "mse", **config: Any) -> keras.Model:
    """A model with every kind of loss, and an output that no loss looks at."""
    inputs = keras.Input((6,), name="features")
    penalty = {"kernel_regularizer": "l2", "activity_regularizer": "l1"}
    x = layers.Dense(8, activation="tanh", name="up", **penalty)(inputs)
    x = Added(name="first")(x)
    x = layers.Dense(4, activation="tanh", name="mid", bias_regularizer="l2")(x)
    x = Added(name="second")(x)
    outputs = {
        "down": layers.Dense(2, name="down")(x),
        "aside": Shifted(name="aside")(layers.Dense(3, trainable=False, name="seen")(x)),
    }
    model = keras.Model(inputs, outputs, name="two_outputs")
    axes = MESHES[mesh]
    if "pipe" in axes:
        config["pipeline"] = kdist.PipelineConfig(micro_batches=2)
    layout = {".*up/kernel": (None, "model")} if "model" in axes else {}
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layout, **config)
    kdist.parallelize(model, config)
    model.compile(keras.optimizers.Adam(0.01), {"down": loss, "aside": None})
    return model


def data() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    x, y = batch(ROWS)
    return x, {"down": y, "aside": np.zeros((ROWS, 3), "float32")}


# The total; one compiled loss; two layers' own; an activity penalty; two weights'.
PARTS = 7


def changed_twin(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Makes `change(twin)` happen to the twin over the mesh alone."""
    make = trial._mesh_twin

    def wrong(*args: Any) -> Any:
        twin, parallel = make(*args)
        change(twin)
        return twin, parallel

    monkeypatch.setattr(trial, "_mesh_twin", wrong)


def assert_each_is_looked_at(model: keras.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal as it is; offsets that cancel in the loss, and one that no loss sees, are found."""
    report = kdist.verify(model, *data())
    assert report.ok and report.differences == (), report
    assert report.compared["loss"] == PARTS
    assert report.compared["training_output"] == 2
    assert "not compared" not in str(report)

    def change(twin: keras.Model) -> None:
        for name, offset in {"first": 1e-6, "second": -1e-6, "aside": 1e-6}.items():
            object.__setattr__(twin.get_layer(name), "offset", offset)

    changed_twin(monkeypatch, change)
    report = kdist.verify(model, *data())
    found = {(d.kind, d.name) for d in report.differences}
    assert not report.ok
    assert found == {
        ("loss", "add_loss of 'first'"),
        ("loss", "add_loss of 'second'"),
        ("training_output", "aside"),
    }


@pytest.mark.parametrize("mesh", spread([(mesh,) for mesh in MESHES], [("pipe2_data2_model2",)]))
def test_each_part_is_looked_at(mesh, monkeypatch):
    assert_each_is_looked_at(two_outputs(mesh), monkeypatch)


# What computes the loss in another way than replica by replica.
WAYS = {
    "whole_loss": {"loss": Coupled()},
    "global": {"batch_semantics": "global"},
    "level2": {"optimizer": kdist.OptimizerConfig(level=2, threshold_kb=0)},
    "level3": {"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0)},
}


@pytest.mark.parametrize("way", spread([(way,) for way in WAYS], [("whole_loss",), ("level2",)]))
def test_each_part_is_looked_at_in_every_way(way, monkeypatch):
    assert_each_is_looked_at(two_outputs("data2", **WAYS[way]), monkeypatch)


@pytest.mark.parametrize("mesh", spread([("data2",), ("data2_model2",)], [("data2_model2",)]))
def test_a_penalty_that_counts_otherwise_is_named(mesh, monkeypatch):
    def change(twin: keras.Model) -> None:
        twin.get_layer("mid").bias.regularizer.l2 *= 1 + 1e-6

    model = two_outputs(mesh)
    model.get_layer("mid").bias.assign(np.ones(4))
    changed_twin(monkeypatch, change)
    report = kdist.verify(model, *data())
    losses = {d.name for d in report.differences if d.kind == "loss"}
    assert losses == {"loss", "penalty of 'mid/bias'"}
    assert "penalty of 'mid/bias'" in report.cause


class OwnLoss(keras.Model):
    """Computes its loss itself."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) + 0.1 * ops.sum(ops.square(self.layers[1].kernel))


def test_an_own_compute_loss_is_one_term_and_the_report_says_so():
    inputs = keras.Input((6,))
    x = layers.Dense(8, kernel_regularizer="l2", name="up")(inputs)
    model = OwnLoss(inputs, layers.Dense(2, name="down")(x))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("sgd")
    report = kdist.verify(model, *batch())
    assert report.ok and report.differences == (), report
    assert report.compared["loss"] == 1 and report.compared["training_output"] == 1
    assert "OwnLoss.compute_loss is the model's own: the loss is compared as one term" in str(
        report
    )


def test_outputs_of_training_with_dropout_need_a_comparison_without():
    report = kdist.verify(small(layers.Dropout(0.3, name="noise")), *batch())
    assert report.ok and report.explained_by == ("noise",)
    assert "training_output" in {d.kind for d in report.differences}
    assert "output" not in {d.kind for d in report.differences}
