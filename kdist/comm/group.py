"""The devices that a collective runs over: the ranks along one axis of a mesh."""

from __future__ import annotations

import dataclasses

from kdist.cluster.joining import controller
from kdist.comm import processes
from kdist.sharding.mesh import Device, Topology

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Group:
    """Every group of devices along a mesh axis, and which of them are in this process.

    Devices that differ only in their coordinate on the axis form one group; their coordinate is
    their *rank*. A mesh of `data=2, model=3` has three groups of two along `data`.

    Attributes:
        axis: Name of the axis.
        devices: Every device of the mesh, row-major: the mesh's order.
        rows: For each group, the positions of its ranks in `devices`.
        local: The positions whose devices are in this process, in order.
        timeout_seconds: After which a message that does not come is an error.

    Example:
        >>> group = kdist.comm.Group.of(kdist.mesh(data=2, model=3), "data")
        >>> group.rows
        ((0, 3), (1, 4), (2, 5))
    """

    axis: str
    devices: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]
    local: tuple[int, ...]
    timeout_seconds: float = processes.TIMEOUT_SECONDS

    @classmethod
    def of(
        cls,
        mesh: keras.distribution.DeviceMesh,
        axis: str,
        timeout_seconds: float | None = None,
    ) -> Group:
        """Reads a mesh.

        Args:
            mesh: The mesh; devices of other processes are written
                `"/job:worker/task:1/device:CPU:0"`.
            axis: Name of one of its axes.
            timeout_seconds: For messages between processes; by default what `connect` was told.

        Returns:
            The group.

        Raises:
            ValueError: For what `Topology.from_mesh` refuses, an axis that the mesh does not have,
                devices of other processes before `kdist.comm.connect`, or a timeout that is not
                finite, or below a millisecond.
        """
        here = processes.current()
        existing = [Device.parse(d.name) for d in tf.config.list_logical_devices()]
        names = np.asarray(mesh.devices).flatten()
        devices = [Device.parse(name).among(existing) for name in names]
        own = {("localhost", 0)} | ({(here.job, here.index)} if here else set())
        spelled = [Device(process, d.kind, d.index).name for d in existing for process in own]
        if controller() is not None:  # of all processes: this one runs the program for them
            own = {device.process for device in existing}
            spelled = [device.name for device in existing]
        elsewhere = [device.name for device in devices if device.process not in own]
        if elsewhere:
            processes.check_members(elsewhere)
        topology = Topology.from_mesh(mesh, [*spelled, *elsewhere])
        place = topology.axis_names.index(topology.canonical(axis))
        grid = np.arange(len(devices)).reshape(topology.shape)
        rows = np.moveaxis(grid, place, -1).reshape(-1, topology.shape[place])
        if timeout_seconds is None:
            timeout_seconds = here.timeout_seconds if here else processes.TIMEOUT_SECONDS
        processes.check_timeout(timeout_seconds)
        return cls(
            axis=topology.axis_names[place],
            devices=tuple(device.name for device in devices),
            rows=tuple(tuple(row) for row in rows.tolist()),
            local=tuple(i for i, device in enumerate(devices) if device.process in own),
            timeout_seconds=timeout_seconds,
        )

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""
        return len(self.rows[0])

    @property
    def local_devices(self) -> tuple[str, ...]:
        """This process's devices: one value each in every collective."""
        return tuple(self.devices[position] for position in self.local)

    @property
    def crosses_processes(self) -> bool:
        """Whether a group has ranks in other processes."""
        return any(not set(row) <= set(self.local) for row in self.local_rows)

    @property
    def local_rows(self) -> tuple[tuple[int, ...], ...]:
        """The groups with at least one rank in this process."""
        mine = set(self.local)
        return tuple(row for row in self.rows if mine & set(row))

    def only(self, row: tuple[int, ...]) -> Group:
        """One of the groups with a rank in this process."""
        ranks, mine = tuple(range(len(row))), set(self.local)
        devices = tuple(self.devices[position] for position in row)
        local = tuple(rank for rank in ranks if row[rank] in mine)
        return dataclasses.replace(self, devices=devices, rows=(ranks,), local=local)

    def __str__(self) -> str:
        return (
            f"axis {self.axis!r}: {len(self.rows)} group{'s' * (len(self.rows) != 1)} of "
            f"{self.size}, {len(self.local)} of {len(self.devices)} devices in this process"
        )
