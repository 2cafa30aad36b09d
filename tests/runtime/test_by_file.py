"""Datasets of which each process reads files of its own: no row is lost, none seen twice."""

from pathlib import Path

from kdist.program.own_rows import OwnRows
from kdist.runtime.by_file import NotByFile, by_file
from kdist.runtime.drawing import graph_of
from kdist.runtime.worker_data import WorkerDataset, WorkerDatasets

import pytest
import tensorflow as tf

FILE = tf.data.Options()
FILE.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
REPLICAS = {2: ((0, 1), (2, 3)), 3: ((0, 3), (1,), (2,)), 4: ((0,), (1,), (2,), (3,))}


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    """Files of 20, 3 and 22 rows, all of other numbers."""
    made = []
    for number, count in enumerate((20, 3, 22)):
        rows = "".join(f"{100 * number + i}\n" for i in range(count))
        (tmp_path / f"rows-{number}").write_text(rows)
        made.append(str(tmp_path / f"rows-{number}"))
    return made


def row(line):
    number = tf.strings.to_number(line)
    return {"b": tf.fill((3,), number), "a": number}, number


def lines(names) -> tf.data.Dataset:
    return tf.data.TextLineDataset(names).map(row)


DATASETS = {
    "lines": lambda names: lines(names).batch(7),
    "interleaved": lambda names: (
        tf.data.Dataset.list_files(names, seed=3)
        .interleave(tf.data.TextLineDataset, cycle_length=2)
        .map(row)
        .shuffle(9, seed=2)
        .batch(7)
        .prefetch(2)
    ),
    "of slices": lambda names: (
        tf.data.Dataset.from_tensor_slices(names)
        .flat_map(tf.data.TextLineDataset)
        .map(row)
        .batch(7)
    ),
    "one file": lambda names: lines(names[:1]).batch(7),
    "counted": lambda names: (
        lines(names).apply(tf.data.experimental.assert_cardinality(45)).batch(7)
    ),
}


@pytest.mark.parametrize("count", REPLICAS)
@pytest.mark.parametrize("name", DATASETS)
def test_each_row_is_seen_once(name, count, names):
    """In each of two epochs; a process without rows goes on with some that count for nothing."""
    dataset = DATASETS[name](names)
    rows = OwnRows(dataset.element_spec, REPLICAS[count])
    read = by_file(graph_of(dataset), dataset.element_spec, rows)
    made = [read(process) for process in range(count)]
    wanted = sorted(float(i) for _, y in dataset for i in y)
    for _ in range(2):
        seen, readers = [], [iter(one) for one in made]
        for _ in range(30):
            batch = rows.joined_apart([next(one) for one in readers])
            assert int(batch.size) == sum(map(int, batch.counts)) == len(batch.whole[1]) <= 7
            seen += batch.whole[1].numpy().tolist()
            assert all(len(y) >= 1 for _, y, _ in batch.parts)
        assert int(batch.size) == 0
        assert sorted(seen) == wanted


def test_the_end_is_where_all_have_ended_and_it_has_no_length_before(names):
    dataset = DATASETS["counted"](names).with_options(FILE)
    said = []
    (read,) = WorkerDatasets(said.append).read([dataset], ["/device:CPU:0", "/device:CPU:1"])
    assert int(dataset.cardinality()) == 7 and int(read.cardinality()) < 0
    (line,) = said
    assert "each process reads files of its own" in line
    iterator = iter(read)
    assert sorted(float(i) for _, y in iterator for i in y) == sorted(
        float(i) for _, y in dataset for i in y
    )
    assert iterator.ended and iterator.is_settled()


def test_predictions_are_in_order(names):
    dataset = DATASETS["lines"](names).with_options(FILE)
    datasets, devices = WorkerDatasets(pytest.fail), ["/device:CPU:0", "/device:CPU:1"]
    (read,), (again,) = (datasets.read([dataset], devices, in_parts=True) for _ in range(2))
    assert not read.read_by_workers.apart
    assert again.read_by_workers is read.read_by_workers


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda names: lines(names).batch(7, drop_remainder=True), "drop_remainder"),
        (lambda names: lines(names).take(9).batch(7), "take and skip before batch"),
        (lambda names: lines(names).batch(1), "fewer rows than there are processes"),
        (lambda names: lines(names).padded_batch(7), "in a way that is not known"),
        (lambda names: tf.data.Dataset.range(9).batch(7), "no files"),
    ],
)
def test_what_is_not_read_so(make, why, names):
    dataset = make(names)
    rows = OwnRows(dataset.element_spec, ((0,), (1,)))
    with pytest.raises(NotByFile, match=why):
        by_file(graph_of(dataset), dataset.element_spec, rows)


def test_a_line_says_why_and_rows_are_those_of_one_process(names):
    said = []
    dataset = lines(names).take(9).batch(4).with_options(FILE)
    (read,) = WorkerDatasets(said.append).read([dataset], ["/device:CPU:0", "/device:CPU:1"])
    assert not read.read_by_workers.apart
    assert said == [
        "AutoShardPolicy.FILE of a tf.data.Dataset is left out: take and skip before batch count "
        "the elements of all files"
    ]


def test_no_line_without_the_option(names):
    read = WorkerDataset(DATASETS["lines"](names), ["/device:CPU:0"])
    assert not read.apart and not read.refused
