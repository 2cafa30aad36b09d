"""A function and its vector-Jacobian product, laid out as what runs them wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist.program.vjp import PureFunction, Vjp
from kdist.stages.body import Backend
from kdist.storage import sparse
from kdist.storage.overwritten import refuse_added
from kdist.storage.sparse import LookUp

import tensorflow as tf


class LaidVjp(Vjp):
    """The two halves of a function of some of a model's weights; see `Vjp`.

    Args:
        function: See `Vjp`.
        params: See `Vjp`.
        inputs: See `Vjp`.
        wrap: See `Vjp`.
        backend: How values are laid out; see `kdist.stages.body.Backend`.
        positions: Which of the model's parameters these are.
        trained: How many of the model's parameters train: the first ones.
        of_batch: Which of the inputs come with the batch.
    """

    def __init__(
        self,
        function: PureFunction,
        params: Sequence[tf.TensorSpec],
        inputs: Sequence[tf.TensorSpec],
        wrap: Callable[..., Callable],
        *,
        backend: Backend,
        positions: Sequence[int],
        trained: int,
        of_batch: Callable[[int], bool],
    ) -> None:
        self.backend, self._positions = backend, list(positions)
        self._count_trained = sum(i < trained for i in positions)
        self._comes_with_batch = of_batch
        super().__init__(function, params, inputs, wrap)

    def _of_batch(self, inputs: list[Any]) -> list[Any]:
        return [t for j, t in enumerate(inputs) if self._comes_with_batch(j)]

    def _sources(self, params: list[Any], inputs: list[Any]) -> list[Any]:
        return super()._sources(params[: self._count_trained], inputs)

    def _passes(self, tensor: Any) -> bool:
        return bool(self.backend.hands_on(tensor))

    def _laid_out(self, source: Any, gradient: Any) -> Any:
        for param, position in zip(self._arguments[0], self._positions):
            if param is source:
                refuse_added(self.backend.entries[position].variable, gradient)
                by_batch = sparse.is_sparse(gradient) and self._by_batch(gradient)
                return self.backend.laid_out(gradient, param, position, by_batch)
        return gradient

    def _by_batch(self, gradient: tf.IndexedSlices) -> bool:
        """Whether the rows of a gradient are for rows of the batch, one after the other."""
        look_up = sparse.look_up(gradient.indices, self._of_batch(self._arguments[1]))
        return look_up.by_batch and not look_up.merged

    @property
    def gradients_exist(self) -> list[bool]:
        """Per parameter, whether it gets a gradient."""
        return [kind is not None for kind in self._kinds[: self._sizes[0]]]

    def connected(self) -> list[int]:
        """The trainable variables that get a gradient."""
        return [i for i, there in zip(self._positions, self.gradients_exist) if there]

    def look_ups(self, stage: int) -> dict[int, LookUp]:
        """By trainable variable, how gradients that are rows are looked up.

        Args:
            stage: Where the function runs.
        """
        found = {}
        for i, (reached, merged, alike) in self.rows.items():
            by_batch = any(map(self._comes_with_batch, reached))
            same = ((stage, alike),) if alike and not merged else ()
            found[self._positions[i]] = LookUp(by_batch, merged, same=same)
        return found
