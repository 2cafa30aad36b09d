"""Tables in host memory: slices get the rows that they look up, and give gradients of rows.

Where other weights are stored whole or cut on the devices that compute, and programs take their
values, a program takes of such a table the rows of its look-ups, one after the other, as they were
fetched before it runs. Each row is sent once to a device, however often it is looked up there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kdist._compat import keras_trainer
from kdist.sharding.mesh import HOST, Topology
from kdist.sharding.placement import Coordinate, Placement
from kdist.storage.variables import Stored

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class RowsGiven:
    """The rows of a table that one slice looks up in a step.

    Attributes:
        indices: Of each look-up, in the order in which the program makes them.
        unique: The same, each once.
        positions: Of each look-up, where in `unique` it is.
        rows: The rows of `unique`, on the host.
    """

    indices: Any
    unique: Any
    positions: Any
    rows: Any


class HostStored(Stored):
    """A table on the host; devices get the rows that a step looks up.

    Attributes:
        given: Per slice, what it looks up in the step that is being traced.
        combined: Whether gradients of a row that is looked up more than once are summed before they
            travel;
            see `kdist.optimizer.local.is_linear`.
        by_rows: True while programs are traced, in which the table cannot be read whole.
    """

    combined = by_rows = False

    def __init__(self, variable: keras.Variable, placement: Placement, topology: Topology) -> None:
        super().__init__(variable, placement, topology)
        self.given: dict[int, RowsGiven] = {}

    def look_up(self, s: int, indices: Any) -> None:
        """Fetches rows for a slice.

        Args:
            s: The slice.
            indices: Of all look-ups of its program, in their order; (n,), on its device.
        """
        with tf.device(self.device((s, 0))):
            unique, positions = tf.unique(indices)
        with tf.device(self.device(HOST)):
            rows = tf.gather(keras_trainer.tf_variable(self.locals[HOST]), tf.identity(unique))
        self.given[s] = RowsGiven(indices, unique, positions, rows)

    def used_at(self, at: Coordinate) -> Any:
        """What compute takes as the table: the rows of its look-ups, one after the other."""
        one = self.given[at[0]]
        return tf.gather(one.rows, one.positions)

    def whole_at(self, s: int) -> Any:
        """See `used_at`."""
        return self.used_at((s, 0))

    def rows_of(self, s: int, gradient: Any) -> tf.IndexedSlices:
        """A slice's gradient of the whole table, from that of `used_at`, on the slice's device."""
        one = self.given[s]
        shape = tf.constant(self.placement.shape, one.indices.dtype)
        if not self.combined:
            return tf.IndexedSlices(gradient, one.indices, shape)
        with tf.device(self.device((s, 0))):
            size = tf.size(one.unique)
            values = tf.math.unsorted_segment_sum(gradient, one.positions, size)
        return tf.IndexedSlices(values, one.unique, shape)

    def read_whole(self) -> ValueError:
        """What is wrong with a program that reads the table itself."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        where = graph.get_name_scope() if graph is not None else ""
        return ValueError(
            "A table on the host is used row by row, by look-ups of its layer. Leave it on the "
            "device with kdist.place(layer, 'device'), or do not use it a second time. Received: "
            f"table {self.variable.path!r}, read whole in {where or 'the model'!r}"
        )
