"""A function of all devices of a slice that graphs call by its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist._compat import dtensor_internals, keras_trainer
from kdist.graphs.chunks import Chunk

import tensorflow as tf

VARIANT = tf.variant.as_datatype_enum
"""The dtype of lists of tensors."""


class StitchedFunction:
    """A function of all devices of a slice, to call in a graph that is being traced.

    Args:
        definition: The function.
        chunk: What of a program it runs.
        shapes: Of what it returns on one device, as far as they are known.
        size: Number of devices.
        needs: What has to live as long: the functions that it calls.
        pure: Whether nothing of it has an effect.
    """

    def __init__(
        self,
        definition: Any,
        chunk: Chunk,
        shapes: Sequence[tf.TensorShape],
        size: int,
        needs: Any,
        *,
        pure: bool,
    ) -> None:
        self.chunk, self.size = chunk, size
        self.name = definition.signature.name
        self._shapes = list(shapes)
        self._dtypes = [tf.as_dtype(one.type) for one in definition.signature.output_arg]
        self._registered = dtensor_internals.Registered(definition, needs, pure=pure)
        self._call = self._registered.call

    def compile(self, lists: Sequence[str]) -> None:
        """Has XLA compile it.

        Args:
            lists: Which of the tensors that it takes and returns are lists of tensors.

        Raises:
            ValueError: There are some: XLA keeps them inside.
        """
        if lists:
            raise ValueError(
                "XLA cannot hand what a loop keeps (a list of tensors) from a forward to a "
                "backward function, as stages and chunks do, and a loss over the whole batch "
                "between them. Compile with jit_compile='auto' or False, or unroll the loop "
                "(keras.layers.LSTM(unroll=True)). "
                f"Received: jit_compile=True, {list(lists)}"
            )

        def call(*inputs: Any) -> list[Any]:
            return self._registered.call(inputs, self._dtypes)[1]

        compiled = tf.function(call, autograph=False, jit_compile=True)

        def outside(inputs: Sequence[Any], dtypes: Sequence[tf.DType]) -> tuple[Any, list[Any]]:
            found = list(compiled(*inputs))
            return None if tf.executing_eagerly() else found[0].op, found

        self._call = outside

    @property
    def has_effects(self) -> bool:
        """Whether it does something besides returning values."""
        return self._registered.has_effects

    def __call__(self, inputs: Sequence[Sequence[Any]]) -> tuple[Any, list[list[Any]]]:
        """Calls it.

        Args:
            inputs: For each device, what it is given; see `Chunk.takes`.

        Returns:
            The operation, None when executing eagerly, and for each device what it returns; see
            `Chunk.gives`.
        """
        flat = [one for mine in inputs for one in mine]
        operation, found = self._call(flat, self._dtypes)
        if self.has_effects:  # of one slice, which others need not wait for
            keras_trainer.run_independently(operation)
        count = len(self._shapes)
        parts = [found[k * count : (k + 1) * count] for k in range(self.size)]
        for mine in parts:
            for part, shape in zip(mine, self._shapes, strict=True):
                part.set_shape(shape)
        return operation, parts
