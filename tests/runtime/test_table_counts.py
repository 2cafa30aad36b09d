"""Rows of tables travel as the plan says: counted in executed steps, table by table."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.graphs import executed
from kdist.graphs.executed import ExecutedFunction, ExecutedTransfer
from kdist.report.look_ups import sent_by_look_ups

import keras
import numpy as np
import pytest
import tensorflow as tf

ROWS, WIDTH, BATCH, IDS = 1000, 8, 16, 4
DIFFERENT = 10
"""Of the ids of a replica."""
LOOK_UPS = BATCH // 2 * IDS
STAGES: dict[str, tuple[int, ...]] = {
    "flat": (0,),
    "one stage": (0,),
    "two stages": (0, 1),
    "two chunks": (0, 2),
}
"""Virtual stages that look up in the table."""
LONG = ("flat", "two stages")
WHERE = pytest.mark.parametrize(
    "where", [pytest.param(one, marks=[pytest.mark.long] * (one in LONG)) for one in STAGES]
)


def _table(kind: str) -> keras.layers.Embedding:
    if kind.startswith("host"):
        return kdist.layers.HostEmbedding(ROWS, WIDTH, prefetch=kind == "host ahead", name="table")
    rows = {"split": (400, 600), "dealt": (0, ROWS)}[kind.partition(" ")[0]]
    return kdist.layers.SplitEmbedding(rows, WIDTH, "data", name="table")


def _stage(x: Any, stage: int, name: str, units: int) -> Any:
    layer = keras.layers.Dense(units, name=name)
    kdist.set_stage(layer, stage)
    return layer(x)


def _model(
    kind: str, where: str, optimizer: Any = "sgd", trains: bool = True, **compiled: Any
) -> keras.Model:
    """A chain of stages; each that looks up joins its rows to what came before."""
    keras.utils.set_random_seed(0)
    ids, table = keras.Input((IDS,), dtype="int32"), _table(kind)
    table.trainable = trains
    count = 4 if where == "two chunks" else 2
    x: Any = None
    for stage in range(count):
        if stage in STAGES[where]:
            rows = keras.layers.Flatten()(table(ids + 100 * stage))
            join = keras.layers.Concatenate(name=f"join{stage}")
            kdist.set_stage(join, stage)
            x = rows if x is None else join([x, rows])
        x = _stage(x, stage, f"layer{stage}", 6)
    model = keras.Model(ids, _stage(x, count - 1, "head", 1))
    pipeline = kdist.PipelineConfig(micro_batches=2)
    if where == "two chunks":
        pipeline = kdist.PipelineConfig(micro_batches=2, schedule="interleaved", chunks=2)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=2) if where == "flat" else kdist.mesh(pipe=2, data=2),
        pipeline=None if where == "flat" else pipeline,
        enable_alltoall=kind.endswith("blocks"),
    )
    kdist.parallelize(model, config).compile(optimizer, "mse", **compiled)
    return model


def _batch(batches: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Each replica looks up ten different rows, half of them in each part."""
    ids = np.tile(np.resize(np.arange(DIFFERENT), (BATCH // 2, IDS)), (2 * batches, 1))
    return (ids * 80).astype("int32"), np.ones((len(ids), 1))


def _step(model: keras.Model) -> ExecutedFunction:
    return executed.largest(executed.watch(lambda: model.train_on_batch(*_batch())))


def _nbytes(sent: ExecutedTransfer, rows: int) -> int:
    """Where the graph does not tell how many rows there are: as many."""
    width = WIDTH if sent.dtype == "float32" else 1
    return sent.nbytes or rows * width * tf.as_dtype(sent.dtype).size


def _with_host(model: keras.Model, step: ExecutedFunction) -> list[ExecutedTransfer]:
    host = attached(model).topology.host
    sent = [one for one in step.transfers if host in (one.source, one.target) and not one.control]
    return [one for one in sent if one.shape != ()]  # of scalars there is the learning rate


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@WHERE
def test_a_table_on_the_host(where: str, optimizer: str) -> None:
    model = _model("host", where, optimizer)
    sent = _with_host(model, _step(model))
    (planned,) = model.plan().host_tables()
    assert planned.combined == (optimizer == "sgd")
    assert planned.messages == len(sent)
    # Chunks of one device look up together.
    times, host = 2 if where == "two chunks" else 1, attached(model).topology.host
    rows, look_ups = times * DIFFERENT, times * LOOK_UPS
    gradients = [one for one in sent if one.target == host and one.dtype == "float32"]
    # Each has as many rows as any other.
    each = planned.replicas * (rows if planned.combined else look_ups) // len(gradients)
    back = sum(_nbytes(one, each) for one in gradients)
    numbers = [one for one in sent if one.target == host and one not in gradients]
    back += sum(_nbytes(one, rows) for one in numbers)
    there = sum(_nbytes(one, rows) for one in sent if one.source == host)
    assert (there, back) == planned.sent(rows, look_ups)


@WHERE
def test_a_table_on_the_host_that_does_not_train(where: str) -> None:
    model = _model("host", where, trains=False)
    sent = _with_host(model, _step(model))
    (planned,) = model.plan().host_tables()
    assert planned.messages == len(sent)
    rows = (2 if where == "two chunks" else 1) * DIFFERENT
    host = attached(model).topology.host
    there = sum(_nbytes(one, rows) for one in sent if one.source == host)
    back = sum(_nbytes(one, rows) for one in sent if one.target == host)
    assert (there, back) == planned.sent(rows, LOOK_UPS)
    assert "table/embeddings on the host: " in str(kdist.inspect(model))


def _sent_ahead(where: str, **options: Any) -> tuple[keras.Model, list[Any]]:
    """A model that looks up a step ahead, and what a step sends to the host and from it."""
    model = _model("host ahead", where, steps_per_execution=3, **options)
    x, y = _batch(3)
    functions = executed.watch(lambda: model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0))
    step = executed.largest(functions)
    # The first step of an execution is outside of the loop.
    return model, [one for one in _with_host(model, step) if "while/body" in one.tensor]


@pytest.mark.parametrize("where", ["one stage", "two chunks"])
def test_rows_that_are_looked_up_a_step_ahead(where: str) -> None:
    """All rows of the next batch are those that this step changes, and so they travel twice."""
    model, sent = _sent_ahead(where)
    (planned,) = model.plan().host_tables()
    assert planned.messages == len(sent)
    times, host = 2 if where == "two chunks" else 1, attached(model).topology.host
    rows = times * DIFFERENT
    measured = [
        sum(_nbytes(one, rows) for one in sent if getattr(one, end) == host)
        for end in ("source", "target")
    ]
    assert tuple(measured) == planned.sent(rows, times * LOOK_UPS, changed=rows)
    assert str(planned).startswith("32 B x rows of a replica to it, 40 B x those just changed;")
    assert "40 B x those just changed" in str(kdist.inspect(model))


@pytest.mark.parametrize("kind", ["split masked", "split blocks", "dealt"])
@WHERE
def test_look_ups_in_parts(where: str, kind: str) -> None:
    model = _model(kind, where)
    sent = sent_by_look_ups(_step(model))
    # Numbers go with gradients too.
    answered = {(one.target, one.source) for one in sent.rows}
    asked = [one for one in sent.numbers if (one.source, one.target) in answered]
    sent = dataclasses.replace(sent, numbers=tuple(asked))
    (planned,) = model.plan().split_tables()
    times = 2 if where == "two chunks" else 1
    rows = times * DIFFERENT
    assert planned.messages == sent.messages
    # Of blocks, each part has half of the rows.
    each = rows // 2 if kind == "split blocks" else rows
    measured, expected = sent.nbytes(each, WIDTH, 0), planned.used.nbytes(rows, times * LOOK_UPS)
    assert measured <= expected if planned.used.at_most else measured == expected


def test_rows_that_do_not_change_are_not_read_again_where_they_are_looked_up_ahead() -> None:
    model, sent = _sent_ahead("flat", trains=False)
    (planned,) = model.plan().host_tables()
    assert planned.messages == len(sent)


@pytest.mark.parametrize("kind", ["split masked", "dealt"])
def test_look_ups_in_parts_that_do_not_train(kind: str) -> None:
    plans = []
    for trains in (True, False):
        model = _model(kind, "one stage", trains=trains)
        sent = sent_by_look_ups(_step(model))
        (planned,) = model.plan().split_tables()
        plans.append(planned)
        if not trains:  # numbers go with gradients too
            assert planned.messages == sent.messages
    assert plans[0] == plans[1]


MADE_BY = {
    ("split masked", "sgd"): r"GatherNd(_\d+)?",
    ("split masked", "adam"): r"GatherNd(_\d+)?",
    ("dealt", "sgd"): r"UnsortedSegmentSum(_\d+)?",
    ("dealt", "adam"): r"(replica\d/\dB\d/)?PartitionedCall(_\d+)?",
}
"""What makes the rows of gradients that travel: they are picked out for parts, or summed, or those
of a backward pass."""


@pytest.mark.parametrize(("kind", "optimizer"), MADE_BY)
@WHERE
def test_gradients_of_parts(where: str, kind: str, optimizer: str) -> None:
    model = _model(kind, where, optimizer)
    sent = [
        one
        for one in _step(model).transfers
        if re.fullmatch(MADE_BY[kind, optimizer], one.tensor) and one.dtype == "float32"
    ]
    (planned,) = model.plan().tables()
    assert planned.messages - planned.changed_messages == len(sent)
    assert planned.at_most == (kind == "split masked")
    if kind == "dealt":
        times = 2 if where == "two chunks" else 1
        rows = times * (DIFFERENT if optimizer == "sgd" else LOOK_UPS)
        senders = planned.row_bytes // (4 * WIDTH + 4)
        measured = sum(_nbytes(one, senders * rows // len(sent)) for one in sent)
        # With each row goes its number.
        assert measured + 4 * senders * rows == planned.row_bytes * rows
