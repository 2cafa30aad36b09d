"""Strategies: how one operand of a layer is cut, as axis names or as cut counts.

The cut counts and the one-tuple-an-operand form are MindSpore's (`Primitive.shard`); the names are
those of the mesh's axes.
"""

import math
from collections.abc import Sequence
from typing import Any

from kdist.sharding.axes import PIPE_NAME
from kdist.sharding.dims import Dims, axes_of, clean_dims, collapse, named_dims
from kdist.sharding.mesh import Topology

Strategy = tuple[None | str | int | tuple[str, ...], ...]


def split_operands(strategy: Any, what: str) -> tuple[Strategy, ...]:
    """Reads a strategy as one tuple an operand.

    A tuple whose entries are all tuples has one entry an operand, as MindSpore writes it; any other
    tuple is the first operand alone.

    Args:
        strategy: `((4, 1), (1, 1))`, or `("model", None)` for one operand.
        what: The argument's name, for messages.

    Raises:
        ValueError: If it is no tuple, is empty, or an operand has another form.
    """
    if not isinstance(strategy, tuple | list) or not strategy:
        raise ValueError(
            f"{what} is a tuple with one tuple an operand, such as ((4, 1), (1, 1)), or one flat "
            f"tuple such as ('model', None). Received: {what}={strategy!r}"
        )
    nested = all(isinstance(entry, tuple | list) for entry in strategy)
    operands = strategy if nested else (strategy,)
    return tuple(check_strategy(operand, what) for operand in operands)


def check_strategy(strategy: Any, what: str) -> Strategy:
    """Checks the form of one operand's strategy, for which no mesh is needed.

    Args:
        strategy: One entry a dim: all names (None, an axis, a tuple of axes), or all cut counts
            (None or an integer of at least 1).
        what: The argument's name, for messages.

    Returns:
        The strategy as a tuple.

    Raises:
        ValueError: For another form.
    """
    if not isinstance(strategy, tuple | list):
        raise ValueError(
            f"A strategy is a tuple with one entry a dim. Received: {what}={strategy!r}"
        )
    counts = [entry for entry in strategy if isinstance(entry, int)]
    if not counts:
        return clean_dims(strategy, what)
    if any(entry is not None and not isinstance(entry, int) for entry in strategy):
        raise ValueError(
            "A strategy is all axis names or all cut counts: write the names of the axes for every "
            f"dim. Received: {what}={strategy!r}"
        )
    if any(isinstance(count, bool) or count < 1 for count in counts):
        raise ValueError(
            f"A cut count is an integer of at least 1 (1: not cut). Received: {what}={strategy!r}"
        )
    return tuple(strategy)


def parse_strategy(
    strategy: Any, topology: Topology, rank: int | None = None, *, operand: str, batch_dim: bool
) -> Dims:
    """Turns one operand's strategy into a layout.

    Cut counts become axes by size: 1 is not cut, any other count is the axis, or the axes (in the
    mesh's order), whose sizes multiply to it; an axis serves one dim of the operand. The rule of
    the cut counts is MindSpore's (`Primitive.shard`), which has no named axes.

    Args:
        strategy: One entry a dim: all names (None, an axis, a tuple of axes), or all cut counts.
        topology: The mesh.
        rank: The operand's number of dims, None if unknown.
        operand: The operand's name, for messages.
        batch_dim: Whether dim 0 is the batch, which the data axis already cuts: then that axis may
            stand on dim 0 only, as its major axis. Else (a weight) names may put it on any dim and
            counts never mean it.

    Returns:
        The layout, axes under the mesh's own names. The data axis stays on dim 0 if it is named or
        counted there.

    Raises:
        ValueError: For another form or rank, an axis that the mesh lacks or that stands twice, the
            data axis in another place, or counts that fit no axes or more than one choice of them.

    Example:
    ```python
    parse_strategy((4, 2), topology, operand="x", batch_dim=True)
    # ("data", "model") on data=4, model=2
    ```
    """
    strategy = check_strategy(strategy, operand)
    if rank is not None and len(strategy) != rank:
        raise ValueError(
            f"The strategy of {operand} has {len(strategy)} entries and the tensor {rank} dims: "
            f"give one entry a dim. Received: {operand}={strategy}"
        )
    if any(isinstance(entry, int) for entry in strategy):
        return _dims_of_counts(strategy, topology, operand, batch_dim)
    dims = named_dims(strategy, topology, operand)
    for index, dim in enumerate(dims):
        axes = axes_of(dim)
        wrong = index > 0 or axes[:1] != (topology.data_axis,)
        if batch_dim and topology.data_axis in axes and wrong:
            raise ValueError(
                f"The axis {topology.data_axis!r} cuts the batch, dim 0 of an activation, as its "
                f"first axis; it cannot stand elsewhere. Received: {operand}={strategy}"
            )
    return dims


def _dims_of_counts(
    counts: Sequence[Any], topology: Topology, operand: str, batch_dim: bool
) -> Dims:
    """Finds the one choice of axes that gives the cut counts."""
    axes = [
        axis for axis in topology.axis_names if topology.axis_size(axis) > 1 and axis != PIPE_NAME
    ]
    choices: list[Dims] = [()]
    for index, count in enumerate(counts):
        data_too = batch_dim and index == 0
        usable = [axis for axis in axes if axis != topology.data_axis or data_too]
        # An axis serves one dim, so each choice so far goes on with the axes that it left free.
        choices = [
            (*choice, collapse(group))
            for choice in choices
            for group in _groups([a for a in usable if a not in _all_axes(choice)], topology, count)
        ]
        if batch_dim and index == 0:
            choices = [_data_first(choice, topology) for choice in choices]
    if len(choices) == 1:
        return choices[0]
    problem = "fit no axes" if not choices else f"may mean {' or '.join(map(str, choices[:3]))}"
    where = "Dim 0 may use every axis, other dims" if batch_dim else "Its dims"
    raise ValueError(
        f"The cut counts of {operand} {problem}. The mesh has {topology.describe_axes()}; "
        f"{where} only the inner ones. Write the names of the axes instead of counts. "
        f"Received: {operand}={tuple(counts)}"
    )


def _groups(axes: Sequence[str], topology: Topology, count: int | None) -> list[tuple[str, ...]]:
    """Every group of axes whose sizes multiply to a cut count."""
    groups: list[tuple[str, ...]] = [()]
    for axis in axes:
        groups += [(*group, axis) for group in groups]
    wanted = count or 1
    return [g for g in groups if math.prod(topology.axis_size(axis) for axis in g) == wanted]


def _data_first(dims: Dims, topology: Topology) -> Dims:
    """Makes the data axis the major one of dim 0: replicas split the batch before anything else."""
    axes = axes_of(dims[0])
    return (collapse(tuple(sorted(axes, key=lambda a: a != topology.data_axis))), *dims[1:])


def _all_axes(dims: Dims) -> set[str]:
    return {axis for dim in dims for axis in axes_of(dim)}
