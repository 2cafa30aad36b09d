"""`model.plan(batch_size=...)`: what layers communicate, for any number of rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import kdist
from kdist.api import planned_model
from kdist.plan.inside_layers import InsideTraffic

import keras
import numpy as np
import pytest

CUTS = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
ALONG = CUTS | {"norm/output": (None, "model", None), "up/output": (None, None, "model")}


def network() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    x = keras.layers.LayerNormalization(name="norm")(inputs)
    x = keras.layers.Dense(16, "tanh", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    x = keras.layers.Flatten(name="flat")(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="out")(x))


def parallel(cuts: Any = CUTS, pipe: bool = False, whole: bool = False) -> keras.Model:
    stages = {"norm|up|down": 0, "flat|out": 1}
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**{"pipe": 2} if pipe else {}, data=2, model=2),
        layout_map=cuts,
        pipeline=kdist.PipelineConfig(micro_batches=2, stages=stages) if pipe else None,
        batch_semantics="global" if whole else "replica",
    )
    model = kdist.parallelize(network(), config)
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def train(model: keras.Model, rows: int) -> None:
    model.train_on_batch(np.ones((rows, 6, 8)), np.ones((rows, 4)))


def figures(model: keras.Model, rows: int) -> dict[Any, tuple[int, int | None]]:
    inside = model.plan(batch_size=rows).inside
    return {(t.kind, t.axis, t.phase): (t.collectives, t.nbytes(rows)) for t in inside}


@pytest.mark.parametrize(
    "how",
    [{}, {"cuts": ALONG}, {"pipe": True}, {"whole": True}],
    ids=["inner", "along", "pipe", "whole"],
)
def test_bytes_are_those_of_a_step_of_so_many_rows(how: dict[str, Any]) -> None:
    model = parallel(**how)
    assert model.plan().inside is None
    train(model, 8)
    assert all(one.by_rows is None for one in model.plan().inside)
    before = [variable.numpy() for variable in (*model.weights, *model.optimizer.variables)]
    asked = figures(model, 16)
    after = [variable.numpy() for variable in (*model.weights, *model.optimizer.variables)]
    assert all(map(np.array_equal, before, after))  # nothing ran
    assert all(one.by_rows is not None for one in model.plan().inside)
    trained = parallel(**how)
    train(trained, 32)
    assert figures(model, 32) == figures(trained, 32)
    assert figures(model, 8) != asked != figures(model, 32)


def test_one_slice_as_inspect_has_it() -> None:
    """By its own count, of a batch that was not trained with."""
    model = parallel(ALONG)
    train(model, 8)
    found, seen = Counter[Any](), Counter[Any]()
    for one in kdist.inspect(model, batch_size=24).collectives:
        found[one.kind, one.axis, one.phase] += one.bytes
        seen[one.kind, one.axis, one.phase] += 1
    replicas = 2
    wanted = {key: (replicas * seen[key], replicas * found[key]) for key in found}
    assert figures(model, 24) == wanted
    assert {one.kind for one in kdist.inspect(model).collectives} == {key[0] for key in wanted}


def test_of_a_pipeline_inspect_counts_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so, as does the line about an axis that crosses processes."""
    monkeypatch.setattr(planned_model, "crossed_axes", lambda topology: ["model"])
    model = parallel(pipe=True)
    with pytest.warns(UserWarning, match="cross processes") as said:
        train(model, 8)
    inspection = kdist.inspect(model)
    counted = len(inspection.collectives)
    (line,) = [str(one.message) for one in said if "cross processes" in str(one.message)]
    per = "per replica and micro-batch, of which a step has 2"
    assert f"(collectives: {counted}, of " in line and f", {per})" in line
    assert str(inspection).startswith(f"collectives inside layers, {per}\n")
    replicas, micro_batches = 2, 2
    a_step = sum(one.collectives for one in model.plan().inside)
    assert a_step == counted * replicas * micro_batches
    assert str(kdist.inspect(parallel(), 8)).startswith(
        "collectives inside layers, per slice and step\n"
    )


def test_before_training_a_pass_without_a_loss_is_lowered() -> None:
    model = parallel()
    found = figures(model, 8)
    once = (2, 2 * 4 * 6 * 8 * 4)
    assert found == {("all-reduce", ("model",), phase): once for phase in ("forward", "backward")}
    train(model, 8)
    assert figures(model, 8) == found


@pytest.mark.parametrize("trained", [False, True])
def test_a_batch_that_replicas_cannot_share_equally(trained: bool) -> None:
    """Two sizes of parts are lowered, from which the bytes of all rows follow."""
    model = parallel()
    if trained:
        train(model, 8)
    assert {nbytes for _, nbytes in figures(model, 9).values()} == {9 * 6 * 8 * 4}


@pytest.mark.parametrize(("again", "backward"), [(None, 0), (True, 1), (False, 0)])
def test_collectives_that_run_again_count_again(again: bool | None, backward: int) -> None:
    keras.utils.set_random_seed(0)
    up, down = keras.layers.Dense(16, "tanh", name="up"), keras.layers.Dense(8, "tanh", name="down")
    block = keras.Sequential([up, down, keras.layers.Dense(8, name="last")], name="block")
    model = keras.Sequential([keras.Input((6, 8)), block])
    if again is not None:
        kdist.recompute(block, mp_comm_recompute=again)
    cuts = {f".*{name}": cut for name, cut in CUTS.items()}
    kdist.parallelize(
        model, kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=cuts)
    )
    model.compile("adam", "mse")
    model.train_on_batch(np.ones((8, 6, 8)), np.ones((8, 6, 8)))
    found = {t.phase: t.collectives for t in model.plan(batch_size=16).inside}
    assert found == {"forward": 2} | ({"backward": 2 * backward} if backward else {})


class Normalized(keras.layers.Layer):
    """A product by a kernel whose columns have a norm of their own."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")
        self.scale = self.add_weight(shape=(8,), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        squares = keras.ops.sum(self.kernel**2, axis=0)
        return x @ (self.kernel * self.scale / keras.ops.sqrt(squares))


@pytest.mark.parametrize(("level", "backward"), [(2, 3), (3, 4)])
def test_what_follows_from_gathered_weights_alone_counts_as_often(
    level: int, backward: int
) -> None:
    """At level 3 the norm of columns is summed again in the backward pass."""
    keras.utils.set_random_seed(0)
    layers = [Normalized(name="first"), keras.layers.Dense(8, name="out")]
    model = keras.Sequential([keras.Input((6, 8)), *layers])
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=2, model=2),
        layout_map={".*first/kernel": ("model", None)},
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
    )
    kdist.parallelize(model, config).compile("adam", "mse")
    model.train_on_batch(np.ones((8, 6, 8)), np.ones((8, 6, 8)))
    found = {(t.kind, t.phase): t.collectives for t in model.plan(batch_size=16).inside}
    slices = 2
    assert found == {
        ("all-reduce", "forward"): slices * 1,
        ("all-reduce", "backward"): slices * backward,
    }


def test_without_inner_axes_there_are_none() -> None:
    model = kdist.parallelize(network(), kdist.ParallelConfig(mesh=kdist.mesh(data=4)))
    model.compile("adam", "mse")
    assert model.plan(batch_size=8).inside == ()
    assert "inside layers" not in str(model.plan())


def test_the_summary_says_it() -> None:
    model = parallel()
    assert "inside layers: known once a step is lowered" in str(model.plan())
    text = str(model.plan(batch_size=8))
    assert "communication inside layers, per step" in text
    assert "1.5 KB for 8 rows" in text
    assert "192 a row" in str(model.plan(batch_size=16))


@pytest.mark.parametrize("wrong", [0, -8, True, 8.0, "8"])
def test_what_is_no_number_of_rows(wrong: Any) -> None:
    with pytest.raises(ValueError, match="batch_size is the number of rows"):
        parallel().plan(batch_size=wrong)


def test_of_a_pipeline_they_are_known_before_its_first_step() -> None:
    model = parallel(pipe=True)
    before = model.plan(batch_size=8).inside
    assert before and all(one.nbytes(8) for one in before)
    train(model, 8)
    assert model.plan(batch_size=8).inside == before


def test_sizes_that_differ_in_more_than_rows_give_no_law() -> None:
    inputs = keras.Input((None, 8))
    x = keras.layers.Dense(8, name="down")(keras.layers.Dense(16, name="up")(inputs))
    model = keras.Model(inputs, x)
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=CUTS)
    kdist.parallelize(model, config).compile("adam", "mse")
    for rows, length in ((8, 6), (4, 5)):
        model.train_on_batch(np.ones((rows, length, 8)), np.ones((rows, length, 8)))
    (one,) = model.plan().inside
    assert one.sizes == ((8, 8 * 6 * 8 * 4),)
    (one,) = model.plan(batch_size=4).inside
    assert one.by_rows == (0, 6 * 8 * 4)


@pytest.mark.parametrize("whole", [False, True])
def test_what_does_not_follow_is_refused(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """Over the whole batch there is one part, whose rows the axis of replicas cuts."""
    found = InsideTraffic("all-reduce", ("model",), "forward", 2, ((8, 1), (11, 5)))
    monkeypatch.setattr("kdist.api.inside_layers.inside_traffic", lambda *given: [found])
    with pytest.raises(ValueError, match="Give a multiple of 2.*Received: batch_size=9"):
        parallel(whole=whole).plan(batch_size=9)


def test_op_by_op_nothing_is_cut_inside_layers() -> None:
    model = parallel()
    model.compile("sgd", "mse", run_eagerly=True)
    train(model, 8)
    assert not model.plan(batch_size=8).inside


@pytest.mark.parametrize("place", ["host", "split"])
def test_of_a_model_with_fetched_tables_before_it_trains(place: str) -> None:
    keras.utils.set_random_seed(0)
    table = keras.layers.Embedding(12, 8, name="words")
    if place == "host":
        kdist.place(table, "host")
    else:
        kdist.shard(table, manual_split=(7, 5))
    inputs = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Dense(16, "tanh", name="up")(table(inputs))
    outputs = keras.layers.Dense(8, name="down")(hidden)
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=CUTS)
    model = kdist.parallelize(keras.Model(inputs, outputs), config)
    model.compile("sgd", "mse")
    before = figures(model, 8)
    assert before
    model.train_on_batch(np.ones((8, 6), "int32"), np.ones((8, 6, 8)))
    after = figures(model, 8)
    assert {key: after[key] for key in before} == before
