"""The scope in which a program calls the model: values in place of variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist.program.table_layers import looking_up

import keras
import tensorflow as tf


class ForwardScope(keras.StatelessScope):
    """The scope of a program's forward pass.

    A layer may write a variable in its call, and read it. On one device no gradient flows through
    how the written value was computed: so here. Of a trainable variable (SpectralNormalization
    writes one) the gradient is then taken at the written value.

    Args:
        mapping: Variables and their values.
        trainable: Those of them that train.
        tables: Where look-ups in tables on the host get rows, if there are such tables.
        layers: The layers that look these up.

    Attributes:
        given: The value that each variable came with, by identity.
        written: The variables that were written, by identity.
        trainable: Identities of those that train.
    """

    def __init__(
        self,
        mapping: Sequence[tuple[keras.Variable, Any]],
        trainable: Sequence[keras.Variable],
        tables: Any = None,
        layers: Sequence[keras.layers.Embedding] = (),
    ) -> None:
        super().__init__(mapping, collect_losses=True)
        self.tables = tables
        self._looking_up = looking_up(layers)
        self.given = dict(self.state_mapping)
        self.written: dict[int, keras.Variable] = {}
        self.trainable = {id(v) for v in trainable}

    def __enter__(self) -> ForwardScope:
        self._looking_up.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._looking_up.__exit__(None, None, None)

    def current(self, variable: keras.Variable) -> Any:
        """The value that a variable has by now, None if it was neither given nor written."""
        return self.state_mapping.get(id(variable))

    @contextlib.contextmanager
    def instead(self, values: Mapping[int, Any]) -> Iterator[None]:
        """Meanwhile, variables have these values, by identity, until they are written."""
        before = {key: self.state_mapping[key] for key in values}
        self.state_mapping.update(values)
        try:
            yield
        finally:
            for key, value in values.items():
                if self.state_mapping[key] is value:
                    self.state_mapping[key] = before[key]

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Notes the new value of a variable."""
        variable, value = update
        self.written[id(variable)] = variable
        given = self.given.get(id(variable))
        if id(variable) in self.trainable:
            value = tf.stop_gradient(value) + (given - tf.stop_gradient(given))
        elif value is not given and not value.dtype.is_integer:
            value = tf.stop_gradient(value)
        super().add_update((variable, value))
