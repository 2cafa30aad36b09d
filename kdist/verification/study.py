"""Which layer gives other rows when it is given the replicas' rows alone.

On one plain device the model is called on the whole batch, and on each part of it that a replica
(or a micro-batch) gets. Where the joined rows differ from the whole batch's, rows meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kdist import rows
from kdist._compat import keras_models, keras_twins
from kdist.program.batch import leading, part_bounds
from kdist.program.model_state import ModelState
from kdist.program.state import replica_seed
from kdist.verification.calm import always_random, random_layers
from kdist.verification.observe import as_array, as_compiled, call_for_training
from kdist.verification.tolerance import Tolerance, compare, magnitude

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Study:
    """What the parts of a batch gave, layer by layer.

    Attributes:
        layer: The first layer, in the order in which calls end, whose rows differ; None if none.
        text: By how much, of which class.
        random: Whether it draws random numbers in inference too.
        added: Layers whose `add_loss` values are no means over rows.
    """

    layer: str | None = None
    text: str = ""
    random: bool = False
    added: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of a layer: its name, its class, its flat outputs."""

    layer: str
    kind: str
    outputs: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One forward pass: calls in the order in which they end; added losses by layer."""

    calls: list[_Call]
    added: dict[str, float]


class BatchPart(NamedTuple):
    """Rows of a batch that are computed by themselves: a micro-batch of a replica."""

    replica: int
    start: int
    stop: int


def parts_of(rows: int, replicas: int, micro_batches: int) -> list[BatchPart]:
    """The parts of a batch, empty ones left out.

    >>> [tuple(part) for part in parts_of(6, replicas=2, micro_batches=2)]
    [(0, 0, 2), (0, 2, 3), (1, 3, 5), (1, 5, 6)]
    """
    return [
        BatchPart(replica, start + a, start + b)
        for replica, (start, stop) in enumerate(part_bounds(rows, replicas))
        for a, b in part_bounds(stop - start, micro_batches)
        if b > a
    ]


def study(model: keras.Model, x: Any, parts: Sequence[BatchPart], tolerance: Tolerance) -> Study:
    """Compares the layers' outputs for a batch with those for its parts; writes nothing.

    Args:
        model: A plain model, on one device.
        x: Its inputs, as tensors with the batch as leading dim.
        parts: See `parts_of`.
        tolerance: How far outputs may be apart.
    """
    if len(parts) < 2 or any(isinstance(t, tf.SparseTensor) for t in keras.tree.flatten(x)):
        return Study()
    forward = _Forward(model)
    whole = forward(x)
    pieces = []
    for part in parts:
        own = keras.tree.map_structure(lambda t, part=part: t[part.start : part.stop], x)
        pieces.append(forward(own, part.replica))
    sizes = [part.stop - part.start for part in parts]
    layer, text = _first_difference(whole, pieces, sizes, tolerance)
    random = layer in {one.name for one in [*random_layers(model), *always_random(model)]}
    if layer is not None and not random:
        text = ", ".join([text, *_operations(model, x, layer)])
    return Study(layer, text, random, _not_means(whole, pieces, sizes, tolerance))


def rows_meet_in(model: keras.Model, x: Any, layer: keras.layers.Layer) -> bool:
    """Whether rows of the batch meet in a layer, as far as is known; True where it is not."""
    try:
        return bool(_mixings(model, x, layer.name))
    except rows.NotStudied:
        return True


def _operations(model: keras.Model, x: Any, layer: str) -> list[str]:
    """The operations of a layer at which rows meet, if the analysis of the graph knows them."""
    try:
        return [f"at {operation}" for operation in _mixings(model, x, layer)][:3]
    except rows.NotStudied:
        return []


def _mixings(model: keras.Model, x: Any, layer: str) -> list[str]:
    """Kinds of the operations of a layer at which rows meet.

    Raises:
        NotStudied: The model's graph cannot be analysed.
    """
    specs = keras.tree.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), x)
    found = rows.study(lambda x: call_for_training(model, x), specs).mixings
    inside = [m.operation for m in found if layer in m.layer.split("/") or layer in m.name]
    return list(dict.fromkeys(inside))


class _Forward:
    """Forward passes of a model from the values that it has; traced once for each number of rows.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        state = ModelState.of(model)
        self._variables, self._seeds = state.written, {id(v) for v in state.seeds}
        self._traces: dict[int, tuple[Callable, dict[str, list[Any]]]] = {}

    def __call__(self, x: Any, replica: int | None = None) -> _Pass:
        """Calls the model.

        Args:
            x: Its inputs.
            replica: Whose random numbers layers draw; None for those of one device.
        """
        values = [tf.identity(v.value) for v in self._variables]
        if replica is not None:
            values = [
                replica_seed(value, replica) if id(v) in self._seeds else value
                for v, value in zip(self._variables, values)
            ]
        rows = int(leading(x).shape[0])
        if rows not in self._traces:
            noted: dict[str, list[Any]] = {}
            self._traces[rows] = as_compiled(self._model, self._pass(noted)), noted
        function, noted = self._traces[rows]
        outputs, losses = function(values, x)
        calls = [
            _Call(layer.name, type(layer).__name__, [as_array(t) for t in of])
            for layer, of in zip(noted["calls"], outputs)
        ]
        sums = [float(sum(np.sum(as_array(v)) for v in of)) for of in losses]
        return _Pass(calls, dict(zip(noted["added"], sums)))

    def _pass(self, noted: dict[str, list[Any]]) -> Callable[..., Any]:
        """What is traced; who gave what it returns is noted meanwhile."""

        def run(values: Sequence[Any], x: Any) -> tuple[list[Any], list[Any]]:
            given = list(zip(self._variables, values))
            layers = keras_models.flat_layers(self._model)
            with keras.StatelessScope(given, collect_losses=True):
                with _recording(self._model) as calls:
                    call_for_training(self._model, x)
                added = [(one.name, keras_twins.added_losses(one)) for one in layers]
            noted["added"] = [name for name, losses in added if losses]
            noted["calls"] = [layer for layer, _ in calls]
            return [of for _, of in calls], [losses for _, losses in added if losses]

        return run


@contextlib.contextmanager
def _recording(model: keras.Model) -> Iterator[list[tuple[keras.Layer, list[Any]]]]:
    """Meanwhile, notes calls of layers inside the model that give values, not those in loops."""
    calls: list[tuple[keras.Layer, list[Any]]] = []
    layers = [one for one in keras_models.flat_layers(model) if one is not model]
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def recorded(layer: Any) -> Callable:
        inner = keras_models.call_of(layer)

        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = inner(*args, **kwargs)
            flat = [t for t in keras.tree.flatten(outputs) if t is not None]
            if all(isinstance(t, tf.Tensor) and getattr(t, "graph", None) is graph for t in flat):
                calls.append((layer, flat))
            return outputs

        return call

    with keras_models.calls_kept(layers):
        for layer in layers:
            keras_models.give_call(layer, recorded(layer))
        yield calls


def _first_difference(
    whole: _Pass, pieces: Sequence[_Pass], sizes: Sequence[int], tolerance: Tolerance
) -> tuple[str | None, str]:
    for number, one in enumerate(whole.calls):
        others = [p.calls[number] if number < len(p.calls) else None for p in pieces]
        if any(other is None or other.layer != one.layer for other in others):
            return one.layer, "the replicas call other layers than one device does"
        for i, array in enumerate(one.outputs):
            parts = [other.outputs[i] for other in others if other is not None]
            joined = _joined(array, parts, sizes)
            if joined is None:
                continue
            allowed = tolerance.relative["output"] * max(magnitude(array), tolerance.floor)
            found = compare("output", one.layer, array, joined, allowed)
            if found is not None:
                return one.layer, f"{one.kind}, off by {found.relative:.1e} of its scale"
    return None, ""


def _joined(
    whole: np.ndarray, parts: Sequence[np.ndarray], sizes: Sequence[int]
) -> np.ndarray | None:
    """The parts' rows as one array; what has no rows, of the part that differs most.

    None where it cannot be told what are rows.
    """
    if whole.ndim and all(p.ndim and p.shape[0] == n for p, n in zip(parts, sizes)):
        return np.concatenate(parts) if whole.shape[0] == sum(sizes) else None
    if all(p.shape == whole.shape for p in parts):
        return max(parts, key=lambda p: magnitude(p.astype("float64") - whole))
    return None


def _not_means(
    whole: _Pass, pieces: Sequence[_Pass], sizes: Sequence[int], tolerance: Tolerance
) -> tuple[str, ...]:
    found = []
    for layer, value in whole.added.items():
        weighted = [n * p.added.get(layer, 0.0) for p, n in zip(pieces, sizes)]
        mean = sum(weighted) / sum(sizes)
        if abs(mean - value) > tolerance.relative["loss"] * max(abs(value), tolerance.floor):
            found.append(layer)
    return tuple(found)
