"""Tensors that a call takes and gives, each with a strategy: of layers, and of any operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist.layers.relayout import Relayout
from kdist.sharding import active
from kdist.sharding.dims import Dims
from kdist.sharding.strategy import Strategy

import keras
import numpy as np
import tensorflow as tf

Change = Callable[[Any, Any, str], Any]
"""`change(tensor, strategy, name)` gives the tensor that takes its place."""


def operands(structure: Any) -> list[Any]:
    """The tensors of a structure of arguments or results, in order; dicts by sorted keys."""
    return [value for value in keras.tree.flatten(structure) if _is_tensor(value)]


def lay_out(
    structure: Any, strategies: Sequence[Strategy | Dims], kind: str, of: str, change: Change
) -> Any:
    """Changes the first tensors of a structure, one per strategy.

    Args:
        structure: Arguments, or results, of a call.
        strategies: One per tensor, in order; tensors beyond them stay as they are.
        kind: What the tensors are, for messages: "input" or "output".
        of: Whose they are, for messages.
        change: What is done with each.

    Raises:
        ValueError: If there are fewer tensors than strategies.
    """
    if not strategies:
        return structure
    flat = keras.tree.flatten(structure)
    places = [n for n, value in enumerate(flat) if _is_tensor(value)]
    if len(strategies) > len(places):
        raise ValueError(
            f"{of[0].upper()}{of[1:]} has {len(places)} {kind}{'' if len(places) == 1 else 's'} in "
            f"this call and {len(strategies)} strategies for them: give at most one for each. "
            f"Received: strategies={tuple(strategies)}"
        )
    for i, (n, strategy) in enumerate(zip(places, strategies, strict=False)):
        flat[n] = change(flat[n], strategy, name_of(i, len(strategies), kind, of))
    return keras.tree.pack_sequence_as(structure, flat)


def name_of(position: int, count: int, kind: str, of: str) -> str:
    """What messages call a tensor: `input 0 of layer 'up'`, `the output of layer 'up'`."""
    only = kind == "output" and count == 1
    return f"the output of {of}" if only else f"{kind} {position} of {of}"


def relaid(tensor: Any, strategy: Strategy, what: str = "a tensor") -> Any:
    """A tensor in a layout: while a functional model is built, and within a layer's call.

    Args:
        tensor: A `keras.KerasTensor`, which passes through a `Relayout` layer from here on; a
            variable; or a tensor.
        strategy: See `kdist.sharding.strategy.parse_strategy`.
        what: The tensor's name, for notes.
    """
    if isinstance(tensor, keras.KerasTensor):
        return Relayout(strategy)(tensor)
    if isinstance(tensor, keras.Variable):
        # Dim 0 of a weight is no batch: counts never mean the data axis there.
        value = keras.ops.convert_to_tensor(tensor)
        return active.relaid(value, strategy, what, batch_dim=False)
    return active.relaid(tf.convert_to_tensor(tensor), strategy, what)


@dataclasses.dataclass(frozen=True)
class ShardedOperator:
    """An operator that takes and gives tensors in declared layouts; `kdist.shard` makes it.

    Called on symbolic tensors it adds `Relayout` layers around the operator's own node, so a
    functional model is saved and copied as ever.

    Attributes:
        operator: Any callable on tensors.
        in_strategy: One strategy per tensor among its arguments, in the order they are written.
        out_strategy: One strategy per tensor of its result.
    """

    operator: Callable
    in_strategy: tuple[Strategy, ...] = ()
    out_strategy: tuple[Strategy, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the operator.

        Args:
            *args: Its arguments; tensors may be in lists.
            **kwargs: Likewise.

        Returns:
            What the operator gives.

        Raises:
            ValueError: If there are fewer tensors than strategies; if a strategy has another rank
                than its tensor; or if, on symbolic tensors, an argument that is a constant is to be
                cut.
        """
        given = [list(args), list(kwargs.values())]
        symbolic = any(isinstance(t, keras.KerasTensor) for t in operands(given))
        change = self._lay_symbolic if symbolic else self._lay
        args, values = lay_out(given, self.in_strategy, "input", self._name, change)
        result = self.operator(*args, **dict(zip(kwargs, values, strict=True)))
        return lay_out(result, self.out_strategy, "output", self._name, self._lay)

    @property
    def _name(self) -> str:
        known = getattr(self.operator, "__name__", None) or type(self.operator).__name__
        return f"operator {known!r}"

    def _lay(self, tensor: Any, strategy: Strategy, what: str) -> Any:
        rank = len(tensor.shape)
        if len(strategy) != rank:
            raise ValueError(
                f"The strategy of {what} has {len(strategy)} entries and the tensor {rank} dims: "
                f"give one entry a dim. Received: strategy={strategy}, shape={tuple(tensor.shape)}"
            )
        return relaid(tensor, strategy, what)

    def _lay_symbolic(self, tensor: Any, strategy: Strategy, what: str) -> Any:
        if isinstance(tensor, keras.KerasTensor):
            return self._lay(tensor, strategy, what)
        if any(entry not in (None, 1) for entry in strategy):
            raise ValueError(
                f"While a functional model is built, {what} is a constant, which every device has "
                "whole. Leave it uncut, or call the operator inside a layer's call, with the "
                f"layer's weight. Received: strategy={strategy} for a {type(tensor).__name__}"
            )
        return tensor


def _is_tensor(value: Any) -> bool:
    known = isinstance(value, keras.KerasTensor | keras.Variable | np.ndarray)
    return known or tf.is_tensor(value)
