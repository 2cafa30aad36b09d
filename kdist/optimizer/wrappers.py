"""The wrappers that may lie around the optimizer that does the math."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdist.config.optimizer import OptimizerConfig
from kdist.optimizer.local import (
    changes_rows_only,
    is_linear,
    leaf_optimizers,
    needs_whole,
    refuse_assigned_methods,
)

import keras


@dataclasses.dataclass(frozen=True)
class Unwrapped:
    """An optimizer taken out of its wrappers.

    Attributes:
        inner: The optimizer that does the math; may be a `MultiOptimizer`.
        loss_scale: The `LossScaleOptimizer` around it, if any.
        config: What a `kdist.ShardedOptimizer` around it says, if there is one.
    """

    inner: Any
    loss_scale: Any = None
    config: OptimizerConfig | None = None


def unwrap(optimizer: Any) -> Unwrapped:
    """Takes loss scaling and `kdist.ShardedOptimizer` off, in whichever order they are."""
    found = Unwrapped(optimizer)
    while True:
        if isinstance(found.inner, keras.optimizers.LossScaleOptimizer):
            inner = found.inner.inner_optimizer
            found = dataclasses.replace(found, inner=inner, loss_scale=found.inner)
        elif isinstance(config := getattr(found.inner, "kdist_config", None), OptimizerConfig):
            inner = found.inner.inner_optimizer
            found = dataclasses.replace(found, inner=inner, config=config)
        else:
            return found


def refuse_methods_of_objects(optimizer: Any) -> None:
    """See `local.refuse_assigned_methods`; of the wrappers of an optimizer too."""
    inside = unwrap(optimizer).inner
    refuse_assigned_methods(inside)
    while optimizer is not inside:
        refuse_assigned_methods(optimizer)
        optimizer = optimizer.inner_optimizer


def optimizers_of(model: keras.Model) -> dict[str, Any]:
    """The optimizers of a model, by its attribute: the compiled one first, those beside it.

    Those in a list, or a dict, that is an attribute are named `"several[0]"`, `"several['name']"`.
    """
    compiled = model.optimizer if model.compiled else None
    found: dict[str, Any] = {"optimizer": compiled, **vars(model)}
    for name, several in vars(model).items():
        if name.startswith("_self_"):  # what TensorFlow tracks of the others
            continue
        if isinstance(several, dict):
            found |= {f"{name}[{key!r}]": one for key, one in several.items()}
        elif isinstance(several, list | tuple):
            found |= {f"{name}[{i}]": one for i, one in enumerate(several)}
    every: dict[int, tuple[str, Any]] = {}
    for name, one in found.items():
        if isinstance(one, keras.optimizers.Optimizer):
            every.setdefault(id(one), (name, one))
    return dict(every.values())


def optimizer_groups(
    optimizer: Any, variables: Sequence[keras.Variable]
) -> list[tuple[Any, list[int]]]:
    """The optimizers that do math, each with the positions of its variables; none without one."""
    return [] if optimizer is None else leaf_optimizers(unwrap(optimizer).inner, variables)


def whole_updates(optimizer: Any, variables: Sequence[keras.Variable]) -> list[bool]:
    """Per variable, whether its update must see the whole tensor; see `needs_whole`."""
    whole = [False] * len(variables)
    for leaf, members in optimizer_groups(optimizer, variables):
        for v in members:
            whole[v] = needs_whole(leaf, variables[v])
    return whole


def row_updates(optimizer: Any, variables: Sequence[keras.Variable]) -> frozenset[int]:
    """Positions of the variables that change in the rows of their gradient alone, if it is rows."""
    return frozenset(
        v
        for leaf, members in optimizer_groups(optimizer, variables)
        for v in members
        if changes_rows_only(leaf, variables[v])
    )


def sums_rows(optimizer: Any, variables: Sequence[keras.Variable]) -> frozenset[int]:
    """Positions of the variables of which gradients of one row may be summed; see `is_linear`."""
    groups = optimizer_groups(optimizer, variables)
    return frozenset(v for leaf, members in groups for v in members if is_linear(leaf))
