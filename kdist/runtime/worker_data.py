"""A `tf.data.Dataset` that is read where its rows are used: by each process of the program.

Every process runs the whole dataset, in the same order, and keeps its own rows: elements are global
batches, as everywhere in Keras. What cannot give the same elements in all processes, or would send
its arrays to all, is refused; process 0 reads it then, and sends rows.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from kdist.program.batch import SplitBatch
from kdist.program.own_rows import OwnRows
from kdist.sharding.device import Device

import numpy as np
import tensorflow as tf

FAIL = 2
"""Of TensorFlow's policies for state outside of a dataset: refuse it, and say what it is."""
LARGE_BYTES = 16 << 20
"""Of arrays in a dataset, which every process would be sent whole."""
AHEAD = 2
"""Batches that a process reads ahead."""
SHUFFLES = {
    "ShuffleDataset": 2,
    "ShuffleDatasetV2": 2,
    "ShuffleDatasetV3": 2,
    "ShuffleAndRepeatDataset": 2,
    "ShuffleAndRepeatDatasetV2": 2,
    "RandomDataset": 0,
    "RandomDatasetV2": 0,
}
"""Operations that draw, and which input is the first of their two seeds."""
FILES = ("CacheDataset", "CacheDatasetV2", "SnapshotDataset", "SnapshotDatasetV2")


class StaysWithProcess0(Exception):
    """A dataset is read by process 0; the text says why."""


class WorkerDataset:
    """A dataset as graphs, one in each process.

    Args:
        dataset: The user's; its elements are global batches.
        devices: Of the replicas, in order: one for each.

    Raises:
        StaysWithProcess0: It cannot be read by other processes.
    """

    def __init__(self, dataset: tf.data.Dataset, devices: Sequence[str]) -> None:
        _check_elements(dataset)
        here = Device.parse(tf.config.list_logical_devices()[0].name).process
        replicas: dict[tuple[str, int], list[int]] = {here: []}
        for number, name in enumerate(devices):
            replicas.setdefault(Device.parse(name).process, []).append(number)
        self.rows = OwnRows(dataset.element_spec, tuple(map(tuple, replicas.values())))
        draw = np.random.default_rng()  # not the one that users seed, which goes on as without
        graph = _seeded(_graph_of(dataset), draw)
        same = tf.data.experimental.from_variant(_dataset(graph), dataset.element_spec)
        self._devices = [Device(process, "CPU", 0).name for process in replicas]
        self._readers = []
        for number, device in enumerate(self._devices):
            kept = same.map(self.rows.cut(number)).prefetch(AHEAD)
            graph = _graph_of(kept).SerializeToString()
            with tf.device(device):
                there = _dataset(graph)
                self._readers.append(tf.data.experimental.from_variant(there, kept.element_spec))
        self.batch = tf.function(self._batch, autograph=False)

    def __iter__(self) -> WorkerIterator:
        made = []
        for device, one in zip(self._devices, self._readers, strict=True):
            with tf.device(device):
                made.append(iter(one))
                # Operations reach a process in order, and functions by another way: a step could
                # come before what makes its iterator.
                tf.identity(tf.constant(0)).numpy()
        return WorkerIterator(self, made)

    def in_place_of(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The same dataset to Keras, but for its iterators, which are of this one."""
        made = copy.copy(dataset)
        base: Any = type(dataset)
        made.__class__ = type(base.__name__, (base,), {"__iter__": lambda _: iter(self)})
        made.read_by_workers = self
        return made

    def taken(self, first: Any, others: Sequence[Any]) -> SplitBatch:
        """The next batch, in a graph.

        Args:
            first: What process 0 kept of it.
            others: The other processes' iterators.
        """
        return self.rows.joined([first, *(one.get_next() for one in others)])

    def _batch(self, first: Any, others: Sequence[Any]) -> Any:
        found, spec = self.taken(first, others).whole, self.rows.spec
        return tuple(found[: len(spec)]) if isinstance(spec, tuple) else found[0]


class WorkerIterator:
    """What `fit` reads a `WorkerDataset` by.

    Attributes:
        dataset: The dataset.
        first: Process 0's iterator.
        others: Those of the other processes, on their devices.
    """

    def __init__(self, dataset: WorkerDataset, iterators: Sequence[Any]) -> None:
        self.dataset = dataset
        self.first, *self.others = iterators
        self.element_spec = dataset.rows.spec

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        """The next batch, whole: for what looks at one outside of a step."""
        kept = next(self.first)
        with ending_together():
            return self.dataset.batch(kept, self.others)


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Around what takes a batch that process 0 has: names the end of another's data.

    Raises:
        RuntimeError: Another process has no such batch.
    """
    try:
        yield
    except tf.errors.OutOfRangeError as error:
        raise RuntimeError(
            "A tf.data.Dataset has the same elements in every process, each of which reads it. "
            "Give all of them the same files, or arrays in place of a Dataset, which process 0 "
            f"reads. Received: fewer batches than in process 0 ({error.message})"
        ) from error


def is_dataset(data: Any) -> bool:
    """Whether data is a `tf.data.Dataset`."""
    return isinstance(data, tf.data.Dataset)


def _check_elements(dataset: tf.data.Dataset) -> None:
    if not all(isinstance(one, tf.TensorSpec) for one in tf.nest.flatten(dataset.element_spec)):
        raise StaysWithProcess0("its elements are not dense tensors alone")
    if dataset.options().deterministic is False:
        raise StaysWithProcess0("deterministic=False, and its order is not the same twice")


def _graph_of(dataset: tf.data.Dataset) -> Any:
    """A dataset's graph.

    Raises:
        StaysWithProcess0: It has Python functions, variables, tables or random draws, or is of
            arrays.
    """
    variant = tf.data.experimental.to_variant(dataset)
    try:
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=FAIL, strip_device_assignment=True
        ).numpy()
    except tf.errors.OpError as error:
        raise StaysWithProcess0(str(error.message).split("} ")[-1].split(" [Op")[0]) from error
    if len(text) > LARGE_BYTES:
        raise StaysWithProcess0(f"it has arrays of {len(text) >> 20} MiB in it")
    return tf.compat.v1.GraphDef.FromString(text)


def _dataset(graph: bytes) -> Any:
    return tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(graph))


def _seeded(graph: Any, draw: np.random.Generator) -> bytes:
    """A dataset's graph whose shuffles draw the same in every process.

    Raises:
        StaysWithProcess0: It has operations whose results differ between processes.
    """
    inside = [node for one in graph.library.function for node in one.node_def]
    for node in (*graph.node, *inside):
        # Reading an attribute that is not there would make it.
        if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
            raise StaysWithProcess0("deterministic=False, and its order is not the same twice")
    values = {node.name: node.attr["value"].tensor for node in graph.node if node.op == "Const"}
    for node in list(graph.node):
        if node.op == "Const" and node.attr["dtype"].type == tf.resource.as_datatype_enum:
            # What draws a shuffle's seeds; of another name, each process makes one of its own.
            # The user's, which is in process 0 alone, may have been drawn from before.
            for handle in node.attr["value"].tensor.resource_handle_val:
                handle.name = f"kdist_{draw.integers(2**62)}"
        if node.op in FILES and _scalar(values.get(node.input[1])) != b"":
            raise StaysWithProcess0(f"{node.op} writes a file, and processes may share a disk")
        if node.op not in SHUFFLES:
            continue
        at = SHUFFLES[node.op]
        if any(_scalar(values.get(name)) != 0 for name in node.input[at : at + 2]):
            continue
        for k in (at, at + 1):
            seed = graph.node.add(name=f"kdist_seed_{node.name.replace('/', '_')}_{k}", op="Const")
            seed.attr["dtype"].type = tf.int64.as_datatype_enum
            drawn = draw.integers(1, 2**31, dtype=np.int64)
            seed.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(drawn))
            node.input[k] = seed.name
    return bytes(graph.SerializeToString())


def _scalar(proto: Any) -> Any:
    """The value of a constant of a graph; None where there is none."""
    if proto is None:
        return None
    return tf.io.parse_tensor(proto.SerializeToString(), tf.dtypes.as_dtype(proto.dtype)).numpy()


class WorkerDatasets:
    """The datasets of one model that workers read.

    Args:
        say: Takes a line for the user, once.
    """

    def __init__(self, say: Any) -> None:
        self._say = say
        # One for each of the user's: iterators of one dataset share the seeds of its shuffles.
        self._made: weakref.WeakKeyDictionary[Any, WorkerDataset | None] = (
            weakref.WeakKeyDictionary()
        )

    def read(self, data: Any, devices: Sequence[str]) -> Any:
        """What Keras gets in place of data: a dataset that workers read, where that can be.

        Args:
            data: Of `fit`. What is no dataset, or one that process 0 reads, stays as it is.
            devices: Of the replicas.
        """
        if not is_dataset(data) or hasattr(data, "read_by_workers"):
            return data
        if data not in self._made:
            try:
                self._made[data] = WorkerDataset(data, devices)
            except StaysWithProcess0 as reason:
                self._made[data] = None
                self.stays(str(reason))
        made = self._made[data]
        return data if made is None else made.in_place_of(data)

    def stays(self, reason: str) -> None:
        """Says that process 0 reads a dataset."""
        self._say(f"process 0 reads this tf.data.Dataset, and sends each device its rows: {reason}")
