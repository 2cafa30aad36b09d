"""Datasets that processes read: which can be, and that batches are the user's own."""

from kdist.program.batch import split
from kdist.runtime import worker_data
from kdist.runtime.worker_data import StaysWithProcess0, WorkerDataset, WorkerDatasets

import numpy as np
import pytest
import tensorflow as tf

DEVICES = [f"/device:CPU:{n}" for n in range(4)]


def numbers(count: int = 10) -> tf.data.Dataset:
    return tf.data.Dataset.range(count).map(lambda i: (tf.fill((3,), i), i))


def batches(dataset) -> list:
    return [tuple(t.numpy().tolist() for t in tf.nest.flatten(one)) for one in dataset]


@pytest.mark.parametrize(
    "dataset",
    [
        numbers().batch(4),
        numbers(9).batch(8),
        numbers(2).batch(2),
        numbers().shuffle(5, seed=3).batch(4, drop_remainder=True),
        numbers().map(lambda x, y: ({"a": x, "b": y}, y, y + 1)).batch(3),
        numbers().map(lambda x, y: x).cache().batch(7),
    ],
    ids=["uneven", "one over", "fewer than replicas", "shuffled", "dicts", "one tensor"],
)
def test_batches_are_the_same_and_in_the_same_order(dataset):
    """In two epochs, whose shuffles differ."""
    read = WorkerDataset(dataset, DEVICES)
    for _ in range(2):
        assert batches(read) == batches(dataset)


def test_parts_and_counts_are_those_of_a_batch_that_is_cut():
    x, y = next(iter(numbers(6).batch(6)))
    wanted = split(x, y, None, 4)
    iterator = iter(WorkerDataset(numbers(6).batch(6), DEVICES))
    found = iterator.dataset.taken(next(iterator.first), [])
    assert [int(n) for n in found.counts] == [int(n) for n in wanted.counts] == [2, 2, 1, 1]
    for mine, other in zip(found.parts, wanted.parts, strict=True):
        np.testing.assert_array_equal(mine[0], other[0])
        assert mine[2] is None
    assert int(found.size) == 6 and found.static_size is None


def test_a_shuffle_without_a_seed_is_given_one():
    read = WorkerDataset(numbers(100).shuffle(100).batch(100), DEVICES)
    (first,), (second,) = batches(read), batches(read)
    assert sorted(first[1]) == sorted(second[1]) == list(range(100))
    assert first != second, "each epoch has an order of its own"


def test_a_shuffle_without_a_seed_has_one_order_wherever_it_is_made():
    tf.random.set_seed(None)  # with one, TensorFlow gives shuffles seeds
    draw = np.random.default_rng()
    graph = worker_data._seeded(worker_data._graph_of(numbers(50).shuffle(50)), draw)
    # As another process makes it: with a generator of seeds of its own.
    other = worker_data._seeded(tf.compat.v1.GraphDef.FromString(graph), draw)
    spec = numbers().element_spec
    first, second = (
        tf.data.experimental.from_variant(worker_data._dataset(one), spec) for one in (graph, other)
    )
    assert batches(first) == batches(second)
    assert batches(first) == batches(second) != batches(numbers(50))


def test_a_dataset_that_was_read_before_begins_anew_and_stays_where_it_is():
    """Else process 0 would be in another epoch than processes that get it now."""
    made = [numbers().shuffle(9, seed=3).batch(4) for _ in range(2)]
    epochs = [batches(made[0]) for _ in range(3)]
    batches(made[1])
    read = WorkerDataset(made[1], DEVICES)
    assert [batches(read), batches(read)] == epochs[:2]
    assert batches(made[1]) == epochs[1]


def loose() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = False
    return options


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: numbers().with_options(loose()), "deterministic=False"),
        (
            lambda: numbers().map(lambda x, y: x, num_parallel_calls=2, deterministic=False),
            "deterministic=False",
        ),
        (lambda: numbers().map(lambda x, y: x + tf.random.uniform((), 0, 9, tf.int64)), "stateful"),
        (
            lambda: tf.data.Dataset.from_generator(
                lambda: iter([1.0]), output_signature=tf.TensorSpec((), tf.float32)
            ),
            "PyFunc is stateful",
        ),
        (lambda: tf.data.Dataset.from_tensor_slices(np.ones((5 << 20,), "float32")), "20 MiB"),
        (lambda: numbers().map(lambda x, y: tf.sparse.from_dense(x)), "not dense"),
        (lambda: numbers().cache("/nowhere/file"), "CacheDatasetV2 writes a file"),
        (
            lambda: numbers().flat_map(lambda x, y: tf.data.Dataset.range(3).shuffle(3)),
            "SeedGenerator is stateful",
        ),
    ],
)
def test_what_stays_with_process_0_and_why(make, why):
    with pytest.raises(StaysWithProcess0, match=why):
        WorkerDataset(make().batch(4), DEVICES)


def test_a_line_says_so_and_other_data_stays_as_it_is():
    said = []
    datasets, array = WorkerDatasets(said.append), np.ones(3)
    assert datasets.read(array, DEVICES) is array
    given = numbers().with_options(loose()).batch(2)
    assert datasets.read(given, DEVICES) is given
    assert datasets.read(given, DEVICES) is given
    (line,) = said
    assert "process 0 reads this tf.data.Dataset, and sends each device its rows: det" in line
    good = numbers().batch(2)
    read = datasets.read(good, DEVICES)
    assert isinstance(read, tf.data.Dataset) and read.cardinality() == 5
    assert datasets.read(read, DEVICES) is read, "what is read by workers already"
