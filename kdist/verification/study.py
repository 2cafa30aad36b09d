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
from kdist.program.batch import part_bounds
from kdist.program.model_state import ModelState
from kdist.program.state import replica_seed
from kdist.verification.calm import always_random, random_layers
from kdist.verification.observe import as_array, call_for_training
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


class Part(NamedTuple):
    """Rows of a batch that are computed by themselves: a micro-batch of a replica."""

    replica: int
    start: int
    stop: int


def parts_of(rows: int, replicas: int, micro_batches: int) -> list[Part]:
    """The parts of a batch, empty ones left out.

    >>> [tuple(part) for part in parts_of(6, replicas=2, micro_batches=2)]
    [(0, 0, 2), (0, 2, 3), (1, 3, 5), (1, 5, 6)]
    """
    return [
        Part(replica, start + a, start + b)
        for replica, (start, stop) in enumerate(part_bounds(rows, replicas))
        for a, b in part_bounds(stop - start, micro_batches)
        if b > a
    ]


def study(
    model: keras.Model,
    x: Any,
    parts: Sequence[Part],
    tolerance: Tolerance,
    restore: Callable[[], None],
) -> Study:
    """Compares the layers' outputs for a batch with those for its parts.

    Args:
        model: A plain model, on one device.
        x: Its inputs, as tensors with the batch as leading dim.
        parts: See `parts_of`.
        tolerance: How far outputs may be apart.
        restore: Puts the model's variables back; called after each pass.
    """
    if len(parts) < 2 or any(isinstance(t, tf.SparseTensor) for t in keras.tree.flatten(x)):
        return Study()
    whole = _forward(model, x)
    restore()
    pieces = []
    for part in parts:
        for seed in ModelState.of(model).seeds:
            seed.assign(replica_seed(tf.convert_to_tensor(seed.value), part.replica))
        own = keras.tree.map_structure(lambda t, part=part: t[part.start : part.stop], x)
        pieces.append(_forward(model, own))
        restore()
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


def _forward(model: keras.Model, x: Any) -> _Pass:
    with _recording(model) as calls:
        call_for_training(model, x)
    added = {}
    for layer in keras_models.flat_layers(model):
        values = keras_twins.added_losses(layer)
        if values:
            added[layer.name] = float(sum(np.sum(as_array(v)) for v in values))
    return _Pass(calls, added)


@contextlib.contextmanager
def _recording(model: keras.Model) -> Iterator[list[_Call]]:
    """Meanwhile, notes every call of a layer inside the model that gives values."""
    calls: list[_Call] = []
    layers = [one for one in keras_models.flat_layers(model) if one is not model]

    def recorded(layer: Any) -> Callable:
        inner = keras_models.call_of(layer)

        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = inner(*args, **kwargs)
            flat = [t for t in keras.tree.flatten(outputs) if t is not None]
            if all(isinstance(t, tf.Tensor) and hasattr(t, "numpy") for t in flat):
                arrays = [as_array(t) for t in flat]
                calls.append(_Call(layer.name, type(layer).__name__, arrays))
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
