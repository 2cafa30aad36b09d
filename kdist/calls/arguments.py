"""What a layer is called with: tensors with a row per example, other tensors, and the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from kdist._compat import keras_trainer

import keras
import tensorflow as tf

ROWS, SHARED, STATIC = "rows", "shared", "static"
SOME_ROWS = 1009
"""Rows of a batch that nobody has: an output with as many has one for each."""


@dataclasses.dataclass(frozen=True, eq=False)
class CallArguments:
    """The arguments of a layer's `call`.

    Attributes:
        structure: (args, kwargs).
        kinds: Per flat leaf of it, whether it is a tensor with a row per example ("rows"), another
            tensor ("shared"), or something else ("static").
        rows: The tensors with rows.
        masks: The Keras mask that each of them carries, or None.
        shared: Other tensors.
    """

    structure: tuple[Sequence[Any], Mapping[str, Any]]
    kinds: tuple[str, ...]
    rows: list[Any]
    masks: list[Any]
    shared: list[Any]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallArguments:
        """Sorts arguments: the first tensor that is no scalar says how many rows there are."""
        structure = (tuple(args), dict(kwargs))
        leaves = [_as_tensor(leaf) for leaf in tf.nest.flatten(structure)]
        first = next((t for t in leaves if _is_tensor(t) and t.shape.rank != 0), None)
        kinds, rows, shared = [], [], []
        for leaf in leaves:
            if not _is_tensor(leaf):
                kinds.append(STATIC)
            elif first is not None and _has_rows(leaf, first):
                kinds.append(ROWS)
                rows.append(leaf)
            else:
                kinds.append(SHARED)
                shared.append(leaf)
        masks = [keras_trainer.get_mask(t) for t in rows]
        return cls(structure, tuple(kinds), rows, masks, shared)

    def filled(
        self, rows: Sequence[Any], masks: Sequence[Any], shared: Sequence[Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """(args, kwargs) with other tensors in the place of its own.

        Args:
            rows: Those with rows.
            masks: The Keras mask of each, or None.
            shared: The others.
        """
        for tensor, mask in zip(rows, masks, strict=True):
            if mask is not None:
                keras_trainer.set_mask(tensor, mask)
        return self._packed({ROWS: iter(rows), SHARED: iter(shared)})

    def _packed(self, given: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        leaves = tf.nest.flatten(self.structure)
        filled = [
            leaf if kind == STATIC else next(given[kind]) for leaf, kind in zip(leaves, self.kinds)
        ]
        args, kwargs = tf.nest.pack_sequence_as(self.structure, filled)
        return args, kwargs

    def symbolic(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """(args, kwargs) as Keras's symbolic tensors, with `SOME_ROWS`."""

        def spec(tensor: Any, *dims: int) -> keras.KerasTensor:
            shape = (*dims, *tensor.shape[len(dims) :])
            return keras.KerasTensor(shape, keras.backend.standardize_dtype(tensor.dtype))

        rows = [spec(t, SOME_ROWS) for t in self.rows]
        return self._packed({ROWS: iter(rows), SHARED: iter([spec(t) for t in self.shared])})

    def key(self) -> Hashable:
        """Tells apart calls that need traces of their own, but for the tensors' shapes."""
        leaves = tf.nest.flatten(self.structure)
        static = [
            leaf if isinstance(leaf, Hashable) else id(leaf)
            for leaf, kind in zip(leaves, self.kinds)
            if kind == STATIC
        ]
        names = tuple(self.structure[1])
        return (len(self.structure[0]), names, self.kinds, tuple(static))


def any_symbolic(values: Any) -> bool:
    """Whether some of the values are symbols of Keras, and not tensors."""
    return any(isinstance(leaf, keras.KerasTensor) for leaf in tf.nest.flatten(values))


def without_rows(given: CallArguments, call: Callable) -> str:
    """Finds an output of a layer that has no row per example.

    Args:
        given: What it is called with.
        call: Its `call`.

    Returns:
        Which output, for the user; "" if all have rows.
    """
    args, kwargs = given.symbolic()
    outputs = keras_trainer.keras_backend.compute_output_spec(call, *args, **kwargs)
    for output in tf.nest.flatten(outputs):
        if not isinstance(output, keras.KerasTensor):
            return repr(output)
        if not output.shape or output.shape[0] != SOME_ROWS:
            return f"a tensor of shape {tuple(output.shape)}"
    return ""


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, keras.Variable | tf.Variable) or hasattr(leaf, "__array__"):
        return leaf if _is_tensor(leaf) else tf.convert_to_tensor(leaf)
    return leaf


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) or _is_composite(leaf)


def _is_composite(leaf: Any) -> bool:
    return isinstance(leaf, tf.SparseTensor | tf.RaggedTensor)


def _has_rows(tensor: Any, first: Any) -> bool:
    """Whether a tensor has as many rows as the first one, as far as that is known."""
    return tensor.shape.rank != 0 and tensor.shape[0] == first.shape[0]
