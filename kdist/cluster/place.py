"""A process's place among those that run one program."""

from __future__ import annotations

import dataclasses
import hashlib
import re

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^\s:\[\]/]+):(?P<port>\d{1,5})")
_LAST_PORT = 65535


@dataclasses.dataclass(frozen=True)
class Place:
    """Which process this is, of how many, and where they meet.

    Attributes:
        process: Number of this process, from 0.
        count: Number of processes.
        coordinator: `host:port` at which process 0 waits for the others.
        source: Who said so, for messages.
        token: Text that all processes of the job know; who does not is not let in.
        address: `host:port` of this process's TensorFlow server; None: found at start.
    """

    process: int
    count: int
    coordinator: str
    source: str
    token: str = dataclasses.field(default="", repr=False)
    address: str | None = None

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.process < self.count:
            raise ValueError(
                "Processes are numbered from 0 to their number less one. "
                f"Received: process {self.process} of {self.count}, from {self.source}"
            )
        for address in (self.coordinator, self.address):
            if address is not None:
                split_address(address, self.source)


def split_address(address: str, source: str) -> tuple[str, int]:
    """Host and port of an address.

    Raises:
        ValueError: It is not `host:port`, or `[address]:port` for one of version 6.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) <= _LAST_PORT:
        raise ValueError(
            "An address is 'host:port', or '[address]:port' where the address has colons, with a "
            f"port from 1 to {_LAST_PORT}. Received: {address!r}, from {source}"
        )
    return match["host"].strip("[]"), int(match["port"])


def joined_address(host: str, port: int) -> str:
    """The reverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def port_of(job: str) -> int:
    """A port that all processes of a job agree on, where nothing says one: of the job's name.

    Below the range from which systems hand out ports by themselves.
    """
    first, count = 12000, 20000
    return first + int(hashlib.sha256(job.encode()).hexdigest(), 16) % count
