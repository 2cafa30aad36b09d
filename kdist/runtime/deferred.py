"""A process's own rows of a dataset, computed for these alone.

What a `map` makes of each element is computed for the rows that a process keeps, where that gives
the same rows: a `map` goes behind a `shuffle`, `repeat`, `take`, and behind the cut of the batch.
Which elements there are, and in which order, is read by every process as before; so a `map` that
reads files reads those of own rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._compat import function_graphs
from kdist.program.own_rows import OwnRows
from kdist.rows.study import NotStudied, rows_stay_apart
from kdist.runtime import drawing

import tensorflow as tf

BATCHES = {"BatchDatasetV2": 2, "ParallelBatchDataset": 3}
"""Operations that make batches, and which input says whether the last one is left out."""
MAPS = {"MapDataset": 0, "ParallelMapDataset": 1, "ParallelMapDatasetV2": 1}
"""Operations that compute each element from one, and how many inputs say how."""
AS_THEY_ARE = frozenset({"PrefetchDataset", "RepeatDataset", "TakeDataset", "SkipDataset"}) | {
    *("OptionsDataset", "AssertCardinalityDataset", "ShardDataset"),
    *(f"ShuffleDataset{version}" for version in ("", "V2", "V3")),
}
"""Operations that hand elements on, whatever is in them."""
CACHES = frozenset({"CacheDataset", "CacheDatasetV2"})
"""The same, but what is computed before one is not to be computed in each epoch."""

as_written = tf.autograph.experimental.do_not_convert


@dataclasses.dataclass(frozen=True)
class DeferredMap:
    """What a `map` computes.

    Attributes:
        function: Its definition, which TensorFlow's runtime knows by its name.
        captured: Its arguments behind the element.
        types: Of what it returns.
        shapes: Of what it returns.
        parallel: How many elements at once; None for one after the other.
    """

    function: Any
    captured: tuple[Any, ...]
    types: tuple[tf.DType, ...]
    shapes: tuple[tf.TensorShape, ...]
    parallel: int | None

    def of(self, tensors: Sequence[Any], batch: Any = ()) -> list[Any]:
        """The same of an element, or of a batch of rows.

        Args:
            tensors: The element, flat.
            batch: The size of a batch that shapes are of, which may be another one here.
        """
        name = self.function.signature.name
        given = [*tensors, *self.captured]
        made = tf.raw_ops.PartitionedCall(args=given, Tout=list(self.types), f=name)
        for one, shape in zip(made, self.shapes, strict=True):
            one.set_shape([*batch, *shape[len(batch) :]])
        return list(made)

    def keeps_apart(self, specs: Sequence[Any]) -> bool:
        """Whether rows of a batch stay apart in it.

        Args:
            specs: Of its arguments but those that are captured.
        """
        graph_on = functools.partial(function_graphs.graph_of_definition, self.function)
        try:
            return rows_stay_apart(graph_on, specs, [one.shape for one in self.captured])
        except NotStudied:
            return False


class Unknown(Exception):
    """The dataset has another form."""


class Form:
    """A dataset as maps, a batch, maps, between operations that hand elements on.

    Args:
        graph: See `drawing.graph_of`.

    Attributes:
        batch: The operation that makes batches.
        above: Operations after it, the last one first; maps left out.
        of_batches: What is computed of batches, the first one first.
        between: Operations before it, from the batch on; maps left out.
        of_rows: What is computed of single elements, the first one first.
        source: What these begin with.

    Raises:
        Unknown: It has another form.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.nodes = {node.name: node for node in graph.node}
        (end,) = [node for node in graph.node if node.op == "_Retval"]
        self.above, self.of_batches, self.batch = self._down(end, AS_THEY_ARE | CACHES)
        if self.batch.op not in BATCHES:
            raise Unknown
        self.between, self.of_rows, self.source = self._down(self.batch, AS_THEY_ARE)

    def _down(self, node: Any, passed: frozenset[str]) -> tuple[list[Any], list[DeferredMap], Any]:
        """What comes before a node: operations, maps, and what they get."""
        found: list[Any] = []
        maps: list[DeferredMap] = []
        while (node := self.before(node)).op in passed or node.op in MAPS:
            if node.op in MAPS:
                maps.insert(0, self._mapped(node))
            else:
                found.append(node)
        return found, maps, node

    def before(self, node: Any) -> Any:
        """What an operation gets its elements of."""
        if not node.input:
            raise Unknown
        return self.nodes[drawing.source(node.input[0])]

    def constant(self, name: str) -> Any:
        """The value of an input.

        Raises:
            Unknown: It is none of the graph's constants.
        """
        node = self.nodes[drawing.source(name)]
        resource = node.op == "Const" and node.attr["dtype"].type == tf.resource.as_datatype_enum
        if node.op != "Const" or resource:
            raise Unknown
        return drawing.scalar(node)

    def _mapped(self, node: Any) -> DeferredMap:
        last = MAPS[node.op]
        captured = node.input[1 : len(node.input) - last]
        name = node.attr["f"].func.name
        (function,) = [f for f in self.graph.library.function if f.signature.name == name]
        return DeferredMap(
            function,
            tuple(tf.constant(self.constant(one)) for one in captured),
            tuple(_types(node)),
            tuple(_shapes(node)),
            int(self.constant(node.input[-1])) if last else None,
        )

    def raw_batches(self) -> tf.data.Dataset:
        """Batches of what maps of rows have not seen yet.

        Raises:
            Unknown: That has no sizes, or no tensors.
        """
        types, shapes = _types(self.source), _shapes(self.source)
        known = all(shape.is_fully_defined() for shape in shapes)
        if not known or any(one in (tf.variant, tf.resource) for one in types):
            raise Unknown
        graph = type(self.graph)()
        graph.CopyFrom(self.graph)
        nodes = {node.name: node for node in graph.node}
        chain = [*(nodes[one.name] for one in (self.batch, *self.between)), self.source]
        for node, before in zip(chain[:-1], chain[1:], strict=True):
            node.input[0] = before.name
            _set_elements(node, types, shapes)
        size = _shapes(self.batch)[0][:1]
        _set_elements(chain[0], types, [size.concatenate(shape) for shape in shapes])
        return _made_of(graph, chain[0])

    def on_top(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """A dataset in place of the batches, with the operations that came after them."""
        graph = drawing.graph_of(dataset)
        flat = tf.nest.flatten(dataset.element_spec)
        (end,) = [node for node in graph.node if node.op == "_Retval"]
        top = end.input[0]
        for given in reversed(self.above):
            node = graph.node.add()
            node.CopyFrom(given)
            node.name = f"kdist_above/{given.name}"
            node.input[0] = top
            for at, name in enumerate(given.input[1:], 1):
                value = graph.node.add()
                value.CopyFrom(self.nodes[drawing.source(name)])
                value.name = f"{node.name}/{at}"
                node.input[at] = value.name
            _set_elements(node, [one.dtype for one in flat], [one.shape for one in flat])
            top = node.name
        end.input[0] = top
        text = tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(graph.SerializeToString()))
        return tf.data.experimental.from_variant(text, dataset.element_spec)


def deferred(graph: Any, rows: OwnRows) -> Callable[[int], tf.data.Dataset] | None:
    """What each process keeps of a dataset, by its number; None where all of it is to be computed.

    Args:
        graph: See `drawing.graph_of`.
        rows: Which rows are kept where.
    """
    try:
        form = Form(graph)
        raw = form.raw_batches()
        size = int(form.constant(form.batch.input[1]))
        whole = bool(form.constant(form.batch.input[BATCHES[form.batch.op]]))
    except Unknown:
        return None
    if not (form.of_rows or form.of_batches) or not _keep_apart(form):
        return None

    def kept(process: int) -> tf.data.Dataset:
        @as_written
        def chosen(*flat: Any) -> tuple[Any, ...]:
            """Own rows of a batch, each with the batch's size beside it."""
            length = tf.shape(flat[0])[0]
            numbers = rows.kept(process, length)
            sizes = tf.fill(tf.shape(numbers), length)
            return sizes, *(tf.gather(one, numbers) for one in flat)

        @as_written
        def in_parts(sizes: Any, *flat: Any) -> Any:
            return rows.in_parts(process, sizes[0], flat)

        own = raw.map(chosen).unbatch()
        for one in form.of_rows:
            own = own.map(_beside(one), num_parallel_calls=one.parallel)
        count = int(tf.size(rows.kept(process, size)))
        own = own.batch(count, drop_remainder=whole)
        for one in form.of_batches:
            own = own.map(_beside(one, [count if whole else None]), num_parallel_calls=one.parallel)
        return form.on_top(own.map(in_parts))

    return kept


def _beside(one: DeferredMap, batch: Sequence[int | None] = ()) -> Callable[..., Any]:
    """What a map computes of an element, behind what goes with it."""
    return as_written(lambda size, *flat: (size, *one.of(flat, batch)))


def _keep_apart(form: Form) -> bool:
    """Whether what is computed of batches is computed of each row by itself."""
    types, shapes = tuple(_types(form.batch)), tuple(_shapes(form.batch))
    for one in form.of_batches:
        if not one.keeps_apart([*map(tf.TensorSpec, shapes, types)]):
            return False
        types, shapes = one.types, one.shapes
    return True


def _types(node: Any) -> list[tf.DType]:
    attributes: Mapping[str, Any] = node.attr
    name = "output_types" if "output_types" in attributes else "Toutput_types"
    return [tf.as_dtype(one) for one in attributes[name].list.type]


def _shapes(node: Any) -> list[tf.TensorShape]:
    return [tf.TensorShape(one) for one in node.attr["output_shapes"].list.shape]


def _set_elements(node: Any, types: Sequence[Any], shapes: Sequence[Any]) -> None:
    """Writes down what the elements of an operation are."""
    node.attr["output_types"].list.type[:] = [one.as_datatype_enum for one in types]
    del node.attr["output_shapes"].list.shape[:]
    node.attr["output_shapes"].list.shape.extend(one.as_proto() for one in shapes)


def _made_of(graph: Any, node: Any) -> tf.data.Dataset:
    """The dataset that an operation of a graph makes; its elements are flat."""
    (end,) = [one for one in graph.node if one.op == "_Retval"]
    end.input[0] = node.name
    made = tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(graph.SerializeToString()))
    spec = tuple(map(tf.TensorSpec, _shapes(node), _types(node)))
    return tf.data.experimental.from_variant(made, spec)
