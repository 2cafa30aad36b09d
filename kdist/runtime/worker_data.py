"""A `tf.data.Dataset` that is read where its rows are used: by each process of the program.

Every process runs the whole dataset, in the same order, and keeps its own rows: elements are global
batches, as everywhere in Keras. What cannot give the same elements in all processes, or would send
its arrays to all, is refused; process 0 reads it then, and sends rows.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from kdist.program.batch import SplitBatch
from kdist.program.own_rows import OwnRows
from kdist.runtime import by_file, drawing
from kdist.runtime.deferred import deferred
from kdist.runtime.drawing import Draws, StaysWithProcess0
from kdist.runtime.same_everywhere import check_elements, check_operations
from kdist.runtime.taken import SAME, Taken
from kdist.sharding.device import Device

import tensorflow as tf

AHEAD = 2
"""Batches that a process reads ahead."""
IN_ORDER = tf.data.experimental.AutoShardPolicy.DATA
WHOLE = tf.data.experimental.AutoShardPolicy.OFF
"""Of datasets that each process computes whole."""
_APART_FILES = (
    "each process reads files of its own of this tf.data.Dataset (AutoShardPolicy.FILE): each "
    "example is seen once, in other batches than those of one process"
)
_APART = (
    "this tf.data.Dataset begins anew: it has a shuffle in common with one that was read before, "
    "and one of both draws from it in the middle of its data, so that no turn is known."
)


class WorkerDataset:
    """A dataset as graphs, one in each process.

    Args:
        dataset: The user's; its elements are global batches.
        devices: Of the replicas, in order: one for each.

    Attributes:
        rows: Which rows are read where.
        devices: One of each process.
        apart: Whether each process reads files of its own; see `by_file`.
        refused: Why not, where the dataset's options say so.
        draws: What they are drawn from.
        length: How many batches there are; None where that is not known yet.

    Raises:
        StaysWithProcess0: It cannot be read by other processes.
    """

    def __init__(self, dataset: tf.data.Dataset, devices: Sequence[str]) -> None:
        check_elements(dataset)
        graph = drawing.graph_of(dataset)
        check_operations(graph)
        here = Device.parse(tf.config.list_logical_devices()[0].name).process
        replicas: dict[tuple[str, int], list[int]] = {here: []}
        for number, name in enumerate(devices):
            replicas.setdefault(Device.parse(name).process, []).append(number)
        self.rows = OwnRows(dataset.element_spec, tuple(map(tuple, replicas.values())))
        self.devices = [Device(process, "CPU", 0).name for process in replicas]
        self.apart, self.refused = False, ""
        cut = self._cut(dataset, graph)
        kept = [cut(k).prefetch(AHEAD) for k in range(len(replicas))]
        self._specs = [one.element_spec for one in kept]
        self.draws = Draws(graph, self.devices)
        self._last: WorkerIterator | None = None
        self._made = 0
        count = int(dataset.cardinality())
        self.length = count if count >= 0 and not self.apart else None
        texts = [drawing.graph_of(one).SerializeToString() for one in kept]
        self._readers = self._placed(texts)
        self._texts = texts if self.draws.late else []
        self.batch = tf.function(self._batch, autograph=False)

    def _cut(self, dataset: Any, graph: Any) -> Callable[[int], Any]:
        """The dataset that a process reads, by its number."""
        policy = dataset.options().experimental_distribute.auto_shard_policy
        if policy == by_file.POLICY:
            try:
                found = by_file.by_file(graph, dataset.element_spec, self.rows)
                self.apart = True
                return found
            except by_file.NotByFile as reason:
                self.refused = str(reason)
        chosen = None if policy == WHOLE else deferred(graph, self.rows)
        return chosen or (lambda process: dataset.map(self.rows.cut(process)))

    def _placed(self, texts: Sequence[bytes]) -> list[tf.data.Dataset]:
        """Makes the datasets in the processes, of their graphs."""
        made = []
        for device, text, spec in zip(self.devices, texts, self._specs, strict=True):
            graph = tf.compat.v1.GraphDef.FromString(text)
            placed = self.draws.placed(graph, device, self._made)
            with tf.device(device):
                there = tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(placed))
                made.append(tf.data.experimental.from_variant(there, spec))
        return made

    def begin(self, in_parts: bool = False) -> WorkerIterator:
        """A new iterator.

        Args:
            in_parts: Whether its batches are `Taken`.
        """
        if self._last is not None and not self._last.is_settled():
            # How far the last one has drawn follows from how far each process has read ahead.
            self._readers = self._placed(self._texts)
        made = []
        for device, one in zip(self.devices, self._readers, strict=True):
            with tf.device(device):
                made.append(iter(one))
                # Operations reach a process in order, and functions by another way: a step could
                # come before what makes its iterator.
                tf.identity(tf.constant(0)).numpy()
        self._made += 1
        kind = FileIterator if self.apart else WorkerIterator
        iterator = kind(self, made, in_parts)
        self._last = iterator if self.draws.late else None
        return iterator

    def __iter__(self) -> WorkerIterator:
        return self.begin()

    def in_place_of(self, dataset: tf.data.Dataset, in_parts: bool) -> tf.data.Dataset:
        """The same dataset to Keras, but for its iterators, which are of this one."""
        made = copy.copy(dataset)
        base: Any = type(dataset)
        parts: dict[str, Any] = {"__iter__": lambda _: self.begin(in_parts)}
        if self.apart and int(dataset.cardinality()) >= 0:
            parts["cardinality"] = lambda _: tf.constant(tf.data.UNKNOWN_CARDINALITY, tf.int64)
        made.__class__ = type(base.__name__, (base,), parts)
        made.read_by_workers = self
        return made

    def taken(
        self, first: Any, others: Sequence[Any], shapes: Sequence[Sequence[int]] = ()
    ) -> SplitBatch:
        """The next batch, in a graph.

        Args:
            first: What process 0 kept of it.
            others: The other processes' iterators, or what they kept.
            shapes: Of its tensors, in a graph for these alone.
        """
        if self.apart:
            return self.rows.joined_apart([first, *(one.get_value() for one in others)])
        kept = [first, *(one.get_next() for one in others)]
        if not shapes:
            return self.rows.joined(kept)
        for process, device in enumerate(self.devices):
            with tf.device(device):
                kept[process] = self.rows.of_shapes(process, kept[process], shapes)
        return self.rows.joined(kept, shapes[0][0])

    def _batch(self, first: Any, others: Sequence[Any]) -> Any:
        found, spec = self.taken(first, others).whole, self.rows.spec
        return tuple(found[: len(spec)]) if isinstance(spec, tuple) else found[0]


class WorkerIterator:
    """What `fit` reads a `WorkerDataset` by.

    Attributes:
        dataset: The dataset.
        first: Process 0's iterator.
        others: Those of the other processes, on their devices.
        ended: Whether all of them have come to the end of the data.
        in_graphs: Whether process 0's iterator alone says where the data ends.
    """

    in_graphs = True

    def __init__(
        self, dataset: WorkerDataset, iterators: Sequence[Any], in_parts: bool = False
    ) -> None:
        self.dataset, self._in_parts = dataset, in_parts
        self.first, *self.others = iterators
        self.ended, self._given = False, 0
        self.element_spec = dataset.rows.spec

    def __iter__(self) -> WorkerIterator:
        return self

    def take_first(self) -> tf.experimental.Optional:
        """What process 0 kept of the next batch; without a value at the end of the data.

        Raises:
            RuntimeError: That is the end in process 0 alone.
        """
        first = self.first.get_next_as_optional()
        if first.has_value():
            self._given += 1
        elif self._in_parts:
            # Keras takes the batches of several steps before the others do.
            self.dataset.length = self._given
        else:
            self._end()
        return first

    def _end(self) -> None:
        """Asked, the others have come to the end too, and a cache has all of its rows."""
        if self.ended:
            return
        if any(bool(one.get_next_as_optional().has_value()) for one in self.others):
            raise RuntimeError(f"{SAME} Received: more batches than in process 0")
        self.ended, self.dataset.length = True, self._given

    def has_given(self, count: int) -> None:
        """Counts batches that a graph has taken from the iterators."""
        self._given += count

    def is_settled(self) -> bool:
        """Whether it has drawn as much in each process: nothing was read ahead, or all was.

        Keras makes iterators that it never reads, and does not ask for more where it knows how many
        batches there are.
        """
        if self._given == self.dataset.length and not self.ended:
            self.take_first()
            self._end()
        return self.ended or self._given == 0

    def __next__(self) -> Any:
        """The next batch; whole, for what looks at one outside of a step, or `Taken`."""
        taken = self.take()
        if taken is None:
            raise StopIteration
        return taken if self._in_parts else taken.whole()

    def take(self) -> Taken | None:
        """The next batch, where its rows are or will be read; None at the end of the data."""
        first = self.take_first()
        return Taken(self.dataset, first, self.others) if first.has_value() else None


class FileIterator(WorkerIterator):
    """The same where each process reads files of its own, some more than others."""

    in_graphs = False

    def take(self) -> Taken | None:
        """See `WorkerIterator`; the end is where no process has rows left."""
        kept, rows = [], []
        for device, one in zip(self.dataset.devices, (self.first, *self.others), strict=True):
            with tf.device(device):
                kept.append(one.get_next_as_optional())
                rows.append(tf.reduce_sum(kept[-1].get_value()[0]))
        if not sum(map(int, rows)):
            self.ended, self.dataset.length = True, self._given
            return None
        self._given += 1
        return Taken(self.dataset, kept[0], kept[1:])

    def is_settled(self) -> bool:
        """See `WorkerIterator`."""
        if self._given == self.dataset.length and not self.ended:
            self.take()
        return self.ended or self._given == 0


def is_dataset(data: Any) -> bool:
    """Whether data is a `tf.data.Dataset`."""
    return isinstance(data, tf.data.Dataset)


def _in_order(data: Any) -> Any:
    """A dataset whose processes have the rows of one process's batches."""
    if not is_dataset(data) or hasattr(data, "read_by_workers"):
        return data
    if data.options().experimental_distribute.auto_shard_policy != by_file.POLICY:
        return data
    if not hasattr(data, "kdist_in_order"):
        options = tf.data.Options()
        # AUTO, which is what options begin with, would not be taken over.
        options.experimental_distribute.auto_shard_policy = IN_ORDER
        data.kdist_in_order = data.with_options(options)
    return data.kdist_in_order


class WorkerDatasets:
    """The datasets of one model that workers read.

    Args:
        say: Takes a line for the user, once.
    """

    def __init__(self, say: Any) -> None:
        self._say = say
        # One for each of the user's: iterators of one dataset share what they draw from.
        self._made: weakref.WeakKeyDictionary[Any, WorkerDataset | None] = (
            weakref.WeakKeyDictionary()
        )

    def read(
        self, data: Sequence[Any], devices: Sequence[str], in_parts: bool = False
    ) -> list[Any]:
        """What Keras gets in place of data: datasets that workers read, where that can be.

        Args:
            data: Of one call. What is no dataset, or one that process 0 reads, stays as it is.
            devices: Of the replicas.
            in_parts: See `WorkerDataset.begin`.
        """
        if in_parts:  # of predictions, whose order counts
            data = [_in_order(one) for one in data]
        found = [one for one in data if is_dataset(one) and not hasattr(one, "read_by_workers")]
        before = {id(one) for one in found if one in self._made}
        for one in found:
            if one not in self._made:
                self._make(one, devices)
        for first, second in itertools.combinations(found, 2):
            mine, other = self._made[first], self._made[second]
            if mine is not None and other is not None and mine.draws.meet_late(other.draws):
                self._made[first] = self._made[second] = None
                self.stays("two of one call take turns at a shuffle, and one of both draws late")
        for one in found:
            made = self._made[one]
            if made is not None and made.draws.apart and id(one) not in before:
                self._say(_APART)
        read = {id(one): made for one in found if (made := self._made[one]) is not None}
        return [
            read[id(one)].in_place_of(one, in_parts) if id(one) in read else one for one in data
        ]

    def _make(self, data: Any, devices: Sequence[str]) -> None:
        try:
            made = self._made[data] = WorkerDataset(data, devices)
            if made.apart:
                self._say(_APART_FILES)
            elif made.refused:
                self._say(f"AutoShardPolicy.FILE of a tf.data.Dataset is left out: {made.refused}")
        except StaysWithProcess0 as reason:
            self._made[data] = None
            self.stays(str(reason))

    def stays(self, reason: str) -> None:
        """Says that process 0 reads a dataset."""
        self._say(f"process 0 reads this tf.data.Dataset, and sends each device its rows: {reason}")
