"""Losses over the whole batch: when they are told apart, and where the user is told."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import kdist
from kdist._compat import keras_xla
from kdist.api.attached import attached

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from ..parity import CUTS, assert_close, data, mlp

LINE = "over the gathered outputs of all replicas"


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.up = keras.layers.Dense(8, "tanh", name="up")
        self.down = keras.layers.Dense(3, name="down")

    def build(self, shape: Any) -> None:
        self.up.build(shape)
        self.down.build((None, 8))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.down(self.up(x))


def subclassed() -> keras.Model:
    model = Subclassed()
    model.build((None, 6))
    return model


def told(
    loss: Any,
    axes: dict[str, int] | None = None,
    make: Callable[[], keras.Model] = mlp,
    **options: Any,
) -> tuple[Any, list[str]]:
    """A model that was evaluated on a batch, and the warnings that it gave."""
    axes = axes or {"data": 4}
    cuts = CUTS if "model" in axes else None
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts, **options)
    model = kdist.parallelize(make(), config)
    model.compile("sgd", loss)
    x, y = data(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.test_on_batch(x, y)
    return model, [str(w.message) for w in caught if "gathered" in str(w.message)]


class Mean(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.abs(y_true - y_pred))


def centred(y: Any, p: Any) -> Any:
    """One number per row, but each has seen all rows."""
    return ops.mean(ops.square(p - ops.mean(p, axis=0)), axis=-1)


def divided(y: Any, p: Any) -> Any:
    """One number per row, each of which depends on how many there are."""
    return ops.mean(ops.abs(y - p), axis=-1) / ops.cast(ops.shape(y)[0], p.dtype)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (keras.losses.Dice(), r"'dice' couples the rows"),
        (keras.losses.Tversky(axis=(0, 1)), r"'tversky' couples the rows"),
        (Mean(name="own"), r"'own' couples the rows"),
        (lambda y, p: ops.max(ops.abs(y - p)), "'lambda' couples the rows"),
        (centred, "'centred' couples the rows"),
        (divided, "'divided' couples the rows"),
        (keras.losses.MeanSquaredError(reduction=None), r"'mean_squared_error' has no reduction"),
    ],
)
def test_one_line_says_that_the_loss_is_whole(loss, words):
    model, lines = told(loss)
    assert len(lines) == 1
    assert re.search(f"{words}.*{LINE}", lines[0])
    assert [n for n in model.plan().notes if LINE in n]
    assert LINE in str(kdist.inspect(model))


@pytest.mark.parametrize(
    "loss",
    [
        "mse",
        keras.losses.Dice(axis=1),
        keras.losses.CosineSimilarity(reduction="sum"),
        lambda y, p: ops.mean(ops.abs(y - p), axis=-1),
    ],
)
def test_losses_of_rows_are_left_to_the_replicas(loss):
    model, lines = told(loss)
    assert lines == []
    assert not [n for n in model.plan().notes if LINE in n]


def test_one_replica_has_the_whole_batch():
    """So its loss stays where the weights are cut."""
    model, lines = told(keras.losses.Dice(), {"model": 2})
    assert lines == []
    assert not model.plan().notes


@pytest.mark.parametrize("make", [mlp, subclassed])
def test_over_inner_axes_the_model_stays_cut(make):
    """The loss lies between its forward and its backward pass."""
    model, lines = told(keras.losses.Dice(), {"data": 2, "model": 2}, make=make)
    assert len(lines) == 1
    assert "over the gathered outputs" in lines[0]
    x, y = data(8)
    model.train_on_batch(x, y)
    found = kdist.inspect(model)
    assert "gathered weights" not in str(found)
    assert [one.kind for one in found.collectives] == ["all-reduce"]


def test_the_optimizer_may_be_made_before_a_batch_shows_inputs():
    """For a checkpoint to fill."""
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=CUTS)
    model = kdist.parallelize(subclassed(), config)
    model.compile("adam", keras.losses.Dice())
    attached(model).prepare_optimizer()
    model.train_on_batch(*data(8))
    assert "gathered weights" not in str(kdist.inspect(model))


def test_a_new_loss_is_looked_at_anew():
    model, lines = told(keras.losses.Dice())
    assert len(lines) == 1
    model.compile("sgd", "mse")
    model.test_on_batch(*data(8))
    assert not [n for n in model.plan().notes if LINE in n]


@pytest.mark.usefixtures("float64")
def test_predicting_first_does_not_fix_the_step():
    """Before the first batch with labels, nothing is known of the loss."""
    x, y = data(8)
    losses = []
    for parallel in (False, True):
        model = mlp()
        if parallel:
            level = kdist.OptimizerConfig(level=3, threshold_kb=0)
            config = kdist.ParallelConfig(mesh=kdist.mesh(data=4), optimizer=level)
            model = kdist.parallelize(model, config)
        model.compile("sgd", lambda y, p: ops.max(ops.abs(y - p)))
        model.predict(x, verbose=0)
        losses.append([model.train_on_batch(x, y) for _ in range(2)])
    assert_close(*losses)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (keras.losses.Dice(), "dice"),
        (keras.losses.MeanSquaredError(reduction="none"), "mean_squared_error"),
        (Mean(name="own"), "own"),
    ],
)
def test_pipelines_refuse_other_orders_by_name(loss, name):
    options = {"stages": {"up": 0, "down": 1}, "micro_batches": 2}
    pipeline = kdist.PipelineConfig(schedule="1f1b", **options)
    with pytest.raises(ValueError, match=rf"Leave the schedule.*Received.*'1f1b'.*{name}"):
        told(loss, {"pipe": 2}, pipeline=pipeline)
    _, found = told(loss, {"pipe": 2}, pipeline=kdist.PipelineConfig(**options))
    assert any(name in line and "All forwards" in line for line in found), found


class LazyHead(keras.Model):
    """Its head is built where it is first called: in `compute_loss`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head = keras.layers.Dense(2, kernel_initializer="ones", name="head")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + ops.mean(ops.square(self.head(y_pred)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mesh", [{"data": 4}, {"pipe": 2, "data": 2}, {"data": 2, "model": 2}])
def test_layers_that_the_loss_builds_are_trained(mesh):
    pipeline = kdist.PipelineConfig(micro_batches=3) if "pipe" in mesh else None
    x, y = data(10)
    weights = []
    for parallel in (False, True):
        model = mlp()
        model = LazyHead(model.inputs, model.outputs[0])
        if parallel:
            cuts = CUTS if "model" in mesh else None
            config = kdist.ParallelConfig(
                mesh=kdist.mesh(**mesh), layout_map=cuts, pipeline=pipeline
            )
            model = kdist.parallelize(model, config)
        model.compile(keras.optimizers.Adam(0.1), "mse")
        model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert np.ptp(weights[0][-2]) > 0  # the head's kernel moved
    assert_close(*weights)


class Own(Subclassed):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.max(ops.abs(y - y_pred))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 2, "model": 2}])
def test_a_subclassed_model_whose_own_loss_leaves_the_compiled_one_alone(mesh):
    x, y = data(8)
    weights = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        model = Own()
        model.build((None, 6))
        if parallel:
            config = kdist.ParallelConfig(mesh=kdist.mesh(**mesh))
            model = kdist.parallelize(model, config)
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert_close(*weights)


class WithNothing(Subclassed):
    """Its second output is None."""

    def call(self, x: Any) -> Any:
        return super().call(x), None

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.std(y_pred[0] - y)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}], ids=str)
def test_an_output_may_be_none(axes: dict[str, int]) -> None:
    found = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        model = WithNothing()
        model.build((None, 6))
        if parallel:
            kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes)))
        model.compile("sgd", "mse")
        found.append([model.train_on_batch(*data(8)) for _ in range(2)])
    assert_close(*found)


def test_keras_own_choice_of_xla_is_left_where_programs_are_cut_around_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is known with the first batch that rows meet in a compiled loss."""
    monkeypatch.setattr(keras_xla, "compiles_by_itself", lambda model: True)
    kinds = []
    for loss in ("mse", lambda y, found: ops.std(found - y)):
        model = kdist.parallelize(mlp(), kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
        model.compile("sgd", loss, jit_compile="auto")
        model.train_on_batch(*data(8))
        parallel = attached(model)
        kinds.append((parallel.jit_compile, bool(parallel.xla_of_keras)))
        assert any("XLA" in note for note in model.plan().notes) == parallel.xla_of_keras
    assert kinds == [(True, True), (False, False)]


class OneOrTheOther(keras.Model):
    """Whether a batch has weights decides which of two equal heads its loss looks at."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if sample_weight is None:
            return ops.std(y_pred[0] - y)
        return ops.std((y_pred[1] - y) * sample_weight[:, None])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}, {"pipe": 2}], ids=str)
def test_each_kind_of_batch_keeps_the_weights_that_its_loss_reaches(axes: dict[str, int]) -> None:
    """Not: those of the kind that was traced last, where a program is there already."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh", name="up")(inputs)
    heads = [keras.layers.Dense(3, name=name)(hidden) for name in ("one", "other")]
    model = OneOrTheOther(inputs, heads)
    x, y = data(8)
    kinds = [(x, y), (x, y, np.linspace(0.5, 1.0, 8))]
    expected = []
    for kind in kinds:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(kind[0], kind[1], model(x, training=True), *kind[2:])
        expected.append(tape.gradient(loss, [v.value for v in model.trainable_variables]))
    options: dict[str, Any] = {}
    if "model" in axes:
        options["layout_map"] = {".*up/kernel": (None, "model")}
    if "pipe" in axes:
        options["pipeline"] = kdist.PipelineConfig(micro_batches=2)
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), **options)
    kdist.parallelize(model, config)
    model.compile("sgd", "mse")
    for number in (0, 1, 0, 1):
        # Each a graph of its own: a new trace of what is around the program.
        step = tf.function(lambda given: kdist.gradients(model, *given)[1], autograph=False)
        found = step(kinds[number])
        assert [g is None for g in found] == [g is None for g in expected[number]]
        there = [(g, e) for g, e in zip(found, expected[number], strict=True) if e is not None]
        assert_close(*([np.asarray(g) for g in column] for column in zip(*there)))
