"""Tables on the host, or split by hand, in files: put together, or part by part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdist._compat import keras_models, keras_trainer
from kdist.program.table_layers import looking_up
from kdist.storage.fetched_table import FetchedTable
from kdist.storage.variables import backing_of

import keras
import tensorflow as tf


@contextlib.contextmanager
def together(layers: Sequence[keras.layers.Embedding]) -> Iterator[None]:
    """Has programs that are traced in this block look rows up in one variable of each table.

    It is on the host: no device need have room for it.
    """
    tables: list[FetchedTable] = [backing_of(layer.embeddings) for layer in layers]
    cut = [one for one in tables if len(one.placement.shards) > 1]
    for one in cut:
        with tf.device(one.topology.host):
            one.together = tf.Variable(one.whole(), name=one.variable.name)
    try:
        yield
    finally:
        for one in cut:
            one.together = None


class PartByPart:
    """Look-ups in the parts of tables, wherever these are."""

    def look_up(self, layer: keras.layers.Embedding, ids: Any) -> Any:
        """The rows of some indices."""
        table: FetchedTable = backing_of(layer.embeddings)
        shards = [one for one in table.placement.shards if 0 not in one.shape]
        parts = [keras_trainer.tf_variable(table.locals[one.holders[0]]) for one in shards]
        rows = [one.index[0] for one in shards]
        if len({one.start for one in rows}) == 1:
            joined = tf.concat([tf.gather(part, ids) for part in parts], -1)
        else:
            ids = table.checked(ids)
            joined = tf.add_n(list(map(_own_rows, parts, rows, [ids] * len(rows))))
        return keras_trainer.autocast(layer.embeddings, joined)


def part_by_part(
    call: Callable[[Any], Any], layers: Sequence[keras.layers.Embedding]
) -> Callable[[Any], Any]:
    """A call of a model whose layers look rows up in the parts of their tables."""

    def calls(x: Any) -> Any:
        with looking_up(layers, PartByPart()):
            return call(x)

    return calls


def layers_without(
    model: keras.Model, apart: Sequence[keras.layers.Embedding]
) -> list[keras.layers.Layer]:
    """The largest layers of a model, itself first, in which there are none of some layers."""
    if not apart:
        return [model]
    found, waiting = [], keras_models.layers_inside(model)
    while waiting:
        layer = waiting.pop()
        if not any(one in apart for one in keras_models.flat_layers(layer)):
            found.append(layer)
        else:
            waiting += keras_models.layers_inside(layer)
    return [layer for layer in found if layer.built]


def _own_rows(part: tf.Variable, rows: slice, ids: Any) -> Any:
    """What a part has of the rows that are looked up; zeros for others."""
    inside = (ids >= rows.start) & (ids < rows.stop)
    found = tf.gather(part, tf.where(inside, ids - rows.start, 0))
    return tf.where(inside[..., tf.newaxis], found, tf.zeros([], found.dtype))


def vocabularies_of(model: keras.Model) -> list[Any]:
    """Tables of texts that layers of a model have, which go into the file beside its variables."""
    resource = tf.saved_model.experimental.TrackableResource
    return [one for one in tf.train.TrackableView(model).descendants() if isinstance(one, resource)]
