"""Layouts, and settings about them, that programs show to be without effect once traced. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kdist.config.without_effect import WithoutEffect


def uncut_dim(
    what: str, dim: int, size: int | None, count: int, axes: Sequence[str]
) -> WithoutEffect:
    """The note on a declared cut of a dim that does not divide; seen while a program is traced.

    Args:
        what: The tensor's name.
        dim: Which of its dims.
        size: Elements of the dim; None where the trace does not know.
        count: Parts that were declared.
        axes: The mesh axes that make them.
    """
    over = " x ".join(map(repr, axes))
    return WithoutEffect(
        f"the cut of dim {dim} of {what} into {count} parts over {over}",
        f"it has {{sizes}} elements there, no multiple of {count}, so every device has all of them",
        f"Make the dim a multiple of {count} (dim 0: the rows of a replica's batch, or "
        "micro-batch, count), or cut another one",
        sizes=("an unknown number of" if size is None else str(size),),
    )


def idle_axis(name: str, size: int) -> WithoutEffect:
    """The note on an inner axis that cuts nothing; known when programs are traced.

    Args:
        name: The axis.
        size: Its devices.
    """
    return WithoutEffect(
        f"the mesh axis {name!r} of {size} devices",
        "it cuts no weight, and no tensor that a layer or operator declares, so its devices do "
        "the same work",
        "Cut weights over it by layout_map or kdist.shard, or give its devices to a data axis",
    )


def no_sequence() -> WithoutEffect:
    """The note on `sequence_parallel` that cut nothing; known when programs are traced."""
    return WithoutEffect(
        "sequence_parallel=True",
        "no Dense, EinsumDense or Embedding layer, which no pattern lays out and no axis cuts in "
        "another dim too, ends in a sum over an inner axis and gives (batch, length, features)",
        "Cut kernels by rows too, such as ('model', None), or leave it out",
    )


def no_moves() -> WithoutEffect:
    """The note on `enable_alltoall` that moves nothing; known when programs are lowered."""
    return WithoutEffect(
        "enable_alltoall=True",
        "no tensor goes from a cut of one dim to a cut of another over one axis, and no table is "
        "split by hand by rows: the programs of layers have no all-to-all",
        "Leave it out; kdist.inspect shows which collectives layers have",
    )
