"""What scenarios of a process share: meshes over all processes, and whose values are whose."""

from __future__ import annotations

import keras

OPERATIONS = (
    "broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter", "reduce_scatter",
    "all_to_all", "scan",
)  # fmt: skip


def mesh(n: int, per_process: int = 1, model: int = 1) -> keras.distribution.DeviceMesh:
    names = [
        f"/job:worker/task:{task}/device:CPU:{device}"
        for task in range(n)
        for device in range(per_process * model)
    ]
    return keras.distribution.DeviceMesh((n * per_process, model), ["data", "model"], names)


def own(index: int, per_process: int, arrays: list) -> list:
    return arrays[index * per_process : (index + 1) * per_process]
