"""Names and sizes of a mesh's axes, and what is asked of them."""

from collections.abc import Sequence

import numpy as np

# The two names of the axis that carries replicas: the field's, and keras.distribution's default.
DATA_NAMES = ("data", "batch")
PIPE_NAME = "pipe"
# Words that DTensor uses in layouts; an axis of that name would be read as the word.
_RESERVED = ("unsharded", "match", "any")
# What other systems call these axes; here such an axis would be an inner one.
_FOREIGN = {
    **dict.fromkeys(("dp", "ddp", "fsdp", "zero", "replica", "replicas"), DATA_NAMES[0]),
    **dict.fromkeys(("pp", "pipeline", "stage", "stages"), PIPE_NAME),
}


def check_inner_axes_local(
    axis_names: Sequence[str],
    shape: Sequence[int],
    data_axis: str | None,
    processes: Sequence[int],
) -> None:
    """Checks that no inner axis leaves a process: a slice lives inside one.

    So where each process runs a program of its own, as after `kdist.comm.connect`. A program that
    one process runs for all, as after `kdist.init`, may cut tensors over processes as well.

    Args:
        axis_names: The mesh's axes.
        shape: Their sizes.
        data_axis: The axis that may cross processes, or None.
        processes: Process index of each device, row-major over the axes.

    Raises:
        ValueError: Naming the first inner axis along which the process changes.
    """
    grid = np.asarray(processes).reshape(tuple(shape))
    for position, name in enumerate(axis_names):
        if name == data_axis:
            continue
        if np.any(grid != np.take(grid, [0], axis=position)):
            raise ValueError(
                f"Axis {name!r} of size {shape[position]} spans several processes; an inner axis "
                "must stay inside one process, only the data axis may cross. Put the devices of a "
                "process next to each other on the inner axes, or make this axis smaller. "
                f"Received: processes of the devices={grid.tolist()}"
            )


def check_axes(axis_names: tuple[str, ...], shape: tuple[int, ...]) -> str | None:
    """Checks names and sizes of a mesh's axes.

    Returns:
        The name of the data axis, None without one.

    Raises:
        ValueError: For none, a name or size that cannot be, or two axes of replicas.
    """
    received = f"Received: axes={dict(zip(axis_names, shape, strict=True))}"
    if not axis_names:
        raise ValueError(
            "A mesh needs at least one axis, such as kdist.mesh(data=2). Received: axes={}"
        )
    if len(set(axis_names)) != len(axis_names):
        raise ValueError(f"The axes of a mesh have distinct names. Received: {axis_names}")
    for name, size in zip(axis_names, shape, strict=True):
        if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
            raise ValueError(
                f"An axis name is a Python identifier other than {_RESERVED}. "
                f"Received: axis name={name!r}"
            )
        whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not whole or size < 1:
            raise ValueError(
                f"The size of axis {name!r} must be an integer of at least 1. {received}"
            )
    names = [name for name in axis_names if name in DATA_NAMES]
    if len(names) > 1:
        raise ValueError(
            "`data` and `batch` are two names of the one axis that carries replicas: keep one. "
            f"{received}"
        )
    return names[0] if names else None


def foreign_names(axis_names: Sequence[str]) -> list[str]:
    """Says which axes are likely meant as others.

    Args:
        axis_names: The mesh's axes.

    Returns:
        A line for each inner axis whose name means replicas or stages elsewhere.
    """
    meant = [(name, _FOREIGN[name.lower()]) for name in axis_names if name.lower() in _FOREIGN]
    carried = {DATA_NAMES[0]: "replicas of the model", PIPE_NAME: "stages of a pipeline"}
    return [
        f"Axis {name!r} is an inner axis: it cuts tensors. The axis of {carried[ours]} is "
        f"{ours!r}; name it so if that is meant."
        for name, ours in meant
    ]
