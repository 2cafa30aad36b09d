"""Rows of the next batch are looked up, and sent, while this one computes: read from a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kdist

import keras
import look_ups_ahead
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

STEPS = 6


def _model(
    prefetch: bool,
    steps: int = STEPS,
    optimizer: Any = "sgd",
    seconds: tuple[float, float] = (0.0, 0.0),
) -> keras.Model:
    return look_ups_ahead.built(prefetch, steps, *seconds, optimizer)


def _data() -> tf.data.Dataset:
    return look_ups_ahead.batches(STEPS)


def _traced(model: keras.Model, folder: Path) -> list[tuple[str, float, float]]:
    """Operations of an epoch with when they began and ended, in ms."""
    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)
    tf.profiler.experimental.start(str(folder), options=options)
    model.fit(_data(), verbose=0)
    tf.profiler.experimental.stop()
    space = xplane_pb2.XSpace()
    (path,) = folder.glob("**/*.xplane.pb")
    space.ParseFromString(path.read_bytes())
    found = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                start = line.timestamp_ns / 1e6 + event.offset_ps / 1e9
                name = plane.event_metadata[event.metadata_id].name
                found.append((name, start, start + event.duration_ps / 1e9))
    return found


def test_next_rows_are_there_before_a_step_has_computed(tmp_path: Path) -> None:
    model = _model(True, seconds=(0.01, 0.16))
    model.fit(_data(), verbose=0)
    trace = _traced(model, tmp_path)

    def times(scope: str, kind: str) -> list[tuple[float, float]]:
        return sorted((a, b) for name, a, b in trace if scope in name and kind in name)

    computing = times("slow_compute", "PyFunc")
    looked_up, sent = times("rows_ahead", ":ResourceGather"), times("rows_ahead", ":_Send")
    written = times("", ":ResourceScatterSub")
    again, resent = times("fetched_rows", ":ResourceGather"), times("fetched_rows", ":_Send")
    # The first look-up is that of the first batch; in the last step there is nothing to look up.
    assert [len(computing), len(looked_up), len(written)] == [STEPS, STEPS + 1, STEPS]
    for n, (_, end) in enumerate(computing[:-1]):
        begin = written[n - 1][1] if n else looked_up[0][1]
        assert begin <= looked_up[n + 1][0] < end
        assert any(begin <= a < b < end for a, b in sent)
        assert end <= written[n][0] < written[n][1] <= again[n][0]
        assert any(again[n][1] <= a < computing[n + 1][0] for a, b in resent)


@pytest.mark.parametrize(
    ("steps", "optimizer", "wrong"),
    [
        (1, "sgd", "steps_per_execution=1, tables \\['table'\\]"),
        (2, "adam", "Adam, which changes all rows of \\['table'\\]"),
        (2, "nadam", "Nadam, which changes all rows"),
    ],
)
def test_what_is_refused(steps: int, optimizer: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        _model(True, steps, optimizer).fit(_data(), verbose=0)


def test_sparse_inputs_are_refused() -> None:
    ids, other = keras.Input((3,), dtype="int32"), keras.Input((5,), sparse=True)
    rows = kdist.layers.HostEmbedding(40, 4, prefetch=True)(ids)
    both = [keras.layers.Flatten()(rows), keras.layers.Dense(2)(other)]
    model = keras.Model([ids, other], keras.layers.Dense(2)(keras.layers.Concatenate()(both)))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=1)))
    model.compile("sgd", "mse", steps_per_execution=2)
    data = tf.data.Dataset.from_tensors(
        ((np.zeros((4, 3), "int32"), tf.sparse.eye(4, 5)), np.zeros((4, 2)))
    ).repeat(2)
    with pytest.raises(ValueError, match="sparse inputs, with prefetch=True"):
        model.fit(data, verbose=0)


def test_single_batches_and_what_is_declared(tmp_path: Path) -> None:
    """A batch alone has no next one; a file keeps the declaration; the plan says it."""
    model = _model(True)
    model.train_on_batch(*next(iter(_data())))
    assert "table 'table' is looked up a step ahead in fit" in model.plan().notes
    assert keras.layers.deserialize(keras.layers.serialize(model.get_layer("table"))).prefetch
    table = kdist.layers.TableConfig("t", 5, 2, placement="host", prefetch=True)
    assert kdist.layers.TableConfig(**table.get_config()).prefetch
    with pytest.raises(ValueError, match="placement='device' of table 't'"):
        kdist.layers.TableConfig("t", 5, 2, placement="device", prefetch=True)
    with pytest.raises(ValueError, match="where='device'"):
        kdist.place(keras.layers.Embedding(5, 2), "device", prefetch=True)
