"""`study`: traces a function of a batch and says how each output depends on the rows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kdist.rows.interpreter import Interpreter
from kdist.rows.values import Const, Linear, Mixed, Mixing, RowDependence, Rows, Value, flow_of
from kdist.storage.constant_ids import ConstantIds

import keras
import tensorflow as tf

PRIMES = (467, 479, 487, 491, 499, 503, 541, 547, 557, 563, 569, 571, 577, 587, 593, 599)
"""Batch sizes to trace with: far from round numbers, so that their multiples are recognised."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
UNKNOWN = (64, 4)
"""What stands for dims of unknown size, dim 0 apart: the first for which there is a trace. A model
may have fewer positions."""


class NotStudied(ValueError):
    """A function that cannot be traced on a batch of a given size, with the reason."""


@dataclasses.dataclass(frozen=True)
class RowStudy:
    """How the outputs of a function depend on the rows of its batch.

    Attributes:
        outputs: One per flat output.
        mixings: The operations at which rows meet first, in graph order. What follows from rows
            that have met already is not listed again.
        causes: Per flat output, where its rows met first, or where they were summed; None for
            constants and rows that stay apart.
        sized: Per flat output, whether it depends on how many rows there are.
        accepted: Where rows meet inside of what was marked to count row by row.
    """

    outputs: tuple[RowDependence, ...]
    mixings: tuple[Mixing, ...]
    causes: tuple[Mixing | None, ...]
    sized: tuple[bool, ...]
    accepted: tuple[Mixing, ...] = ()


def study(
    function: Callable[..., Any],
    *specs: Any,
    batch_size: int | None = None,
    avoid: Iterable[int] = (),
) -> RowStudy:
    """Follows the batch through a function: what stays row by row, what is a mean, what mixes.

    The function is traced once, on a batch size of its own, and nothing runs. An operation that the
    analysis does not know counts as mixing.

    Args:
        function: Takes tensors in the structure of `specs`; what it returns is flattened.
        *specs: Nested structures of `tf.TensorSpec` (or None), whose dim 0 is the batch. Specs of
            rank 0 are constants. Other dims of unknown size get one.
        batch_size: The only size that the function takes, if there is one.
        avoid: Sizes that the batch size must not be mistaken for, such as those of weights.

    Raises:
        NotStudied: The function fails while it is traced.

    Example:
        >>> spec = tf.TensorSpec((None, 3))
        >>> study(lambda x: (x * 2, tf.reduce_mean(x), x - tf.reduce_mean(x)), spec).outputs
        (<Flow.ROWS: 'rows'>, <Flow.MEAN: 'mean'>, <Flow.MIXED: 'mixed'>)
    """
    return analyse(function, *specs, batch_size=batch_size, avoid=avoid).study()


@dataclasses.dataclass(frozen=True)
class Analysis:
    """A traced function with what is known about its outputs; see `study`.

    Attributes:
        batch: The batch's size in the trace.
        tensors: The flat outputs, None where the function returned None.
        values: What is known about each.
        mixings: See `RowStudy`.
        accepted: See `RowStudy`.
        constant_ids: Looked up in tables.
    """

    batch: int
    tensors: tuple[Any, ...]
    values: tuple[Value, ...]
    mixings: tuple[Mixing, ...]
    accepted: tuple[Mixing, ...]
    constant_ids: ConstantIds = ConstantIds()

    def study(self) -> RowStudy:
        """The same in public terms."""
        return RowStudy(
            tuple(flow_of(v) for v in self.values),
            self.mixings,
            tuple(cause(v, t) for v, t in zip(self.values, self.tensors)),
            tuple(_depends_on_size(v) for v in self.values),
            self.accepted,
        )


def rows_stay_apart(
    graph_on: Callable[[Sequence[tf.TensorShape]], Any],
    specs: Sequence[Any],
    constants: Sequence[tf.TensorShape] = (),
) -> bool:
    """Whether each row of what a function returns follows from that row of its batch alone.

    Args:
        graph_on: Makes its graph, on inputs of some shapes.
        specs: Of its inputs, in order, whose dim 0 is the batch.
        constants: Shapes of more inputs, that no row decides.

    Raises:
        NotStudied: The rank of an input is unknown.
    """
    taken = {d for spec in specs for d in spec.shape[1:] if d}
    taken |= {d for shape in constants for d in shape if d}
    batch = next((p for p in PRIMES if all(n % p for n in taken)), PRIMES[0])
    graph = _first_graph(
        lambda sized: graph_on([*(spec.shape for spec in sized), *constants]), specs, batch
    )
    given = {id(one): Rows(0) for one in graph.inputs[: len(specs)]}
    found = Interpreter(batch).evaluate(graph, given, graph.outputs)
    return all(flow_of(one) is RowDependence.ROWS and not _depends_on_size(one) for one in found)


def analyse(
    function: Callable[..., Any],
    *specs: Any,
    batch_size: int | None = None,
    avoid: Iterable[int] = (),
) -> Analysis:
    """`study`, with what is known about each output in full."""
    if batch_size == 1:
        raise NotStudied("a batch of one row has no rows that could meet")
    flat = [s for s in keras.tree.flatten(specs) if s is not None]
    taken = {d for s in flat for d in s.shape[1:] if d} | set(avoid)
    batch = batch_size or next((p for p in PRIMES if all(n % p for n in taken)), PRIMES[0])
    graph, given, outputs = _first_graph(lambda sized: _trace(function, specs, sized), flat, batch)
    interpreter = Interpreter(batch)
    found = iter(interpreter.evaluate(graph, given, [o for o in outputs if o is not None]))
    values = tuple(Const(flat=None) if o is None else next(found) for o in outputs)
    mixings = tuple(interpreter.mixings), tuple(dict.fromkeys(interpreter.accepted))
    return Analysis(batch, tuple(outputs), values, *mixings, interpreter.constant_ids)


def _first_graph(
    make: Callable[[Sequence[tf.TensorSpec]], Any], specs: Sequence[tf.TensorSpec], batch: int
) -> Any:
    """What is made for specs with all sizes known, at the first sizes for which it can be."""
    for spec in specs:
        if spec.shape.rank is None:
            raise NotStudied(f"The rank of an input is unknown. Received: {spec}")
    some = any(None in spec.shape[1:] for spec in specs)
    failed: list[Exception] = []
    for size in UNKNOWN if some else UNKNOWN[:1]:
        try:
            return make([_sized(spec, batch, size) for spec in specs])
        except Exception as error:  # whatever a model does
            failed.append(error)
    raise failed[0]


def _sized(spec: tf.TensorSpec, batch: int, size: int) -> tf.TensorSpec:
    """A spec with all sizes known."""
    dims = [batch if i == 0 else (d or size) for i, d in enumerate(spec.shape)]
    return tf.TensorSpec(dims, spec.dtype)


def _trace(
    function: Callable[..., Any], specs: Sequence[Any], flat: Sequence[tf.TensorSpec]
) -> tuple[Any, dict[int, Value], list[Any]]:
    """The function's graph, what is known about its inputs, and its flat outputs."""
    given: dict[int, Value] = {}
    outputs: list[Any] = []

    def traced(*tensors: Any) -> None:
        for tensor in tensors:
            given[id(tensor)] = Rows(0) if tensor.shape.rank else Const(flat=None)
        left = iter(tensors)
        arguments = [_filled(spec, left) for spec in specs]
        for leaf in keras.tree.flatten(function(*arguments)):
            outputs.append(None if leaf is None else tf.convert_to_tensor(leaf))

    try:
        wrapped = tf.compat.v1.wrap_function(traced, list(flat))
    except Exception as error:
        rows = next((s.shape[0] for s in flat if s.shape.rank), None)
        made_up = "" if rows is None else f" (on a batch of {rows} rows, made up to find it out)"
        raise NotStudied(f"{_reason(error)}{made_up}") from error
    return wrapped.graph, given, outputs


def _reason(error: Exception) -> str:
    """An error in a line: what Keras adds about the layer's arguments, and colours, left out."""
    text = _COLOUR.sub("", str(error)).partition("Arguments received by")[0]
    return f"{type(error).__name__}: {' '.join(text.split())}"


def _filled(spec: Any, tensors: Any) -> Any:
    return keras.tree.map_structure(lambda s: None if s is None else next(tensors), spec)


def cause(value: Value, tensor: Any) -> Mixing | None:
    """Where the rows of a tensor met first, or were summed; None where they stay apart."""
    if isinstance(value, Mixed):
        return value.cause
    if isinstance(value, Linear):
        return value.origin
    if flow_of(value) is RowDependence.MIXED:
        op = tensor.op
        return Mixing(op.name.rpartition("/")[0], op.type, op.name)
    return None


def _depends_on_size(value: Value) -> bool:
    if isinstance(value, Mixed):
        return True
    if isinstance(value, Linear):
        return value.power != -1
    return value.power != 0
