"""What a `tf.data.Dataset` draws, and from where, so that processes that run it draw the same.

A shuffle takes the seeds of each iterator from a *generator*. All datasets that are made of that
shuffle have it in common, and take turns: which one draws when decides what each of them sees. So
each process gets one generator for each of the user's, which all datasets there have in common too.

That needs draws in an order that follows from the program alone. Iterators draw when they are made,
before what prepares batches in the background begins. What draws *late*, in the middle of the data
(a shuffle that is repeated, a cache of shuffled rows that fills) depends on how far that is. Of two
datasets that take turns so, results differ from run to run in one process too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

FAIL = 2
"""Of TensorFlow's policies for state outside of a dataset: refuse it, and say what it is."""
GENERATORS = {
    "ShuffleDatasetV3": (2, 4, "reshuffle_each_iteration"),
    "ShuffleAndRepeatDatasetV2": (2, 5, "reshuffle_each_iteration"),
    "RandomDatasetV2": (0, 2, "rerandomize_each_iteration"),
}
"""Operations that draw: which inputs are the first of their two seeds, and the handle of their
generator; which attribute says that each iterator draws, and not the first one for all."""
WITHOUT = {"ShuffleDataset": 2, "ShuffleAndRepeatDataset": 2, "RandomDataset": 0}
"""Operations that draw without a generator: which input is the first of their two seeds."""
CACHES = {"CacheDatasetV2": 2}
"""Operations that keep rows in memory, and which input is the handle of what keeps them."""
AT_ONCE = frozenset(
    f"{name}Dataset{version}"
    for version in ("", "V2", "V3", "V4")
    for name in (
        *("AssertCardinality", "Batch", "Filter", "FlatMap", "Interleave", "Map", "MapAndBatch"),
        *("Options", "PaddedBatch", "ParallelBatch", "ParallelFilter", "ParallelInterleave"),
        *("ParallelMap", "Prefetch", "Scan", "Shard", "Shuffle", "Skip", "Take", "TakeWhile"),
        *("Unbatch", "Window"),
    )
) | {"_Retval"}
"""Operations whose iterators make that of their first input with themselves, or with their first
element, and once."""
ALL_AT_ONCE = frozenset({"ZipDataset", "DirectedInterleaveDataset"})
"""Operations whose iterators do so with all their inputs."""


class StaysWithProcess0(Exception):
    """A dataset is read by process 0; the text says why."""


@dataclasses.dataclass(frozen=True)
class Use:
    """How a dataset uses what it has in common with others.

    Attributes:
        operations: How many of its operations do.
        late: Whether one of them does when iterators have been made.
    """

    operations: int
    late: bool


class Draws:
    """What a dataset draws from in each of its processes.

    Args:
        graph: Of `graph_of`.
        devices: One of each process.

    Attributes:
        uses: See there.
        apart: Whether a dataset before this one draws from what this one does, but one of both
            draws late. Then each has a generator of its own.
    """

    def __init__(self, graph: Any, devices: Sequence[str]) -> None:
        self.uses = uses(graph)
        self.apart = any(
            name in _late_before and (use.late or _late_before[name])
            for name, use in self.uses.items()
        )
        for name, use in self.uses.items():
            _late_before[name] = use.late or _late_before.get(name, False)
        self._seeds = {
            name: given if any(given) else _drawn_seeds.setdefault(name, _two_seeds())
            for name, given in seeds_of(graph).items()
        }
        self._devices = tuple(devices)
        self._own: dict[tuple[str, str], tuple[Any, Any]] = {}

    @property
    def late(self) -> bool:
        """Whether it draws when an iterator has been made."""
        return any(use.late for use in self.uses.values())

    def meet_late(self, other: Draws) -> bool:
        """Whether both draw from one generator, and one of them late."""
        both = self.uses.keys() & other.uses.keys()
        return any(self.uses[name].late or other.uses[name].late for name in both)

    def placed(self, graph: Any, device: str, iterators: int) -> bytes:
        """A graph for a process, with the generators there.

        Args:
            graph: Of `graph_of`, of a dataset that is made of this one; it is changed.
            device: Of the process.
            iterators: How many were made before; what they drew is left out where generators are
                made anew.
        """
        handles = {}
        for name, use in self.uses.items():
            if name not in self._seeds:
                continue  # of a cache
            if use.late:
                self._own[name, device] = generator(device, self._seeds[name], iterators)
                handles[name] = self._own[name, device][1]
                continue
            shared = _shared.setdefault((name, self._devices), {})
            if device not in shared:
                shared[device] = generator(device, self._seeds[name], 0)
            handles[name] = shared[device][1]
        return placed(graph, handles, self._seeds.__getitem__)


# By the names of the user's generators, which TensorFlow gives once.
_drawn_seeds: dict[str, tuple[int, int]] = {}
_late_before: dict[str, bool] = {}
_shared: dict[tuple[str, tuple[str, ...]], dict[str, tuple[Any, Any]]] = {}
_draw = np.random.default_rng()  # not the one that users seed, which goes on as without


def _two_seeds() -> tuple[int, int]:
    one, two = _draw.integers(1, 2**31, 2, dtype=np.int64)
    return int(one), int(two)


def graph_of(dataset: tf.data.Dataset) -> Any:
    """A dataset's graph.

    Raises:
        StaysWithProcess0: It has Python functions, variables, tables or random draws.
    """
    variant = tf.data.experimental.to_variant(dataset)
    try:
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=FAIL, strip_device_assignment=True
        ).numpy()
    except tf.errors.OpError as error:
        raise StaysWithProcess0(str(error.message).split("} ")[-1].split(" [Op")[0]) from error
    return tf.compat.v1.GraphDef.FromString(text)


def uses(graph: Any) -> dict[str, Use]:
    """What a dataset has in common with others, by its name: generators, and caches behind them.

    Args:
        graph: See `graph_of`.

    Raises:
        StaysWithProcess0: One iterator draws late from what another operation draws from too.
    """
    nodes = {node.name: node for node in graph.node}
    drawing = {n for n, node in nodes.items() if _draws(node)}
    stateful = drawing | {n for n, node in nodes.items() if node.op in CACHES}
    takers: dict[str, list[tuple[Any, int]]] = {name: [] for name in nodes}
    for node in graph.node:
        for at, name in enumerate(node.input):
            takers[source(name)].append((node, at))
    late: dict[str, bool] = {}
    found: dict[str, Use] = {}
    for name in stateful:
        node = nodes[name]
        if node.op in CACHES and not _above(name, nodes, frozenset(drawing)):
            continue  # the same rows in each iterator
        mine = node.op in CACHES or "Repeat" in node.op or _late(name, takers, late)
        (key,) = _handles(nodes[source(node.input[_handle_at(node)])])
        before = found.get(key.name, Use(0, False))
        found[key.name] = Use(before.operations + 1, before.late or mine)
    if any(use.late and use.operations > 1 for use in found.values()):
        raise StaysWithProcess0("several of its parts take turns at one shuffle, some of them late")
    return found


def placed(
    graph: Any,
    handles: Mapping[str, Any],
    seeds: Callable[[str], tuple[int, int]],
) -> bytes:
    """A dataset's graph as a process gets it.

    Args:
        graph: Of `graph_of`; it is changed.
        handles: For the names of the user's generators, what they are in that process. All other
            state is made anew.
        seeds: For the name of a generator without seeds, those that it has in all processes.
    """
    values = {node.name: node for node in graph.node if node.op == "Const"}
    for node in list(graph.node):
        if node.op not in GENERATORS:
            continue
        first, handle, _ = GENERATORS[node.op]
        if any(scalar(values.get(source(name))) for name in node.input[first : first + 2]):
            continue
        (key,) = _handles(values[source(node.input[handle])])
        for at, drawn in zip((first, first + 1), seeds(key.name), strict=True):
            seed = graph.node.add(name=f"kdist_seed_{node.name.replace('/', '_')}_{at}", op="Const")
            seed.attr["dtype"].type = tf.int64.as_datatype_enum
            seed.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(drawn, tf.int64))
            node.input[at] = seed.name
    for node in values.values():
        for handle in _handles(node):
            if handle.name in handles:
                handle.CopyFrom(handles[handle.name])
            else:
                # By the name that it has here, another process might find something else.
                handle.name = f"kdist_{_draw.integers(2**62)}"
    return bytes(graph.SerializeToString())


def generator(device: str, seeds: tuple[int, int], skipped: int) -> tuple[Any, Any]:
    """Makes a generator in a process.

    Args:
        device: Of that process.
        seeds: What it begins with.
        skipped: How many draws to leave out.

    Returns:
        What it lives as long as, and its handle, for `placed`.
    """
    with tf.device(device):
        none = tf.raw_ops.RangeDataset(
            start=0, stop=0, step=1, output_types=[tf.int64], output_shapes=[()]
        )
        keeper = tf.raw_ops.ShuffleDatasetV3(
            input_dataset=none,
            buffer_size=1,
            seed=seeds[0],
            seed2=seeds[1],
            seed_generator=tf.raw_ops.DummySeedGenerator(),
            output_types=[tf.int64],
            output_shapes=[()],
            reshuffle_each_iteration=True,
        )
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=keeper, external_state_policy=FAIL, strip_device_assignment=True
        )
        empty = tf.data.experimental.from_variant(keeper, tf.TensorSpec((), tf.int64))
        for _ in range(skipped):
            iter(empty)
    graph = tf.compat.v1.GraphDef.FromString(text.numpy())
    (handle,) = [handle for node in graph.node for handle in _handles(node)]
    return keeper, handle


def seeds_of(graph: Any) -> dict[str, tuple[int, int]]:
    """The seeds of the generators of a graph, by name; (0, 0) where the user gave none."""
    nodes = {node.name: node for node in graph.node}
    found = {}
    for node in graph.node:
        if node.op in GENERATORS:
            first, handle, _ = GENERATORS[node.op]
            (key,) = _handles(nodes[source(node.input[handle])])
            one, two = (scalar(nodes[source(n)]) for n in node.input[first : first + 2])
            found[key.name] = (int(one), int(two))
    return found


def source(name: str) -> str:
    """The node that an input of another is of."""
    return name.removeprefix("^").partition(":")[0]


def scalar(node: Any) -> Any:
    """The value of a constant of a graph; None for what is none."""
    if node is None:
        return None
    proto = node.attr["value"].tensor
    return tf.io.parse_tensor(proto.SerializeToString(), tf.dtypes.as_dtype(proto.dtype)).numpy()


def _draws(node: Any) -> bool:
    """Whether each iterator draws anew."""
    return node.op in GENERATORS and node.attr[GENERATORS[node.op][2]].b


def _handle_at(node: Any) -> int:
    return CACHES[node.op] if node.op in CACHES else GENERATORS[node.op][1]


def _handles(node: Any) -> list[Any]:
    """The handles in a constant."""
    if node.op != "Const" or node.attr["dtype"].type != tf.resource.as_datatype_enum:
        return []
    return list(node.attr["value"].tensor.resource_handle_val)


def _above(name: str, nodes: Mapping[str, Any], wanted: frozenset[str]) -> bool:
    """Whether what a node gets comes through one of others."""
    before = [source(one) for one in nodes[name].input]
    return any(one in wanted or _above(one, nodes, wanted) for one in before)


def _late(name: str, takers: Mapping[str, list[tuple[Any, int]]], known: dict[str, bool]) -> bool:
    """Whether iterators of a node are made after the dataset's own."""
    if name not in known:
        known[name] = any(
            not (node.op in ALL_AT_ONCE or (at == 0 and node.op in AT_ONCE))
            or _late(node.name, takers, known)
            for node, at in takers[name]
        )
    return known[name]
