"""Meshes: named axes over devices, and the slices that kdist cuts them into.

A `keras.distribution.DeviceMesh` is what the user gives. `Topology` is what the engine reads: which
axis carries the stages of a pipeline (`pipe`), which the replicas (`data`, or Keras's own name for
it, `batch`), which axes are *inner* (everything else: they cut tensors inside one replica), and
which devices form each slice.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kdist.cluster.joining import controller
from kdist.display.warn import warn
from kdist.sharding.axes import (
    DATA_NAMES,
    PIPE_NAME,
    check_axes,
    check_inner_axes_local,
    foreign_names,
)
from kdist.sharding.device import Device, check_devices_distinct, check_devices_exist

import keras
import numpy as np
import tensorflow as tf

_SHOWN_SLICES = 16

HOST = (1 << 30, 0)
"""Stands in place of a (slice, inner) coordinate for the host, behind all of them."""


@dataclass(frozen=True)
class Slice:
    """The devices that hold one replica of the model, or of a stage, cut over the inner axes.

    Attributes:
        index: Coordinate on the data axis, 0 where the mesh has none.
        devices: TensorFlow device strings such as `"/device:CPU:3"`, one per inner coordinate,
            row-major over the inner axes in the order of the mesh.
        stage: Coordinate on the pipe axis, 0 where the mesh has none.
    """

    index: int
    devices: tuple[str, ...]
    stage: int = 0


def mesh(*, devices: Sequence[str] | None = None, **axes: int) -> keras.distribution.DeviceMesh:
    """Makes a device mesh from named axes.

    The axes are row-major in the order they are written: neighbours on the last axis are
    neighbours in the device list, so put the axis that communicates most last.

    Args:
        devices: Device names such as `"cpu:0"`, one per mesh position, of other processes
            `"/job:worker/task:1/device:CPU:0"`. Defaults to the first devices, process after
            process, GPUs where there are any, else CPUs; a warning says so where there are GPUs,
            too few, and enough CPUs.
        **axes: Size of each axis. `data` (or `batch`) carries replicas, `pipe` the stages of a
            pipeline; every other name is an inner axis. Names that other systems have for the
            first two (`dp`, `fsdp`, `pp`, ...) are warned of.

    Returns:
        A `keras.distribution.DeviceMesh`.

    Raises:
        ValueError: For no axes, a size that is not an integer of at least 1, more positions than
            devices, duplicate or unknown devices, or anything else that `Topology.from_mesh`
            refuses.

    Example:
    ```python
    kdist.init(cpu_devices=8)
    mesh = kdist.mesh(data=2, model=4)
    mesh.shape  # (2, 4)
    ```
    """
    check_axes(tuple(axes), tuple(axes.values()))
    for note in foreign_names(tuple(axes)):
        warn(note)
    needed = math.prod(axes.values())
    if devices is None:
        names = _first_devices(needed, axes)
    elif isinstance(devices, str) or len(devices) != needed:
        given = "one string" if isinstance(devices, str) else f"{len(devices)}"
        raise ValueError(
            f"A mesh of {_by(axes)} has {needed} positions and needs as many device names; "
            f"{given} given. Received: devices={devices!r}, axes={axes}"
        )
    else:
        names = [str(name) for name in devices]
    result = keras.distribution.DeviceMesh(tuple(axes.values()), tuple(axes), names)
    Topology.from_mesh(result)  # refuses here what training would refuse later
    return result


def _first_devices(count: int, axes: dict[str, int]) -> list[str]:
    """The names of the first `count` devices, GPUs before CPUs."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    found = _devices(kind)
    if kind == "GPU" and len(found) < count <= len(_devices("CPU")):
        warn(
            f"A mesh of {_by(axes)} needs {count} devices, and there are {len(found)} GPUs: it "
            f"takes CPUs. Name them, devices=[f'cpu:{{k}}' for k in range({count})], if that is "
            "meant; make an axis smaller to train on GPUs."
        )
        found = _devices("CPU")
    if count > len(found):
        processes = len({device.process for device in found})
        fix = f"Call kdist.init(cpu_devices={-(-count // processes)}) first"
        if kind == "GPU":
            fix += " to have CPUs instead, or cut a card into parts"
            fix += " (tf.config.set_logical_device_configuration)"
        raise ValueError(
            f"A mesh of {_by(axes)} needs {count} devices and there are {len(found)} {kind} "
            f"devices. {fix}, or make an axis smaller. Received: axes={axes}"
        )
    return [
        f"{d.kind.lower()}:{d.index}" if d.process == found[0].process else d.name
        for d in found[:count]
    ]


def _devices(kind: str) -> list[Device]:
    return [Device.parse(device.name) for device in tf.config.list_logical_devices(kind)]


@dataclass(frozen=True)
class Topology:
    """A mesh as the engine sees it: replicas, inner axes, slices. Build it with `from_mesh`.

    Attributes:
        axis_names: Names of the mesh's axes, in its order.
        shape: Their sizes.
        data_axis: The axis that carries replicas, `"data"` or `"batch"`; None where there is none.
        inner_axes: (name, size) of every other axis, in the mesh's order.
        slices: One per stage and replica: the replicas of the first stage in the order of the data
            axis, then those of the next one.
        num_stages: Number of stages of the pipeline, 1 where there is no `pipe` axis.
        merged: Groups of inner axes that cut dims together only, see `with_merged`.
        host: The device that plays the host, whose memory holds what `kdist.place` puts there: a
            CPU outside the mesh where there is one, else a CPU that is a device of the mesh too.
    """

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    data_axis: str | None
    inner_axes: tuple[tuple[str, int], ...]
    slices: tuple[Slice, ...]
    num_stages: int = 1
    merged: tuple[tuple[str, ...], ...] = ()
    host: str = ""

    @classmethod
    def from_mesh(
        cls,
        device_mesh: keras.distribution.DeviceMesh,
        available: Sequence[str] | None = None,
    ) -> "Topology":
        """Reads and checks a mesh.

        Args:
            device_mesh: The mesh; its axes are row-major over its devices.
            available: Names of the devices that exist. Defaults to TensorFlow's logical devices,
                which starts TensorFlow's runtime (call `kdist.init` before).

        Returns:
            The topology.

        Raises:
            ValueError: If the argument is not a `DeviceMesh`; for both `data` and `batch`, a
                duplicate axis, an inner axis that leaves a process, duplicate or unknown devices,
                or more devices than exist.

        Example:
        ```python
        topology = Topology.from_mesh(kdist.mesh(data=2, model=2))
        topology.slices[1].devices  # ("/device:CPU:2", "/device:CPU:3")
        ```
        """
        if not isinstance(device_mesh, keras.distribution.DeviceMesh):
            raise ValueError(
                "A mesh is a keras.distribution.DeviceMesh, as kdist.mesh(data=2, model=2) makes. "
                f"Received: mesh={device_mesh!r}"
            )
        axis_names, shape = tuple(device_mesh.axis_names), tuple(device_mesh.shape)
        data_axis = check_axes(axis_names, shape)
        shape = tuple(int(size) for size in shape)
        if available is None:
            available = [device.name for device in tf.config.list_logical_devices()]
        known = [Device.parse(name) for name in available]
        devices = [Device.parse(name).among(known) for name in device_mesh.devices.flatten()]
        check_devices_distinct(devices)
        if controller() is None:
            processes = list(dict.fromkeys(device.process for device in devices))
            owner = [processes.index(device.process) for device in devices]
            check_inner_axes_local(axis_names, shape, data_axis, owner)
        check_devices_exist(devices, known)

        grid = np.array([device.name for device in devices], dtype=object).reshape(shape)
        outer = [name for name in (PIPE_NAME, data_axis) if name in axis_names]
        grid = np.moveaxis(grid, [axis_names.index(name) for name in outer], range(len(outer)))
        sizes = dict(zip(axis_names, shape, strict=True))
        stages, replicas = sizes.get(PIPE_NAME, 1), sizes.get(data_axis, 1)
        rows = grid.reshape(stages * replicas, -1).tolist()
        inner = tuple((name, size) for name, size in sizes.items() if name not in outer)
        slices = tuple(
            Slice(number % replicas, tuple(row), number // replicas)
            for number, row in enumerate(rows)
        )
        host = _host(devices, known)
        return cls(axis_names, shape, data_axis, inner, slices, stages, host=host)

    def device(self, at: tuple[int, int]) -> str:
        """The TensorFlow device of a (slice, inner) coordinate, or of `HOST`."""
        return self.host if at == HOST else self.slices[at[0]].devices[at[1]]

    @property
    def host_is_apart(self) -> bool:
        """Whether the host is no device of the mesh."""
        return self.host not in self.devices

    @property
    def data_size(self) -> int:
        """Number of replicas, at least 1."""
        return len(self.slices) // self.num_stages

    @property
    def inner_size(self) -> int:
        """Number of devices of one slice, at least 1."""
        return len(self.slices[0].devices)

    def slice_number(self, stage: int, replica: int) -> int:
        """Number of the slice that computes a stage of a replica."""
        return stage * self.data_size + replica

    def group(self, stage: int) -> tuple[int, ...]:
        """Numbers of the slices of a stage, in the order of the data axis."""
        return tuple(self.slice_number(stage, replica) for replica in range(self.data_size))

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device string, slice after slice."""
        return tuple(device for piece in self.slices for device in piece.devices)

    @property
    def shares_memory(self) -> bool:
        """Whether a device reads what another one made where it lies: CPU devices of a process."""
        found = [Device.parse(device) for device in self.devices]
        return {(d.process, d.kind) for d in found} == {(found[0].process, "CPU")}

    @property
    def rows_axis(self) -> str | None:
        """The inner axis that cuts the batch: the data axis, after `with_data_inside`."""
        return next((name for name, _ in self.inner_axes if name in DATA_NAMES), None)

    def places_in(self, other: "Topology") -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per slice and device of it, the (slice, inner) coordinate in another view of the mesh."""
        where = {d: (s, k) for s, one in enumerate(other.slices) for k, d in enumerate(one.devices)}
        return tuple(tuple(where[device] for device in one.devices) for one in self.slices)

    def with_data_inside(self) -> "Topology":
        """The same mesh with its data axis as an inner axis: one slice over all devices of a stage.

        Programs of models that compute over the whole batch see it so: `kdist.config.whole_batch`.
        """
        if self.data_axis is None:
            return self
        axes = zip(self.axis_names, self.shape, strict=True)
        inner = [(name, size) for name, size in axes if name != PIPE_NAME]
        place = [name for name, _ in inner].index(self.data_axis)
        others = [size for name, size in inner if name != self.data_axis]

        def whole(stage: int) -> Slice:
            rows = [self.slices[s].devices for s in self.group(stage)]
            grid = np.array(rows, dtype=object).reshape((self.data_size, *others))
            return Slice(0, tuple(np.moveaxis(grid, 0, place).flatten().tolist()), stage)

        return dataclasses.replace(
            self,
            data_axis=None,
            inner_axes=tuple(inner),
            slices=tuple(map(whole, range(self.num_stages))),
        )

    def with_merged(self, groups: Sequence[tuple[str, ...]]) -> "Topology":
        """The same mesh, the inner axes of each group next to each other and in its order.

        The devices of a slice are then row-major over the groups as well, which makes one axis of
        each; see `kdist.sharding.merged_axes`.
        """
        names = [name for name, _ in self.inner_axes]
        sizes = dict(self.inner_axes)
        together = {axis: group for group in groups for axis in group}
        order = list(dict.fromkeys(a for name in names for a in together.get(name, (name,))))

        def ordered(piece: Slice) -> Slice:
            grid = np.array(piece.devices, dtype=object).reshape([sizes[name] for name in names])
            devices = grid.transpose([names.index(name) for name in order]).flatten().tolist()
            return dataclasses.replace(piece, devices=tuple(devices))

        return dataclasses.replace(
            self,
            inner_axes=tuple((name, sizes[name]) for name in order),
            slices=tuple(map(ordered, self.slices)),
            merged=tuple(groups),
        )

    def canonical(self, name: str) -> str:
        """The mesh's own name of an axis; `data` and `batch` stand for each other.

        Raises:
            ValueError: If the mesh has no such axis.
        """
        if name in self.axis_names:
            return name
        if name in DATA_NAMES:
            for other in DATA_NAMES:
                if other in self.axis_names:
                    return other
        raise ValueError(
            f"The mesh has no axis {name!r}. Use one of its axes, or add that axis to the mesh: "
            f"{self.describe_axes()}. Received: axis={name!r}"
        )

    def axis_size(self, name: str) -> int:
        """The size of an axis.

        Raises:
            ValueError: If the mesh has no such axis.
        """
        return self.shape[self.axis_names.index(self.canonical(name))]

    def describe_axes(self) -> str:
        """The axes and their sizes on one line, such as `data=2, model=4`."""
        return ", ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.shape, strict=True))

    def __str__(self) -> str:
        head = (
            f"mesh {self.describe_axes()}: {len(self.devices)} devices, "
            f"{len(self.slices)} slices of {self.inner_size}"
        )
        lines = [head, "slice  devices"]
        for number, piece in enumerate(self.slices[:_SHOWN_SLICES]):
            names = " ".join(str(Device.parse(name)) for name in piece.devices)
            stage = f"  (stage {piece.stage})" if self.num_stages > 1 else ""
            lines.append(f"{number:>5}  {names}{stage}")
        if len(self.slices) > _SHOWN_SLICES:
            lines.append(f"  ...  {len(self.slices) - _SHOWN_SLICES} more")
        return "\n".join(lines)


def _host(devices: Sequence[Device], available: Sequence[Device]) -> str:
    """The first CPU that is not in the mesh, the first CPU where all are."""
    near = [d for d in available if d.kind == "CPU" and d.process == devices[0].process]
    apart = [d for d in near if d not in set(devices)]
    return next((d.name for d in (*apart, *near)), "")


def _by(axes: dict[str, int]) -> str:
    """Axes as `data=2 x model=4`, for messages."""
    return " x ".join(f"{name}={size}" for name, size in axes.items())
