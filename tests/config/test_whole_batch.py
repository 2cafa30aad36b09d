"""Models that compute over the whole batch: what is refused, when, and what they say."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import kdist
from kdist.api.attached import attached

import keras
import pytest
import tensorflow as tf

from ..parity import assert_close, assert_same_weights, compile_all, data, pair

BATCHNORM = "BatchNormalization(synchronized=False)"
GLOBAL = "batch_semantics='replica'"


def synchronized() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, name="up"),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(3, name="down"),
        ]
    )


def plain() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="down")])


MODELS: dict[str, tuple[Callable[[], keras.Model], dict[str, Any], str]] = {
    "synchronized": (synchronized, {}, BATCHNORM),
    "global": (plain, {"batch_semantics": "global"}, GLOBAL),
}
of_both = pytest.mark.parametrize("which", MODELS)


def parallel(which: str, axes: dict[str, int] | None = None, **options: Any) -> keras.Model:
    build, semantics, _ = MODELS[which]
    config = kdist.ParallelConfig(mesh=kdist.mesh(**(axes or {"data": 4})), **semantics, **options)
    return kdist.parallelize(build(), config)


def refusal(which: str, received: str) -> str:
    instead = MODELS[which][2].replace("(", r"\(").replace(")", r"\)")
    return f"computes over the whole batch.*Use {instead}, or .*Received: {received}"


@pytest.mark.parametrize("axes", [{"pipe": 2}, {"pipe": 2, "data": 2}])
def test_micro_batches_are_refused_where_layers_are_to_see_all(axes):
    message = "sees one micro-batch at a time.*micro_batches=1.*Received: pipeline="
    with pytest.raises(ValueError, match=message):
        parallel("global", axes, pipeline=kdist.PipelineConfig(micro_batches=2))


def test_synchronized_statistics_of_micro_batches_are_told():
    options = {"pipeline": kdist.PipelineConfig(micro_batches=2)}
    model = parallel("synchronized", {"pipe": 2, "data": 2}, **options)
    model.compile("sgd", "mse")
    model.fit(*data(8), batch_size=8, verbose=0)
    (note,) = [n for n in model.plan().notes if "synchronized=True" in n]
    assert "computes over all replicas' rows of a micro-batch" in note


@of_both
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}])
def test_optimizer_state_is_cut_over_the_data_axis(which, axes):
    options = {"optimizer": kdist.OptimizerConfig(level=1, threshold_kb=0)}
    model = parallel(which, axes, **options)
    kernel = next(v for v in model.weights if v.path.endswith("down/kernel"))
    model.compile("adam", "mse")
    model.fit(*data(8), batch_size=8, verbose=0)
    units = attached(model).update.jobs.units
    mine = [u for u in units if attached(model).trainable()[u.variable].variable is kernel]
    assert len({u.owner for u in mine}) == 2


@of_both
def test_a_sharded_optimizer_and_fusion_ids_are_taken(which, float64):
    plain, model = MODELS[which][0](), parallel(which)
    plain.set_weights(model.get_weights())
    kdist.set_comm_fusion(model.get_layer("down"), 1)
    plain.compile(keras.optimizers.Adam(), "mse")
    model.compile(kdist.ShardedOptimizer(keras.optimizers.Adam(), level=1), "mse")
    for one in (plain, model):
        one.fit(*data(8), verbose=0)
    assert_close(plain.get_weights(), model.get_weights())
    assert attached(model).update.jobs.buckets


@of_both
def test_comm_fusion_logs_what_is_exchanged(which):
    model = parallel(which)
    model.compile("sgd", "mse")
    history = model.fit(*data(8), verbose=0, callbacks=[kdist.callbacks.CommFusion()])
    nbytes = sum(one.nbytes for one in model.plan().traffic())
    assert history.history["comm_bytes"] == [nbytes] and nbytes > 0


@of_both
def test_weights_stored_in_slices_over_the_data_axis_are_gathered_before_use(which):
    model = parallel(which, {"data": 2}, layout_map={".*down/kernel": ("data", None)})
    model.compile("sgd", "mse")
    model.fit(*data(8), batch_size=8, verbose=0)
    shown = kdist.inspect(model)
    assert shown.fallbacks == ()
    assert "down/kernel" in "".join(shown.gathered)


@of_both
def test_the_plan_says_it(which):
    assert "computes over the whole batch" in str(parallel(which).plan())


@pytest.mark.parametrize("axes", [{"data": 1}, {"model": 2}])
def test_one_replica_is_the_whole_batch_already(axes):
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), optimizer=kdist.OptimizerConfig(level=1))
    model = kdist.parallelize(synchronized(), config)
    assert "whole batch" not in str(model.plan())


@of_both
def test_a_batch_that_does_not_divide_is_computed_whole_and_said_so(which):
    model = parallel(which)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="the cut of dim 0 of the batch into 4 parts over 'data'"):
        model.fit(*data(11), batch_size=8, verbose=0)
    assert any("it has 3 elements there" in note for note in model.plan().notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(*data(11), batch_size=8, verbose=0)


def test_a_layer_that_synchronizes_comes_too_late_after_parallelize():
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=4))
    model = kdist.parallelize(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]), config)
    model.add(keras.layers.BatchNormalization(synchronized=True))
    with pytest.raises(ValueError, match="decided when a model is parallelized.*Received: model="):
        model.compile("sgd", "mse")


def standardized() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh", name="up")(inputs)
    hidden = Standardized(name="standardized")(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, name="down")(hidden))


class Standardized(keras.layers.Layer):
    """Rows by the batch's standard deviation."""

    def call(self, inputs: Any) -> Any:
        return inputs / keras.ops.std(inputs, axis=0)


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "model": 2}])
def test_an_own_loop_sees_the_whole_batch(axes, float64):
    plain, model = pair(axes, standardized, batch_semantics="global")
    compile_all([plain, model], optimizer=lambda: keras.optimizers.SGD(0.1), metrics=[])
    for rows in (8, 3):
        x, y = data(rows)
        with tf.GradientTape() as tape:
            expected = plain.compute_loss(y=y, y_pred=plain(x, training=True))
        wanted = tape.gradient(expected, plain.trainable_variables)
        plain.optimizer.apply(wanted, plain.trainable_variables)
        loss, gradients = kdist.gradients(model, x, y)
        kdist.apply_gradients(model, gradients)
        assert_close([expected, *wanted], [loss, *gradients])
        assert_same_weights(plain, model)
