"""A dataset of which each process reads files of its own, as `AutoShardPolicy.FILE` asks for.

TensorFlow says which files are whose. Each process makes batches of its own share of rows, until
all have come to their end: what has none left gives rows that count for nothing. So each example is
seen once, in other batches than one process has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from kdist.program.own_rows import OwnRows
from kdist.runtime import drawing
from kdist.runtime.deferred import BATCHES, Form, Unknown, as_written

import tensorflow as tf

POLICY = tf.data.experimental.AutoShardPolicy.FILE
SHUFFLES = frozenset({"ShuffleDataset", "ShuffleDatasetV2", "ShuffleDatasetV3"})
COUNTED = frozenset({"AssertCardinalityDataset"})
"""What says how many elements there are in all files."""
DRAWING = frozenset({"RandomDataset", "RandomDatasetV2", "ShuffleAndRepeatDatasetV2"})


class NotByFile(Exception):
    """A dataset cannot be read so; the text says why."""


def by_file(graph: Any, spec: Any, rows: OwnRows) -> Callable[[int], tf.data.Dataset]:
    """What each process reads of a dataset, by its number: an endless dataset.

    Args:
        graph: See `drawing.graph_of`.
        spec: Of its elements.
        rows: Which replicas are where.

    Raises:
        NotByFile: It cannot be.
    """
    try:
        form = Form(graph)
        size = int(form.constant(form.batch.input[1]))
        whole = bool(form.constant(form.batch.input[BATCHES[form.batch.op]]))
    except Unknown:
        raise NotByFile("it makes its batches in a way that is not known") from None
    if whole:
        raise NotByFile("drop_remainder=True would leave out the last rows of each process")
    if any(node.op in ("TakeDataset", "SkipDataset") for node in form.between):
        raise NotByFile("take and skip before batch count the elements of all files")
    if any(node.op in DRAWING for node in graph.node):
        raise NotByFile("it draws numbers, or sources, which processes have to draw alike")
    shares = rows.shares(size)
    if not all(shares):
        raise NotByFile("a batch has fewer rows than there are processes")
    counted = _without(graph, COUNTED)
    of_files = [_of_files(counted, spec, k, len(shares)) for k in range(len(shares))]
    first = _made(_without(counted, SHUFFLES), spec).take(1)

    def read(process: int) -> tf.data.Dataset:
        own = _made(_with_batches_of(of_files[process], shares[process]), spec)
        count = len(rows.replicas[process])

        @as_written
        def parts(*element: Any) -> Any:
            return rows.apart(element, count)

        @as_written
        def for_nothing(*element: Any) -> Any:
            counts, data = rows.apart(tf.nest.map_structure(lambda t: t[:1], element), count)
            return tf.zeros_like(counts), data

        return own.map(parts).concatenate(first.map(for_nothing).cache().repeat())

    return read


def _of_files(graph: Any, spec: Any, process: int, count: int) -> Any:
    """The graph of a dataset over the files of one of some processes."""
    flat = tf.nest.flatten(spec)
    try:
        made = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(_made(graph, spec)),
            num_workers=count,
            index=process,
            output_types=[one.dtype for one in flat],
            output_shapes=[one.shape for one in flat],
            auto_shard_policy=POLICY.value,
        )
    except tf.errors.OpError as error:
        raise NotByFile("TensorFlow finds no files in it that it could deal out") from error
    found = drawing.graph_of(tf.data.experimental.from_variant(made, spec))
    for node in found.node:
        if node.op == "ShardDataset":
            node.attr["require_non_empty"].b = False  # fewer files than processes
    return found


def _with_batches_of(graph: Any, size: int) -> Any:
    """A graph whose batches have another size."""
    batch = Form(graph).batch
    number = graph.node.add(name="kdist_share", op="Const")
    number.attr["dtype"].type = tf.int64.as_datatype_enum
    number.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(size, tf.int64))
    nodes = {node.name: node for node in graph.node}
    nodes[batch.name].input[1] = number.name
    return graph


def _without(graph: Any, operations: Collection[str]) -> Any:
    """A graph whose datasets leave some operations out."""
    made = type(graph)()
    made.CopyFrom(graph)
    nodes = {node.name: node for node in made.node}
    for node in made.node:
        for at, name in enumerate(node.input):
            while nodes[drawing.source(name)].op in operations:
                name = nodes[drawing.source(name)].input[0]
            node.input[at] = name
    return made


def _made(graph: Any, spec: Any) -> tf.data.Dataset:
    made = tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(graph.SerializeToString()))
    return tf.data.experimental.from_variant(made, spec)
