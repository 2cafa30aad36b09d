"""Functions of a batch as graphs: for the first shapes one each, then one for all of a family."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from kdist.display import progress
from kdist.dtensor import sizes
from kdist.dtensor.call import MAX_SHAPES
from kdist.dtensor.retraced import CannotExpand, Settled
from kdist.dtensor.signatures import signature, structure, tensor_spec
from kdist.graphs.instantiation import prepared_cheaply
from kdist.runtime.families import BatchShape, Family, families
from kdist.runtime.in_pieces import PIECES, in_pieces

import tensorflow as tf

ALONE = 2
"""Shapes that get a graph of their own before one for several is tried: most training has one
shape, and one more where the data ends. Their graphs know all sizes, and cost less to make."""

WAYS = ((False, False), (True, False), (False, True), (True, True))
"""Whether the examples of a batch of any size are alike, and whether small: see `_examples`."""


@dataclasses.dataclass
class _Kind:
    """Batches that differ in nothing but sizes."""

    seen: dict[BatchShape, None] = dataclasses.field(default_factory=dict)
    shared: list[tuple[Family, Callable]] = dataclasses.field(default_factory=list)
    multiples: sizes.Multiples = sizes.Multiples()
    failed: bool = False
    reason: str = "they have little in common"


class ByShape:
    """A function of a batch, as graphs.

    Args:
        function: `function(data, *options)`, with a structure of tensors and Python values.
        parts: Into how many the rows of a batch are cut: replicas, times micro-batches.
        devices: Those that compute.
        tell: Told why every shape has to have a graph of its own, if there are many.

    Attributes:
        traces: How many graphs were made, those that failed included.
    """

    def __init__(
        self,
        function: Callable,
        parts: int,
        devices: Sequence[str],
        tell: Callable[[str], None],
    ) -> None:
        self.traces = 0
        self._function = function
        self._nested = Settled(function)
        self._parts, self._devices = parts, list(devices)
        self._tell = tell
        self._kinds: dict[Any, _Kind] = {}
        self._of_any_size: dict[Any, Callable] = {}
        self._alone: OrderedDict[Any, Callable] = OrderedDict()

    def __call__(self, data: Any, *options: Any) -> Any:
        """Calls it.

        Raises:
            CannotExpand: DTensor cannot run it.
        """
        leaves = tf.nest.flatten(data)
        given = [t for t in leaves if t is not None]
        if not tf.executing_eagerly():
            return self._in_graph(data, given, options)
        kind = (structure(data), tuple(t.dtype for t in given), options)
        shapes = tuple(tuple(t.shape) for t in given)
        graph = self._alone.get((kind, shapes)) or self._shared(kind, shapes)
        if graph is None:
            graph = self._new(data, kind, shapes, options)
        elif (kind, shapes) in self._alone:
            self._alone.move_to_end((kind, shapes))
        with prepared_cheaply(self._devices):
            return graph(*given)

    def _in_graph(self, data: Any, given: Sequence[Any], options: Any) -> Any:
        """Calls it in the graph of a caller, who may not know the sizes of a batch."""
        dense = not any(isinstance(t, tf.SparseTensor) for t in given)
        if not dense or all(t.shape.is_fully_defined() for t in given):
            return self._nested(data, *options)
        key = (structure(data), signature(data), options)
        if key not in self._of_any_size:
            # Not in an `init_scope`: it stops every tape, those of the function too.
            specs = tf.nest.map_structure(tensor_spec, data)
            self._of_any_size[key] = self.for_specs(specs, *options)
        return self._of_any_size[key](*given)

    def for_specs(
        self, data: Any, *options: Any, pads: Callable[[], bool] = lambda: False
    ) -> Callable:
        """One graph for all batches of some specs; a function of the leaves that are not None.

        Args:
            data: A structure of specs, and None; a dim of None is any size. Such dims of several
                tensors may differ if a program can be made for that, and are alike otherwise.
            *options: See `__call__`.
            pads: Whether a program that takes multiples of rows alone gets more rows, copies of the
                last, whose results are dropped, and programs of some numbers of rows compute a
                batch piece by piece where there is none for all: each result must follow from its
                own row. Asked where that would help.

        Raises:
            CannotExpand: DTensor cannot run it, or not for all sizes.
        """
        shapes = [tuple(spec.shape) for spec in tf.nest.flatten(data) if spec is not None]
        if all(None not in shape for shape in shapes):
            return self._trace(data, shapes, options)
        kind = _Kind()
        specs = [one for one in tf.nest.flatten(data) if one is not None]
        dense = all(isinstance(one, tf.TensorSpec) for one in specs)
        ways = dict.fromkeys(_examples(shapes, *way) for way in WAYS)
        for examples in ways:
            kind = _Kind(seen=dict.fromkeys(_in_parts(examples, shapes, self._parts)))
            graph = self._lifted(data, kind, options)
            if graph is None and dense and (rows := kind.multiples.rows) > 1 and pads():
                again = _in_parts(examples, shapes, rows * self._parts)
                kind = _Kind(dict.fromkeys(again), multiples=kind.multiples)
                graph = self._lifted(data, kind, options)
            if graph is not None:
                family = kind.shared[-1][0]
                if family.fits_all:
                    return graph
                if family.but_for_rows.fits_all and dense and pads():
                    return padded(graph, shapes, family.multiples.rows * self._parts)
                kind.reason = f"sizes are limited to those like {family.examples}"
        if dense and any(shape and shape[0] is None for shape in shapes) and pads():
            with contextlib.suppress(CannotExpand):
                return self._in_pieces(data, shapes, options, kind.multiples.rows)
        what = f"batches of any size, here {shapes}: {kind.reason}"
        raise CannotExpand(what, of_batch=True)

    def _in_pieces(self, data: Any, shapes: Sequence[Any], options: Any, multiple: int) -> Callable:
        """A function of any number of rows, by programs for some numbers of them."""

        def program(rows: int) -> Callable:
            specs = tf.nest.map_structure(lambda one: _with_rows(one, rows), data)
            return self.for_specs(specs, *options)

        unit = self._parts * max(multiple, 1)
        return in_pieces({unit * n: program(unit * n) for n in PIECES}, shapes)

    def _shared(self, kind: Any, shapes: BatchShape) -> Callable | None:
        known = self._kinds.setdefault(kind, _Kind())
        return next((graph for family, graph in known.shared if family.has(shapes)), None)

    def _new(self, data: Any, key: Any, shapes: BatchShape, options: Any) -> Callable:
        """A graph for a shape that none serves."""
        kind = self._kinds[key]
        kind.seen[shapes] = kind.seen.pop(shapes, None)
        if len(kind.seen) > ALONE and not kind.failed:
            graph = self._lifted(data, kind, options)
            if graph is not None:
                return graph
        graph = self._trace(data, shapes, options)
        self._alone[key, shapes] = graph
        alike = [one for one in self._alone if one[0] == key]
        if len(alike) > MAX_SHAPES:
            del self._alone[alike[0]]
            self._tell(
                f"More than {MAX_SHAPES} shapes of a batch have a program of their own, since "
                f"{kind.reason}. The {MAX_SHAPES} used last are "
                "kept; a shape that comes back later is compiled again. Pad or bucket sequences "
                "to fewer lengths to avoid that."
            )
        return graph

    def _lifted(self, data: Any, kind: _Kind, options: Any) -> Callable | None:
        """A graph for all shapes of a family; None if there cannot be one."""
        for family in families([*kind.seen], kind.multiples, self._parts):
            known = _sizes(family)
            try:
                with sizes.tracing_with(known):
                    graph = self._trace(data, family.general, options)
            # The model may not be made for such sizes: what the program of one shape says counts.
            except Exception as error:
                kind.reason, kind.failed = str(error).split("\n")[0], True
            else:
                kind.failed = False
                family = dataclasses.replace(family, bounded=known.findings.bounded)
                kind.shared = [*kind.shared[1 - MAX_SHAPES :], (family, graph)]
                if family.has([*kind.seen][-1]):
                    return graph
            if known.findings.needs not in (sizes.Multiples(), kind.multiples):
                kind.multiples, kind.failed = known.findings.needs, False
                return self._lifted(data, kind, options)
        return None

    def _trace(self, data: Any, shapes: Sequence[Any], options: Any) -> Callable:
        self.traces += 1
        leaves = tf.nest.flatten(data)
        given = [t for t in leaves if t is not None]

        def call(*tensors: Any) -> Any:
            rest = iter(tensors)
            flat = [None if t is None else next(rest) for t in leaves]
            return self._function(tf.nest.pack_sequence_as(data, flat), *options)

        specs = [
            tf.type_spec_from_value(t)
            if isinstance(t, tf.SparseTensor)
            else tf.TensorSpec(shape, t.dtype)
            for t, shape in zip(given, shapes, strict=True)
        ]
        with progress.shown("making a step for another shape of batches"):
            made = Settled(call).get_concrete_function(*specs)
            progress.at("the first run, which TensorFlow prepares")  # of a step that is shown
        return made


def padded(graph: Callable, shapes: Sequence[Any], each: int) -> Callable:
    """A graph for multiples of some number of rows, for any number.

    Args:
        graph: A function of tensors; each row of its results follows from that row alone.
        shapes: Of its arguments; dim 0 of None is the rows.
        each: The number.
    """
    first = next(n for n, shape in enumerate(shapes) if shape and shape[0] is None)

    def call(*tensors: Any) -> Any:
        rows = tf.shape(tensors[first])[0]
        last_again = tf.minimum(tf.range(rows + -rows % each), rows - 1)
        more = [
            tf.gather(one, last_again) if shape and shape[0] is None else one
            for one, shape in zip(tensors, shapes, strict=True)
        ]
        return tf.nest.map_structure(lambda one: one[:rows], graph(*more))

    return call


def _with_rows(spec: Any, rows: int) -> Any:
    """A spec with a number of rows, if it has any number of them."""
    if spec is None or not spec.shape or spec.shape[0] is not None:
        return spec
    return tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype)


def _examples(shapes: Sequence[Any], alike: bool, small: bool) -> tuple[BatchShape, ...]:
    """Batches of some shapes.

    Args:
        shapes: The shapes; a dim of None is any size.
        alike: Whether dims of one number are of one size in all tensors.
        small: Whether other dims than rows are of a few elements: a model may have no more
            positions.
    """

    def size(tensor: int, dim: int, n: int) -> int:
        if dim == 0:
            return n
        size, apart = (n // 2, 2 * tensor) if small else (4 * n, 7 * tensor * n)
        return size + dim + (0 if alike else apart)

    return tuple(
        tuple(
            tuple(size(i, d, n) if known is None else known for d, known in enumerate(shape))
            for i, shape in enumerate(shapes)
        )
        for n in (4, 6, 9)
    )


def _in_parts(
    examples: Sequence[BatchShape], shapes: Sequence[Any], parts: int
) -> list[BatchShape]:
    """The same batches with so many times their rows, where rows are of any number."""
    return [
        tuple(
            (one[0] * parts, *one[1:]) if shape and shape[0] is None else one
            for one, shape in zip(batch, shapes, strict=True)
        )
        for batch in examples
    ]


def _sizes(family: Family) -> sizes.TracedSizes:
    """What tracing is told of the sizes of a family."""
    leaves = range(len(family.first))
    examples = (sizes.Examples(family.tried(i), family.far(i)) for i in leaves)
    return sizes.TracedSizes(tuple(examples), family.multiples)
