"""Cutting a model's graph into segments: runs of nodes with a small boundary.

A segment is the unit of compute between two communications: parameters are gathered, gradients
reduced, segment by segment. It names nodes of the original graph, which are then interpreted; no
sub-model is built (that fails on shared layers and changes the original's graph).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from kdist import _private_models

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class NodeInfo:
    """What cutting needs to know about one node, in the order in which nodes run.

    Attributes:
        name: Name of its operation.
        reads: Keys of the tensors it takes.
        writes: Keys of the tensors it makes.
        nbytes: Bytes of the parameters it uses.
        alone: True if it must not be part of a run: a nested model (cut inside), an embedding
            (whose gradient is rows).
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    nbytes: int
    alone: bool = False


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of nodes.

    Attributes:
        start: Position of its first node.
        stop: Position after its last one.
        reads: Keys of tensors made before that it takes.
        writes: Keys of its tensors that are used after it.
        alone: See `NodeInfo`.
    """

    start: int
    stop: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    alone: bool = False


def cut(nodes: Sequence[NodeInfo], outputs: Sequence[int], limit: int) -> list[Segment]:
    """Cuts a run of nodes into segments of at most `limit` bytes of parameters, if nodes allow.

    A segment ends where the fewest tensors cross, between the place where it has at least half of
    `limit` and the one where it would exceed it.

    Args:
        nodes: In the order in which they run.
        outputs: Keys of tensors that are used after the last node.
        limit: Bytes.

    Returns:
        Segments that cover all nodes, in order.
    """
    crossing = _crossing(nodes, outputs)
    stops, start = [], 0
    while start < len(nodes):
        start = start + 1 if nodes[start].alone else _stop(nodes, crossing, start, limit)
        stops.append(start)
    return cut_at(nodes, outputs, stops)


def cut_at(
    nodes: Sequence[NodeInfo], outputs: Sequence[int], stops: Sequence[int]
) -> list[Segment]:
    """The segments that end at given positions, rising to the number of nodes; see `cut`."""
    starts = [0, *stops[:-1]]
    return [_segment(nodes, outputs, start, stop) for start, stop in zip(starts, stops)]


PARTS = 8
"""Segments that a model is cut into, about, where its largest layers allow."""


def segment_limit(sizes: Sequence[int]) -> int:
    """Bytes of parameters of a segment: an eighth of all, but room for the largest one.

    More segments would lower the peak less and less, and each costs a function call per replica.
    """
    return max([-(-sum(sizes) // PARTS), *sizes, 1])


def _stop(nodes: Sequence[NodeInfo], crossing: Sequence[int], start: int, limit: int) -> int:
    size, best = nodes[start].nbytes, start + 1
    for stop in range(start + 1, len(nodes) + 1):
        if size * 2 < limit or crossing[stop] <= crossing[best]:
            best = stop
        if stop == len(nodes) or nodes[stop].alone or size + nodes[stop].nbytes > limit:
            return stop if stop == len(nodes) or nodes[stop].alone else best
        size += nodes[stop].nbytes
    return best


def _crossing(nodes: Sequence[NodeInfo], outputs: Sequence[int]) -> list[int]:
    """Before each node (and after the last), the number of tensors made before and used after."""
    last: dict[int, int] = {key: len(nodes) for key in outputs}
    made: dict[int, int] = {}
    for i, node in enumerate(nodes):
        made.update((key, i) for key in node.writes)
        for key in node.reads:
            last[key] = max(last.get(key, 0), i)
    return [
        sum(made.get(key, -1) < i <= use for key, use in last.items())
        for i in range(len(nodes) + 1)
    ]


def _segment(nodes: Sequence[NodeInfo], outputs: Sequence[int], start: int, stop: int) -> Segment:
    inside = {key for node in nodes[start:stop] for key in node.writes}
    after = {key for node in nodes[stop:] for key in node.reads} | set(outputs)
    reads = {key: None for node in nodes[start:stop] for key in node.reads if key not in inside}
    writes = {key: None for node in nodes[start:stop] for key in node.writes if key in after}
    return Segment(start, stop, tuple(reads), tuple(writes), nodes[start].alone)


def info_of(node: Any) -> NodeInfo:
    """What `cut` needs to know about a Keras node."""
    operation = node.operation
    weights = operation.trainable_variables if isinstance(operation, keras.Layer) else []
    nbytes = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in weights)
    return NodeInfo(
        name=operation.name,
        reads=tuple(dict.fromkeys(id(t) for t in node.input_tensors)),
        writes=tuple(id(t) for t in node.outputs),
        nbytes=nbytes,
        alone=_private_models.functional_of(operation) is not None or looks_up(operation),
    )


def looks_up(operation: Any) -> bool:
    """Whether a layer is, or has inside, an embedding: its gradient is rows, which stay rows."""
    if not isinstance(operation, keras.Layer):
        return False
    return any(
        isinstance(one, keras.layers.Embedding) for one in _private_models.flat_layers(operation)
    )


def looked_up(model: keras.Model) -> list[keras.Variable]:
    """The tables of a model's embeddings."""
    layers = _private_models.flat_layers(model)
    tables = [one for one in layers if isinstance(one, keras.layers.Embedding)]
    return [v for table in tables for v in table.trainable_variables]


def gradients_of_rows(model: keras.Model) -> list[keras.Variable]:
    """The tables whose gradients are rows, as far as layers tell before a step is traced.

    The gradient of a table that is regularized, or is the head's kernel too, is dense.
    """
    layers = _private_models.flat_layers(model)
    return [
        one.embeddings
        for one in layers
        if isinstance(one, keras.layers.Embedding)
        and one.built
        and one.embeddings.trainable
        and one.embeddings.regularizer is None
        and not getattr(one, "tie_weights", False)
    ]
