"""Steps on batches whose rows lie where they were read: which graphs there are, and of what."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from kdist.program.batch import SplitBatch
from kdist.runtime.in_place import InPlace
from kdist.runtime.keras_contract import _WhereRead
from kdist.runtime.worker_data import WorkerDataset

import numpy as np
import pytest
import tensorflow as tf

DEVICES = ["/device:CPU:0", "/device:CPU:1"]


def read(sizes: list[int]) -> WorkerDataset:
    """Batches of some sizes."""
    rows = tf.data.Dataset.range(sum(sizes)).map(lambda i: (tf.fill([3], i), i))
    begin, found = 0, None
    for size in sizes:
        one = rows.skip(begin).take(size).batch(size)
        begin, found = begin + size, one if found is None else found.concatenate(one)
    return WorkerDataset(found, DEVICES)


def test_a_graph_knows_the_shapes_and_a_third_shape_has_none() -> None:
    seen: list[Any] = []

    def step(batch: SplitBatch, known_size: bool) -> Any:
        x = [part[0].shape.as_list() for part in batch.parts]
        seen.append((x, batch.static_size, batch.full, known_size))
        totals = [tf.reduce_sum(y[:n]) for (_, y, _), n in zip(batch.parts, batch.counts)]
        return tf.add_n(totals), [tf.reduce_sum(x) for x, _, _ in batch.parts]

    dataset = read([4, 3, 4, 1, 3, 2])
    iterator, in_place, found = dataset.begin(), InPlace(step, DEVICES), []
    begin = 0
    for size in (4, 3, 4, 1, 3, 2):
        taken = iterator.take()
        assert taken is not None and taken.shapes == ((size, 3), (size,))
        graph = in_place.graph(taken, False)
        rows = np.arange(begin, begin + size)
        begin += size
        if graph is None:
            found.append(size)
            np.testing.assert_array_equal(taken.whole()[1], rows)
        else:
            total, parts = graph()
            assert int(total) == rows.sum() and sum(map(int, parts)) == 3 * rows.sum()
    assert found == [1, 2]
    assert seen == [([[2, 3], [2, 3]], 4, True, False), ([[2, 3], [1, 3]], 3, True, False)]
    assert iterator.take() is None


def test_a_replica_without_rows_has_one_that_does_not_count() -> None:
    counts: list[Any] = []

    def step(batch: SplitBatch, known_size: bool) -> Any:
        counts.append([int(tf.get_static_value(n)) for n in batch.counts])
        return [part[0] for part in batch.parts]

    taken = read([1]).begin().take()
    assert taken is not None and (graph := InPlace(step, DEVICES).graph(taken, True)) is not None
    assert [part.shape.as_list() for part in graph()] == [[1, 3], [1, 3]]
    assert counts == [[1, 0]]


def _in_place(taken: Any) -> Any:
    graph = IN_PLACE.graph(taken, True)
    assert graph is not None
    return graph()


IN_PLACE = InPlace(lambda batch, known_size: batch.size, DEVICES)
WHERE_READ = _WhereRead(lambda batch: batch.size)


@pytest.mark.parametrize("run", [_in_place, WHERE_READ], ids=["in place", "plain"])
def test_graphs_do_not_keep_a_dataset(run: Callable[[Any], Any]) -> None:
    """A loop may give `fit` a new one in each turn."""
    dataset = read([3])
    there = weakref.ref(dataset)
    taken = dataset.begin().take()
    assert int(run(taken)) == 3
    del dataset, taken
    gc.collect()
    assert there() is None
