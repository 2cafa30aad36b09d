"""What differs is found and named; what differs by design is told from what does not."""

import kdist
from kdist.verification.cause import likely_cause
from kdist.verification.study import Study
from kdist.verification.tolerance import Difference

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from ..equivalence.matrix import spread
from .models import Centre, batch, small


def test_dropout_and_batch_normalization_are_named():
    noise = layers.Dropout(0.3, name="noise"), layers.BatchNormalization(name="norm")
    report = kdist.verify(small(*noise), *batch())
    assert report.ok and report.differences
    assert report.explained_by == ("noise", "norm")
    # What is excused is counted; the table is of what is not.
    assert f"differ with these: {len(report.differences)}" in str(report)
    assert "worst first" not in str(report)
    assert report.first_layer == "noise"
    assert report.unexplained == ()
    assert "noise" in report.cause and "norm" in report.cause
    assert "by design" in str(report)


@pytest.mark.long
def test_batch_normalization_on_one_replica_is_no_excuse():
    report = kdist.verify(small(layers.BatchNormalization(), axes={"model": 2}), *batch())
    assert report.ok and report.differences == () == report.explained_by


def test_a_layer_in_which_rows_meet_is_named():
    noise, centre = layers.Dropout(0.3, name="noise"), Centre(name="centre")
    report = kdist.verify(small(centre, noise), *batch())
    assert not report.ok
    assert report.first_layer == "centre"
    assert "'centre'" in report.cause and "Centre" in report.cause and "Mean" in report.cause
    assert report.explained_by == ()
    assert "NOT equal" in str(report)


def test_a_dropped_gradient_is_named(monkeypatch):
    from kdist.optimizer.slice_gradients import SliceGradients

    local = SliceGradients.local

    def dropped(self, variable, at):
        """One replica's gradient alone, of the second layer's kernel."""
        found = local(self, variable, at)
        path = self.entries[variable].variable.path
        return found * 0 if path.endswith("down/kernel") and at[0] > 0 else found

    monkeypatch.setattr(SliceGradients, "local", dropped)
    report = kdist.verify(small(), *batch())
    assert not report.ok
    kinds = {d.kind for d in report.differences}
    assert "gradient" in kinds and not kinds & {"output", "loss"}
    assert "down/kernel" in report.cause and "gradient" in report.cause
    assert report.first_layer is None


def test_a_wrong_share_of_the_loss_is_named(monkeypatch):
    from kdist.runtime import plain_runner

    monkeypatch.setattr(plain_runner, "row_shares", lambda b: [tf.constant(0.6, tf.float64)] * 2)
    report = kdist.verify(small(), *batch())
    assert not report.ok
    assert "loss term 'compiled loss'" in report.cause


class Penalty(layers.Layer):
    """Adds a sum over rows to the loss."""

    def call(self, inputs):
        self.add_loss(ops.sum(ops.square(inputs)))
        return inputs


def test_a_sum_given_to_add_loss_is_named():
    report = kdist.verify(small(Penalty(name="penalty")), *batch())
    assert not report.ok
    assert "'penalty'" in report.cause and "loss_from_layers='sum'" in report.cause


@pytest.mark.long
def test_a_sum_that_is_declared_as_one_is_equal():
    report = kdist.verify(small(Penalty(name="penalty"), loss_from_layers="sum"), *batch())
    assert report.ok and report.differences == (), report


def test_compression_is_named():
    compression = kdist.CompressionConfig(rest="bf16")
    report = kdist.verify(small(compression=compression), *batch())
    assert report.ok and report.differences
    assert report.explained_by == ("compression",)
    assert {d.kind for d in report.differences} <= {"weight", "slot"}


@pytest.mark.long
def test_compression_does_not_excuse_the_rest():
    compression = kdist.CompressionConfig(rest="bf16")
    broken = kdist.verify(small(Centre(name="centre"), compression=compression), *batch())
    assert not broken.ok and broken.explained_by == ()
    assert "'centre'" in broken.cause


class Random(layers.Layer):
    """Draws in inference too, and takes no `training`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(1)


class Noise(Random):
    """Adds noise, as the sampling of a variational autoencoder does."""

    def call(self, inputs):
        return inputs + keras.random.normal(ops.shape(inputs), seed=self.seeds, dtype=inputs.dtype)


class Order(Random):
    """Adds another row to each row, by a random order: equal draws would leave the rows alone."""

    def call(self, inputs):
        order = ops.argsort(keras.random.uniform((ops.shape(inputs)[0],), seed=self.seeds))
        return inputs + ops.take(inputs, order, axis=0)


class Gamma(Random):
    """Multiplies by random numbers of another kind, which stay random."""

    def call(self, inputs):
        shape = ops.shape(inputs)
        return inputs * keras.random.gamma(shape, 2.0, seed=self.seeds, dtype=inputs.dtype)


NOISY = {
    "data": {"axes": {"data": 2}},
    "model": {"axes": {"data": 2, "model": 2}, "layout_map": {".*up/kernel": (None, "model")}},
    "pipe": {"axes": {"pipe": 2, "data": 2}, "pipeline": kdist.PipelineConfig(micro_batches=2)},
}


@pytest.mark.parametrize("mesh", spread([(mesh,) for mesh in NOISY], [("data",), ("model",)]))
def test_a_layer_that_draws_in_inference_too_is_named(mesh):
    report = kdist.verify(small(Noise(name="noise"), **NOISY[mesh]), *batch())
    assert report.ok and report.explained_by == ("noise",), report
    assert {d.kind for d in report.differences} >= {"output", "training_output", "loss"}
    assert report.unexplained == ()


@pytest.mark.parametrize("layer", [Order, Gamma])
def test_a_random_layer_is_no_excuse_where_draws_cannot_be_made_equal(layer):
    report = kdist.verify(small(layer(name="noise")), *batch())
    assert not report.ok and report.explained_by == ()
    assert "'noise'" in report.cause and "draws random numbers" in report.cause


def test_noise_does_not_excuse_the_rest():
    report = kdist.verify(small(Noise(name="noise"), Centre(name="centre")), *batch())
    assert not report.ok and report.explained_by == ()
    assert report.first_layer == "noise" and "'centre'" in report.cause


@pytest.mark.long
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}])
def test_global_semantics_need_no_excuse(axes):
    middle = Centre(name="centre"), layers.BatchNormalization(name="norm")
    report = kdist.verify(small(*middle, axes=axes, batch_semantics="global"), *batch())
    assert report.ok and report.differences == (), report


def difference(kind, name="x"):
    return Difference(kind, name, 1.0, 1.0, 1e-9, "")


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (["output", "loss", "gradient"], "parallel execution"),
        (["loss", "gradient", "weight"], "loss term"),
        (["gradient", "weight", "slot"], "gradient of"),
        (["weight", "metric"], "update"),
        (["slot"], "update"),
        (["metric", "state"], "metric"),
        (["state"], "state"),
        ([], ""),
    ],
)
def test_the_cause_is_where_differences_begin(kinds, text):
    cause = likely_cause([difference(kind) for kind in kinds], Study())
    assert text in cause and bool(cause) == bool(kinds)


@pytest.mark.parametrize("kinds", [["loss"], ["weight", "metric"], ["slot"], ["state"]])
def test_of_a_step_of_ones_own_no_cause_is_made_up(kinds):
    cause = likely_cause([difference(kind) for kind in kinds], Study(), "Mine.train_step")
    assert "of Mine.train_step differs" in cause and "not looked into" in cause
    assert "couples rows" not in cause


def test_of_a_step_of_ones_own_that_agrees_there_is_no_cause():
    assert likely_cause([], Study(), "Mine.train_step") == ""
