"""Ragged and sparse ids of a batch, padded before a step where one layer alone takes them.

Over inner axes, and one step ahead, a batch has sizes. A `DistributedEmbedding` pads what it is
given; so, where nothing else of the model looks at an input, that can as well be done before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist.layers.padding import Padded, dense, is_composite, noting_padded
from kdist.program.look_ups import Recorded

import keras
import tensorflow as tf

PASSED_ON = ("Identity", "Cast")
"""Types of operations between an input and a layer that change no id."""

Forward = Callable[[Any, bool, Any, dict[int, Any]], None]


class PaddedBatch:
    """Pads ragged and sparse inputs of a model that only a `DistributedEmbedding` takes.

    Args:
        forward: Calls the model, as for `FetchedTables`.
        variables: All variables that it reads, but tables of which rows are fetched.
    """

    def __init__(self, forward: Forward, variables: Sequence[keras.Variable]) -> None:
        self._forward, self._variables = forward, variables
        self._known: dict[Any, list[Padded | None]] = {}

    def __call__(self, data: Any) -> Any:
        """A batch whose inputs are dense, where they can be.

        Args:
            data: What a step is given: x, or (x, y, sample_weight).
        """
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        flat = tf.nest.flatten(x)
        if not any(map(is_composite, flat)):
            return data
        ways = iter(self._ways(x))
        for i, leaf in enumerate(flat):
            way = next(ways) if is_composite(leaf) else None
            flat[i] = leaf if way is None else dense(way.feature, leaf, way.padding)
        x = tf.nest.pack_sequence_as(x, flat)
        return (x, *data[1:]) if isinstance(data, list | tuple) else x

    def _ways(self, x: Any) -> list[Padded | None]:
        """How each of the ragged and sparse inputs is padded; None if it cannot be."""
        # An input may be None.
        kind = tf.nest.map_structure(lambda leaf: (type(leaf), getattr(leaf, "dtype", None)), x)
        key = repr(kind)
        if key not in self._known:
            with tf.init_scope():
                self._known[key] = self._traced(x)
        return self._known[key]

    def _traced(self, x: Any) -> list[Padded | None]:
        """Traces the model, and looks who reads what."""
        found: list[Padded | None] = []

        def read(*tensors: Any) -> None:
            rest = iter(tensors)
            flat = tf.nest.flatten(x, expand_composites=True)
            given = [None if leaf is None else next(rest) for leaf in flat]
            given = tf.nest.pack_sequence_as(x, given, expand_composites=True)
            values = {id(v): tf.compat.v1.placeholder(v.dtype, v.shape) for v in self._variables}
            with noting_padded() as noted:
                self._forward(given, False, Recorded(), values)
            inputs = [leaf for leaf in tf.nest.flatten(given) if is_composite(leaf)]
            found[:] = [_only_padded(leaf, noted) for leaf in inputs]

        parts = [t for t in tf.nest.flatten(x, expand_composites=True) if t is not None]
        specs = [tf.TensorSpec([None] * len(t.shape), t.dtype) for t in parts]
        tf.compat.v1.wrap_function(read, specs)
        return found


def _only_padded(leaf: Any, noted: Sequence[Padded]) -> Padded | None:
    """How a tensor is padded, if nothing else is done with it, and all do it alike."""
    parts = {t.op.name for t in tf.nest.flatten(leaf, expand_composites=True)}
    mine = [one for one in noted if parts & _sources(one.given)]
    if len({one.way for one in mine}) != 1 or leaf.dtype.is_unsigned or leaf.dtype.is_bool:
        return None
    made = frozenset().union(*(one.operations for one in mine))
    waiting = list(tf.nest.flatten(leaf, expand_composites=True))
    while waiting:
        for reader in waiting.pop().consumers():
            if reader.name in made:
                continue
            if reader.type not in PASSED_ON or reader.outputs[0].dtype.is_unsigned:
                return None
            waiting.extend(reader.outputs)
    return mine[0]


def _sources(given: Any) -> set[str]:
    """Names of the operations that a ragged or sparse tensor was handed on from."""
    found = set()
    for tensor in tf.nest.flatten(given, expand_composites=True):
        operation = tensor.op
        while operation.type in PASSED_ON:
            operation = operation.inputs[0].op
        found.add(operation.name)
    return found
