"""Devices: their names in every spelling, and what a list of them must fulfil."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_DEVICE = re.compile(
    r"/?(?:job:(?P<job>[\w-]+)/)?(?:replica:\d+/)?(?:task:(?P<task>\d+)/)?"
    r"(?:process:(?P<process>\d+)/)?(?:device:)?(?P<kind>[A-Za-z_]+):(?P<index>\d+)"
)


_LOCAL = ("localhost", 0)


@dataclass(frozen=True, order=True)
class Device:
    """One device, read from any of the spellings that TensorFlow and Keras use.

    Attributes:
        process: (job, task), `("localhost", 0)` for a name without a process.
        kind: Device type in upper case, such as `"CPU"`.
        index: Number of the device inside its process.
    """

    process: tuple[str, int]
    kind: str
    index: int

    @classmethod
    def parse(cls, name: str) -> "Device":
        """Reads a device name.

        Args:
            name: `"cpu:0"`, `"/device:CPU:0"`, `"/job:worker/task:1/device:CPU:0"` or
                `"process:1/cpu:0"`.

        Returns:
            The device.

        Raises:
            ValueError: If the name has another form.
        """
        match = _DEVICE.fullmatch(str(name))
        if match is None:
            raise ValueError(
                "A device is written 'cpu:0', '/device:CPU:0' or "
                "'/job:worker/task:1/device:CPU:0'. "
                f"Received: device={str(name)!r}"
            )
        if match["process"] is not None:
            process = ("process", int(match["process"]))
        else:
            process = (match["job"] or "localhost", int(match["task"] or 0))
        return cls(process, match["kind"].upper(), int(match["index"]))

    def among(self, known: "Sequence[Device]") -> "Device":
        """The device that this name means among those that exist.

        A name without a process means the first one's, which runs the program.
        """
        if self.process != _LOCAL or not known or any(one.process == _LOCAL for one in known):
            return self
        return Device(known[0].process, self.kind, self.index)

    @property
    def name(self) -> str:
        """The TensorFlow device string, without a process part for the local process."""
        local = f"/device:{self.kind}:{self.index}"
        job, task = self.process
        return local if self.process == _LOCAL else f"/job:{job}/task:{task}{local}"

    def __str__(self) -> str:
        return self.name.removeprefix("/device:")


def check_devices_distinct(devices: Sequence[Device]) -> None:
    """Checks that no device stands twice in a mesh and that all are of one type."""
    repeated = sorted(str(device) for device, count in Counter(devices).items() if count > 1)
    if repeated:
        raise ValueError(
            f"Each device may stand once in a mesh; {', '.join(repeated)} stands more than once. "
            f"Received: devices={[str(device) for device in devices]}"
        )
    kinds = sorted({device.kind for device in devices})
    if len(kinds) > 1:
        raise ValueError(
            f"The devices of a mesh are of one type; this mesh mixes {' and '.join(kinds)}. "
            f"Received: devices={[str(device) for device in devices]}"
        )


def check_devices_exist(devices: Sequence[Device], available: Sequence[Device]) -> None:
    """Checks that a mesh names only devices that exist."""
    kind = devices[0].kind
    known = sorted(device for device in available if device.kind == kind)
    existing = set(known)
    unknown = [str(device) for device in devices if device not in existing]
    if not unknown:
        return
    fix = f"Call kdist.init(cpu_devices={len(devices)}) before anything else, or use fewer devices"
    if len(devices) > len(known):
        rule = f"The mesh has {len(devices)} devices and there are {len(known)} of type {kind}"
    else:
        rule = f"The mesh names devices that do not exist: {', '.join(unknown)}"
        fix = f"Use the names of these: {', '.join(map(str, known))}"
    raise ValueError(f"{rule}. {fix}. Received: devices={[str(device) for device in devices]}")
