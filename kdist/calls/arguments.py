"""What a layer is called with: tensors with a row per example, other tensors, and the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from kdist._compat import keras_trainer
from kdist.calls.attributes import alike, attributes_of
from kdist.program.logits import logits_of, with_logits
from kdist.program.program import Program, attach_masks

import keras
import tensorflow as tf

ROWS, SHARED, STATIC = "rows", "shared", "static"
SOME_ROWS, OTHER_ROWS = 1009, 1013
"""Rows of batches that nobody has: an output with as many has one for each."""
NO_ROWS = 997
"""Stands for an unknown size that is not that of the batch."""


@dataclasses.dataclass(frozen=True, eq=False)
class CallArguments:
    """The arguments of a layer's `call`.

    Attributes:
        structure: (args, kwargs).
        leaves: Its flat leaves, those that can be as tensors.
        kinds: Per flat leaf of it, whether it is a tensor with a row per example ("rows"), another
            tensor ("shared"), or something else ("static").
        rows: The tensors with rows.
        masks: The Keras mask that each of them carries, or None; then their logits, as
            `kdist.program.logits.with_logits` lists them.
        shared: Other tensors.
        python: What the layer's attributes, and arguments that are no tensors, were like at the
            call; see `kdist.calls.attributes`.
    """

    structure: tuple[Sequence[Any], Mapping[str, Any]]
    leaves: list[Any]
    kinds: tuple[str, ...]
    rows: list[Any]
    masks: list[Any]
    shared: list[Any]
    python: tuple[Hashable, ...]

    @classmethod
    def of(
        cls,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        layers: Iterable[keras.Layer] = (),
    ) -> CallArguments:
        """Sorts arguments: the first tensor that is no scalar says how many rows there are.

        Args:
            args: Of the call.
            kwargs: Of the call.
            layers: The called layer, and those in it.
        """
        structure = (tuple(args), dict(kwargs))
        leaves = [_as_tensor(leaf) for leaf in tf.nest.flatten(structure)]
        first = next((t for t in leaves if _is_tensor(t) and t.shape.rank != 0), None)
        rows = {n for n, t in enumerate(leaves) if first is not None and _has_rows(t, first)}
        static = tuple(alike(leaf) for leaf in leaves if not _is_tensor(leaf))
        return cls._sorted(structure, leaves, rows, (static, attributes_of(layers)))

    @classmethod
    def _sorted(
        cls, structure: Any, leaves: list[Any], rows: Set[int], python: tuple[Hashable, ...]
    ) -> CallArguments:
        """Arguments, some leaves of which have rows."""
        kinds = tuple(
            STATIC if not _is_tensor(t) else ROWS if n in rows else SHARED
            for n, t in enumerate(leaves)
        )
        found = {
            kind: [t for t, its in zip(leaves, kinds) if its == kind] for kind in (ROWS, SHARED)
        }
        masks = with_logits(Program.masks_of(found[ROWS]), logits_of(found[ROWS]))
        return cls(structure, leaves, kinds, found[ROWS], masks, found[SHARED], python)

    @property
    def composite(self) -> bool:
        """Whether ragged or sparse tensors are among them."""
        return any(map(_is_composite, self.leaves))

    def sorted_by(self, kinds: Sequence[str]) -> CallArguments:
        """The same with other kinds of tensors, one per leaf."""
        rows = {n for n, kind in enumerate(kinds) if kind == ROWS}
        return self._sorted(self.structure, self.leaves, rows, self.python)

    def ways(self) -> Iterator[CallArguments]:
        """The ways in which they can be meant, the likeliest first.

        A tensor may have as many rows as the batch by chance, and the first one may be a table.
        """
        at = [n for n, t in enumerate(self.leaves) if _is_tensor(t) and t.shape.rank != 0]
        sizes = dict.fromkeys(self.leaves[n].shape[0] for n in at)
        for size in sizes:
            alike = [n for n in at if self.leaves[n].shape[0] == size]
            fewer = [[one for one in alike if one != left] for left in reversed(alike)]
            sets = [alike, *fewer, *([one] for one in alike)]
            for rows in dict.fromkeys(frozenset(one) for one in sets if one):
                yield self._sorted(self.structure, self.leaves, rows, self.python)

    def filled(
        self, rows: Sequence[Any], masks: Sequence[Any], shared: Sequence[Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """(args, kwargs) with other tensors in the place of its own.

        Args:
            rows: Those with rows.
            masks: The Keras mask of each, or None, and logits.
            shared: The others.
        """
        rows = attach_masks(list(rows), masks)
        return self._packed({ROWS: iter(rows), SHARED: iter(shared)})

    def _packed(self, given: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        leaves = tf.nest.flatten(self.structure)
        filled = [
            leaf if kind == STATIC else next(given[kind]) for leaf, kind in zip(leaves, self.kinds)
        ]
        args, kwargs = tf.nest.pack_sequence_as(self.structure, filled)
        return args, kwargs

    def symbolic(self, count: int = SOME_ROWS) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """(args, kwargs) as Keras's symbolic tensors, with a number of rows."""

        def spec(tensor: Any, *dims: int) -> keras.KerasTensor:
            shape = (*dims, *tensor.shape[len(dims) :])
            return keras.KerasTensor(shape, keras.backend.standardize_dtype(tensor.dtype))

        def shared(tensor: Any) -> keras.KerasTensor:
            unknown = tensor.shape.rank and tensor.shape[0] is None
            return spec(tensor, NO_ROWS) if unknown else spec(tensor)

        rows = [spec(t, count) for t in self.rows]
        return self._packed({ROWS: iter(rows), SHARED: iter(map(shared, self.shared))})

    def key(self, python: bool = True) -> Hashable:
        """Tells apart calls that need traces of their own, but for the tensors' shapes.

        Args:
            python: Also those that differ in nothing but what `python` says.
        """
        return (_outline(self.structure), self.kinds, self.python if python else ())

    def shapes(self) -> Hashable:
        """Dtypes and shapes of the tensors, but for the number of rows."""
        found = [*((t, t.shape[1:]) for t in self.rows), *((t, t.shape) for t in self.shared)]
        return tuple((t.dtype, str(shape)) for t, shape in found)


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
    for count in (SOME_ROWS, OTHER_ROWS):  # again, where that may be the size of something else
        args, kwargs = given.symbolic(count)
        outputs = keras_trainer.keras_backend.compute_output_spec(call, *args, **kwargs)
        found = next(filter(None, (_rowless(t, count) for t in tf.nest.flatten(outputs))), "")
        if not found:
            break
    return found


def _rowless(output: Any, count: int) -> str:
    """An output for the user, unless it has as many rows, and no other dim of that size."""
    if not isinstance(output, keras.KerasTensor):
        return repr(output)
    shape = tuple(output.shape)
    has_rows = bool(shape) and shape[0] == count and count not in shape[1:]
    return "" if has_rows else f"a tensor of shape {shape}"


def _outline(structure: Any) -> Hashable:
    """How a structure nests its leaves, and under which names."""
    if isinstance(structure, Mapping):
        return tuple((name, _outline(value)) for name, value in structure.items())
    if isinstance(structure, list | tuple):
        return (type(structure), *map(_outline, structure))
    return None


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, keras.Variable | tf.Variable) or hasattr(leaf, "__array__"):
        return leaf if _is_tensor(leaf) else tf.convert_to_tensor(leaf)
    return leaf


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) or _is_composite(leaf)


def _is_composite(leaf: Any) -> bool:
    return isinstance(leaf, tf.SparseTensor | tf.RaggedTensor)


def _has_rows(tensor: Any, first: Any) -> bool:
    """Whether it is a tensor with as many rows as the first one, as far as that is known."""
    return _is_tensor(tensor) and tensor.shape.rank != 0 and tensor.shape[0] == first.shape[0]
