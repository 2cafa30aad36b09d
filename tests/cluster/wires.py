"""A slow, lossy network between hosts: packets pass through this process, which is in no hurry."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator

TUNNEL = "/dev/net/tun"
_SET_INTERFACE = 0x400454CA
_PACKETS = 0x0001 | 0x1000  # IP packets, without a header of their own
_LARGEST = 65536
_DESTINATION = slice(16, 20)  # of a packet of version 4


class Wires:
    """The network that hosts have in common.

    Args:
        delay: Seconds that a packet takes.
        loss: Which part of the packets is lost.

    Attributes:
        lost: How many packets were lost.
        passed: How many were not.
    """

    def __init__(self, delay: float = 0.0, loss: float = 0.0) -> None:
        self.delay, self.loss = delay, loss
        self.lost = self.passed = 0
        self._draw = random.Random(0)
        self._ends: dict[bytes, int] = {}
        self._stalled = self._ended = False
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def end(self, name: str, address: str) -> None:
        """Makes a network device whose packets are carried.

        Args:
            name: Of the device.
            address: Of the host that it is for.
        """
        file = os.open(TUNNEL, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, _SET_INTERFACE, struct.pack("16sH", name.encode(), _PACKETS))
        self._ends[bytes(map(int, address.split(".")))] = file

    @contextlib.contextmanager
    def carrying(self) -> Iterator[None]:
        """Meanwhile, packets are carried."""
        self._thread.start()
        try:
            yield
        finally:
            self._ended = True
            self._thread.join()
            for file in self._ends.values():
                os.close(file)

    def stall(self, stalled: bool = True) -> None:
        """Loses all packets, until told otherwise."""
        self._stalled = stalled

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        while not self._ended:
            left = waiting[0][0] - time.monotonic() if waiting else 0.1
            ready, _, _ = select.select(list(self._ends.values()), [], [], min(max(left, 0), 0.1))
            for file in ready:
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(file, _LARGEST)
                    target = self._ends.get(packet[_DESTINATION])
                    if target is None or self._stalled or self._draw.random() < self.loss:
                        self.lost += target is not None
                        continue
                    due = time.monotonic() + self.delay
                    heapq.heappush(waiting, (due, next(order), target, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                *_, target, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):  # the host may be gone, or have no room
                    os.write(target, packet)
                    self.passed += 1
