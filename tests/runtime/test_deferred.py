"""What each process computes of a dataset: its own rows alone, and the same as of the whole."""

from pathlib import Path

from kdist._compat.keras_trainer import class_weighted
from kdist.program.own_rows import OwnRows
from kdist.runtime.deferred import deferred
from kdist.runtime.drawing import graph_of, placed
from kdist.runtime.worker_data import WorkerDataset

import pytest
import tensorflow as tf

TWICE = tf.constant(2)


def numbers(count: int = 45) -> tf.data.Dataset:
    return tf.data.Dataset.range(count, output_type=tf.int32)


def row(i):
    tf.debugging.assert_less(i, 1000)
    return {"b": tf.fill((3,), i), "a": i}, i * TWICE


def parsed(count: int = 45) -> tf.data.Dataset:
    return numbers(count).map(row, num_parallel_calls=2)


DATASETS = {
    "plain": lambda: parsed().batch(7),
    "full": lambda: parsed().batch(8, drop_remainder=True).repeat(2),
    "full, uneven": lambda: parsed().batch(7, drop_remainder=True),
    "two maps": lambda: numbers().map(lambda i: i + 1).prefetch(2).map(row).batch(7),
    "one tensor": lambda: numbers().map(lambda i: i + 1).batch(5, num_parallel_calls=2),
    "fewer than replicas": lambda: parsed(9).batch(7),
    "taken": lambda: parsed().skip(3).take(20).repeat(2).batch(6).prefetch(2).skip(1),
    "shuffled": lambda: parsed().shuffle(9, 4, reshuffle_each_iteration=False).batch(7),
    "batches shuffled": lambda: parsed().batch(7).shuffle(9, 4, reshuffle_each_iteration=False),
    "cached": lambda: parsed().cache().map(lambda x, y: (x, y + 1)).batch(7).cache(),
    "weighted": lambda: parsed().batch(7).map(lambda x, y: (x, y, tf.where(y > 9, 2, 1))),
    "classes": lambda: class_weighted(
        parsed().batch(7).map(lambda x, y: (x, tf.cast(y > 20, tf.int32))), {0: 1.0, 1: 2.5}
    ),
    "of batches": lambda: numbers().batch(7).map(lambda i: (i * 2, i + TWICE)),
    "texts of batches": lambda: (
        numbers().map(tf.as_string).batch(7).map(lambda t: tf.io.decode_csv(t, [[0]])[0])
    ),
    "full, weighted": lambda: parsed().batch(7, True).map(lambda x, y: (x, y * TWICE)),
}


def there(dataset):
    """A dataset as a process gets it, with caches of its own."""
    text = placed(graph_of(dataset), {}, {}.__getitem__)
    made = tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(text))
    return tf.data.experimental.from_variant(made, dataset.element_spec)


def kept(dataset, rows, found=None) -> list:
    """What each process keeps: of the whole, or by what was found."""
    found = found or (lambda process: dataset.map(rows.cut(process)))
    made = [there(found(process)) for process in range(len(rows.replicas))]
    elements = [[tf.nest.map_structure(lambda t: t.numpy().tolist(), e) for e in m] for m in made]
    return [(m.element_spec, e) for m, e in zip(made, elements, strict=True)]


@pytest.mark.parametrize("replicas", [((0, 1), (2, 3)), ((0, 3), (1,), (2,))])
@pytest.mark.parametrize("name", DATASETS)
def test_own_rows_are_those_of_the_whole(name, replicas):
    """Row by row, with the same shapes, twice; also of a batch that leaves replicas without."""
    dataset = DATASETS[name]()
    rows = OwnRows(dataset.element_spec, replicas)
    found = deferred(graph_of(dataset), rows)
    assert found is not None
    for _ in range(2):
        assert kept(dataset, rows, found) == kept(dataset, rows)


def test_what_others_keep_is_not_computed(tmp_path: Path):
    """Nor is a file read of it: each process can do without the other's files."""
    for number in range(8):
        (tmp_path / str(number)).write_text(str(number))
    names = [str(tmp_path / str(number)) for number in range(8)]
    files = tf.data.Dataset.from_tensor_slices(names).shuffle(8, 3, reshuffle_each_iteration=False)
    dataset = files.map(tf.io.read_file).map(tf.strings.to_number).batch(4)
    rows = OwnRows(dataset.element_spec, ((0,), (1,)))
    wanted = kept(dataset, rows)
    found = deferred(graph_of(dataset), rows)
    for process in range(2):
        mine = {int(i) for _, (part,) in wanted[process][1] for i in part[0]}
        hidden = [tmp_path / str(number) for number in set(range(8)) - mine]
        assert len(hidden) == 4
        for one in hidden:
            one.rename(f"{one}.away")
        elements = [tf.nest.map_structure(lambda t: t.numpy().tolist(), e) for e in found(process)]
        assert elements == wanted[process][1]
        for one in hidden:
            Path(f"{one}.away").rename(one)


def test_what_fails_in_own_rows_fails():
    dataset = numbers(8).map(lambda i: row(i * 500)[0]["a"]).batch(4)
    found = deferred(graph_of(dataset), OwnRows(dataset.element_spec, ((0,), (1,))))
    assert len(list(found(0).take(1))) == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="1000"):
        list(found(1).take(1))


@pytest.mark.parametrize(
    "dataset",
    [
        parsed().batch(7).map(lambda x, y: (x, y - tf.reduce_sum(y))),
        parsed().batch(7).filter(lambda x, y: tf.size(y) == 7),
        numbers().batch(7),
        parsed().padded_batch(7),
        parsed().batch(7).unbatch(),
        numbers().map(tf.range).map(tf.size).cache().batch(7),
        numbers().map(tf.range).filter(lambda x: True).map(tf.size).batch(7),
        tf.data.Dataset.zip(parsed(), parsed()).batch(7),
    ],
    ids=[
        *("rows meet", "filtered", "no map", "padded", "no batch", "cached", "of no size"),
        "of several",
    ],
)
def test_what_is_computed_whole(dataset):
    assert deferred(graph_of(dataset), OwnRows(dataset.element_spec, ((0,), (1,)))) is None


def test_a_policy_says_that_all_is_computed(monkeypatch):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    asked = []
    monkeypatch.setattr("kdist.runtime.worker_data.deferred", lambda *_: asked.append(1))
    for given in (parsed().batch(7), parsed().batch(7).with_options(options)):
        WorkerDataset(given, ["/device:CPU:0"])
    assert len(asked) == 1
