"""Datasets that processes read: which can be, and that batches are the user's own."""

from kdist.program.batch import split
from kdist.runtime.drawing import Draws, StaysWithProcess0, graph_of
from kdist.runtime.worker_data import WorkerDataset, WorkerDatasets

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
    given = numbers(50).shuffle(50)
    # As several processes make it: each with a generator of seeds of its own.
    draws = Draws(graph_of(given), DEVICES[:2])
    first, second = (there(draws.placed(graph_of(given), one, 0)) for one in DEVICES[:2])
    assert batches(first) == batches(second)
    assert batches(first) == batches(second) != batches(numbers(50))


def there(graph: bytes) -> tf.data.Dataset:
    made = tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(graph))
    return tf.data.experimental.from_variant(made, numbers().element_spec)


def parts(dataset) -> tuple:
    """To train on and to look at, as users cut a shuffled dataset up."""
    return dataset.skip(8).batch(4), dataset.take(8).batch(4)


SHARED = {
    "split": lambda seed: parts(numbers(40).shuffle(40, seed=seed)),
    "split once": lambda seed: parts(
        numbers(40).shuffle(40, seed=seed, reshuffle_each_iteration=False)
    ),
    "twice in one": lambda seed: (
        tf.data.Dataset.zip(*(parts(numbers(40).shuffle(40, seed=seed)))).map(
            lambda a, b: (a[0], b[1])
        ),
    ),
    "shuffles of a shuffle": lambda seed: parts(
        numbers(40).shuffle(40, seed=seed).shuffle(9, seed=2)
    ),
    "one after the other": lambda seed: (
        parts(numbers(40).shuffle(40, seed=seed)) + parts(numbers(40).shuffle(40, seed=seed))
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_datasets_of_one_shuffle_take_turns(name):
    """As they do without kdist: each epoch of one moves the others on."""
    plain, given = SHARED[name](4), SHARED[name](4)
    read = WorkerDatasets(pytest.fail).read(given, DEVICES)
    for _ in range(3):
        for mine, other in zip(read, plain, strict=True):
            assert hasattr(mine, "read_by_workers")
            assert batches(mine.read_by_workers) == batches(other)


def test_datasets_of_one_shuffle_take_turns_over_calls_and_models():
    shuffled, plain = (numbers(40).shuffle(40, seed=4) for _ in range(2))
    for _ in range(3):
        (read,) = WorkerDatasets(pytest.fail).read([shuffled.skip(8).batch(4)], DEVICES)
        assert batches(read.read_by_workers) == batches(plain.skip(8).batch(4))


def test_parts_of_a_shuffle_without_a_seed_have_nothing_in_common():
    tf.random.set_seed(None)
    given = parts(numbers(40).shuffle(40, reshuffle_each_iteration=False))
    read = WorkerDatasets(pytest.fail).read(given, DEVICES)
    seen = [row for one in read for batch in batches(one.read_by_workers) for row in batch[1]]
    assert sorted(seen) == list(range(40))


LATE = {
    "repeated": lambda: parts(numbers(40).shuffle(40, seed=4).repeat()),
    "one of both": lambda: (
        (d := numbers(40).shuffle(40, seed=4)).repeat().batch(4),
        d.take(8).batch(4),
    ),
    "cached": lambda: parts(numbers(40).shuffle(40, seed=4).cache()),
    "the same": lambda: (numbers(40).shuffle(40, seed=4).repeat().batch(4),) * 2,
}


@pytest.mark.parametrize("name", LATE)
def test_datasets_that_take_turns_at_unknown_times_stay_with_process_0(name):
    said, given = [], LATE[name]()
    assert all(
        a is b for a, b in zip(WorkerDatasets(said.append).read(given, DEVICES), given, strict=True)
    )
    (line,) = said
    assert "two of one call take turns at a shuffle, and one of both draws late" in line


def test_of_two_calls_the_second_begins_anew_with_a_line():
    said, shuffled = [], numbers(40).shuffle(40, seed=4)
    datasets = WorkerDatasets(said.append)
    (read,) = datasets.read([shuffled.repeat(2).batch(8)], DEVICES)
    (later,) = datasets.read([shuffled.batch(40)], DEVICES)
    assert len(said) == 1 and "this tf.data.Dataset begins anew" in said[0]
    assert batches(read.read_by_workers)[:5] == batches(numbers(40).shuffle(40, seed=4).batch(8))
    assert batches(later.read_by_workers) == batches(numbers(40).shuffle(40, seed=4).batch(40))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("late", ["repeat", "cache"])
def test_a_dataset_that_draws_late_goes_on_where_its_last_batch_was_taken(late, known):
    """As Keras reads it, which does not ask for a batch after the last one where it knows that."""
    given, plain = (
        getattr(numbers(13).shuffle(13, seed=4), late)(*[2] * (late == "repeat")).batch(5)
        for _ in range(2)
    )
    count = len(plain)
    if not known:
        given = given.filter(lambda x, y: True)
    read = WorkerDataset(given, DEVICES)
    if not known:
        assert batches(read) == batches(plain)
    for _ in range(3):
        iterator = iter(read)
        assert batches(next(iterator) for _ in range(count)) == batches(plain)
        iter(read), iter(plain)  # which draw, and nobody reads them


def test_a_dataset_that_draws_late_goes_on_where_all_processes_are():
    """After its end as without kdist; before it, in an order that no reading ahead decides."""
    given, plain = (numbers(10).shuffle(10, seed=4).repeat(2).batch(5) for _ in range(2))
    read = WorkerDataset(given, DEVICES)
    for _ in range(2):
        assert batches(read) == batches(plain)
    again = WorkerDataset(given, DEVICES)
    shuffled = numbers(10).shuffle(10, seed=4).batch(5)
    turns = [batches(shuffled) for _ in range(3)]
    assert batches([next(iter(again))]) == turns[0][:1]
    assert batches(again) == turns[1] + turns[2], "the first iterator drew once, whatever it read"


def test_a_dataset_that_was_read_before_begins_anew_and_stays_where_it_is():
    """Else process 0 would be in another epoch than processes that get it now."""
    made = [numbers().shuffle(9, seed=3).batch(4) for _ in range(2)]
    epochs = [batches(made[0]) for _ in range(3)]
    batches(made[1])
    read = WorkerDataset(made[1], DEVICES)
    assert [batches(read), batches(read)] == epochs[:2]
    assert batches(made[1]) == epochs[1]


@pytest.mark.parametrize(("count", "wrong"), [(4, "fewer"), (12, "more")])
def test_another_process_has_other_data(count, wrong):
    iterator = iter(WorkerDataset(numbers(8).batch(4), DEVICES[:1]))
    iterator.others = [iter(numbers(count).batch(4))]
    iterator.dataset.batch = lambda kept, others: (kept, others[0].get_next())
    with pytest.raises(RuntimeError, match=f"{wrong} batches than in process 0"):
        list(iterator)


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
        (
            lambda: tf.data.Dataset.sample_from_datasets([numbers(), numbers()], [0.5, 0.5]),
            "RandomDataset draws without a seed",
        ),
        (
            lambda: (d := numbers().shuffle(9, seed=1)).concatenate(d),
            "several of its parts take turns at one shuffle, some of them late",
        ),
    ],
)
def test_what_stays_with_process_0_and_why(make, why):
    tf.random.set_seed(None)
    with pytest.raises(StaysWithProcess0, match=why):
        WorkerDataset(make().batch(4), DEVICES)


def test_a_line_says_so_and_other_data_stays_as_it_is():
    said = []
    datasets, array = WorkerDatasets(said.append), np.ones(3)
    assert datasets.read([array], DEVICES)[0] is array
    given = numbers().with_options(loose()).batch(2)
    assert datasets.read([given], DEVICES)[0] is given
    assert datasets.read([given], DEVICES)[0] is given
    (line,) = said
    assert "process 0 reads this tf.data.Dataset, and sends each device its rows: det" in line
    good = numbers().batch(2)
    (read,) = datasets.read([good], DEVICES)
    assert isinstance(read, tf.data.Dataset) and read.cardinality() == 5
    assert datasets.read([read], DEVICES)[0] is read, "what is read by workers already"
