"""Hosts with addresses of their own, as network namespaces of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .wires import TUNNEL, Wires

NAMES = Path("/etc/netns")
"""Where `ip netns exec` finds what it puts in place of the files in /etc."""


def run(*command: str) -> None:
    """Runs a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True, text=True)


class Host:
    """A network namespace.

    Attributes:
        address: Its address on the network that all hosts share.
        within: What a command begins with that runs there.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.within = ("ip", "netns", "exec", name)

    def run(self, *command: str) -> None:
        """Runs a command there."""
        run(*self.within, *command)

    def call(self, name: str, address: str) -> None:
        """Has its own file of hosts call an address by a name."""
        file = NAMES / self.name / "hosts"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as names:
            names.write(f"{address} {name}\n")

    def cut(self) -> None:
        """Takes its cable out: nothing arrives any more, and nobody is told."""
        self.run("ip", "link", "set", "wire", "down")


@contextlib.contextmanager
def network(count: int, wires: Wires | None = None) -> Iterator[list[Host]]:
    """Hosts on one network, apart from this machine's.

    Args:
        count: How many.
        wires: What their packets go through; a bridge without delay by default.
    """
    if not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("network namespaces need `ip` and the rights of root")
    if wires is not None and not os.path.exists(TUNNEL):
        pytest.skip(f"no {TUNNEL} on this machine")
    prefix = f"kdist{os.getpid()}"
    middle = Host(f"{prefix}-m", "")
    hosts = [Host(f"{prefix}-{k}", f"10.77.0.{k + 1}") for k in range(count)]
    made: list[Host] = []
    try:
        for one in (middle, *hosts):
            try:
                run("ip", "netns", "add", one.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces on this machine: {error.stderr}")
            made.append(one)
            one.run("ip", "link", "set", "lo", "up")
        if wires is None:
            _bridge(middle, hosts)
        for k, one in enumerate(hosts):
            if wires is not None:
                end = f"kd{os.getpid()}-{k}"
                wires.end(end, one.address)
                run("ip", "link", "set", end, "netns", one.name, "name", "wire")
            one.run("ip", "address", "add", f"{one.address}/24", "dev", "wire")
            one.run("ip", "link", "set", "wire", "up")
        with contextlib.nullcontext() if wires is None else wires.carrying():
            yield hosts
    finally:
        for one in made:
            subprocess.run(["ip", "netns", "del", one.name], capture_output=True)
            shutil.rmtree(NAMES / one.name, ignore_errors=True)


def _bridge(middle: Host, hosts: list[Host]) -> None:
    """Connects hosts with each other."""
    middle.run("ip", "link", "add", "bridge", "type", "bridge")
    middle.run("ip", "link", "set", "bridge", "up")
    for k, one in enumerate(hosts):
        ends = ("wire", "netns", one.name, "type", "veth", "peer", "name", f"port{k}")
        middle.run("ip", "link", "add", *ends)
        middle.run("ip", "link", "set", f"port{k}", "master", "bridge", "up")
