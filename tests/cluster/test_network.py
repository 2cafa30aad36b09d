"""Hosts with addresses of their own: a cut cable, a slow network, closed ports."""

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdist.cluster import reach

import numpy as np
import pytest

from .hosts import Host, network
from .processes import MEMBER, Process, free_port, program
from .test_joining import result
from .wires import Wires

SOON_SECONDS = 30
ASKS_FOR_NO_PASSWORD = "TensorFlow's servers listen on every address of their machines"
ALONE = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
"""The recipe of docs/processes.md for one machine."""
RULES = """
table inet kdist {
  chain input {
    type filter hook input priority 0; policy accept;
    iif lo accept
    ct state established,related accept
    ip saddr { 10.77.0.1, 10.77.0.2 } accept
    tcp dport 1024-65535 drop
  }
}
"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with network(3) as made:
        yield made


def between(hosts: list[Host]) -> dict:
    return {"host": hosts[0].address, "before": {k: one.within for k, one in enumerate(hosts)}}


def test_addresses_of_a_machine(tmp_path: Path) -> None:
    assert reach.outside_addresses(tmp_path) == [reach.UNKNOWN]
    (tmp_path / "fib_trie").write_text(
        "Main:\n  |-- 127.0.0.1\n     /32 host LOCAL\n  |-- 10.0.0.7\n     /32 host LOCAL\n"
        "  |-- 10.0.0.255\n     /32 link BROADCAST\n"
    )
    assert reach.outside_addresses(tmp_path) == ["10.0.0.7"]
    (tmp_path / "if_inet6").write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000002 04 40 00 80     eth0\n"
    )
    assert reach.outside_addresses(tmp_path) == ["10.0.0.7", "fd00::2"]


@pytest.mark.parametrize(
    ("host", "own"),
    [("localhost", True), ("a.localhost", True), ("127.0.1.1", True), ("::1", True)]
    + [("node-a", False), ("10.0.0.7", False), ("fd00::2", False)],
)
def test_names_of_the_loopback(host: str, own: bool) -> None:
    assert reach.is_loopback(host) == own
    assert (reach.without_token(host, "a test") is None) == own


def test_who_is_on_the_machine_of_process_0_is_reached_by_its_name() -> None:
    assert reach.address_for_others("127.0.0.1", "node-a") == "node-a"
    assert reach.address_for_others("10.0.0.2", "node-a") == "10.0.0.2"
    assert reach.address_for_others("127.0.0.1", "localhost") == "127.0.0.1"


def test_a_name_that_is_the_loopback_here_is_listened_at_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = [one for one in reach.outside_addresses() if "." in one and one != reach.UNKNOWN]
    if not own:
        pytest.skip("this machine has no address besides its loopback")
    plain = socket.getaddrinfo

    def as_on_debian(host: str, *given: Any, **named: Any) -> Any:
        return plain("127.0.1.1" if host == "node-a" else host, *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", as_on_debian)
    for host, outside in (("node-a", True), ("127.0.1.1", False), (own[0], True)):
        with reach.listener(host, free_port(), 1) as listening:
            port = listening.getsockname()[1]
            for address in (own[0], "127.0.1.1")[: 2 if host == "node-a" else 1]:
                call = socket.create_connection
                if outside:
                    call((address, port), timeout=2).close()
                else:
                    with pytest.raises(OSError):
                        call((address, port), timeout=2)


@pytest.mark.wide
def test_a_name_as_debian_writes_it(hosts: list[Host]) -> None:
    """Process 1 is beside process 0; process 2, elsewhere, has to reach both."""
    for one, address in zip(hosts[:2], ("127.0.1.1", hosts[0].address), strict=True):
        one.call("localhost", "127.0.0.1")
        one.call("node-a", address)
    before = {0: hosts[0].within, 1: hosts[0].within, 2: hosts[1].within}
    variables = {"TEST_DEVICES": "1", "TEST_MESH": "3", "KDIST_TOKEN": "", "TEST_START": "40"}
    with program("trains", 3, host="node-a", before=before, **variables) as all_:
        assert [one.ends() for one in all_] == [0, 0, 0], all_[0].text[-3000:]
    assert all_[0].text.count("KDIST_TOKEN is not set") == 1
    assert "a coordinator at node-a, from KDIST_*" in all_[0].text


@pytest.mark.wide
def test_a_machine_of_its_own_says_nothing(tmp_path: Path) -> None:
    """The recipe for one machine: a network of its own, without any rights."""
    ready = shutil.which("unshare") and subprocess.run([*ALONE, "true"]).returncode == 0
    if not ready:
        pytest.skip("no network namespaces for users on this machine")
    command = [sys.executable, "-m", "kdist.launch", "--processes", "2", "--logs", str(tmp_path)]
    done = subprocess.run(
        [*ALONE, *command, str(MEMBER), "ends"],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TEST_CODE": "0", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] joined" in done.stdout and ASKS_FOR_NO_PASSWORD not in done.stdout


@pytest.mark.wide
def test_the_cable_of_a_machine_is_cut(hosts: list[Host]) -> None:
    """Connections stay half open: nothing ends them but silence."""
    with program("goes_on", 2, TEST_SILENCE="4", **between(hosts)) as both:
        both[0].until("training")
        assert both[0].text.count(ASKS_FOR_NO_PASSWORD) == 1 and hosts[0].address in both[0].text
        assert ASKS_FOR_NO_PASSWORD not in both[1].text
        assert "KDIST_TOKEN is not set" not in both[0].text
        started = time.monotonic()
        hosts[1].cut()
        assert [one.ends(SOON_SECONDS) for one in both] == [1, 1]
        assert time.monotonic() - started < SOON_SECONDS
    assert "Process 1 of 2 (10.77.0.2:" in both[0].text
    assert "gave no sign of life for 4 s" in both[0].text
    assert "Process 0 (10.77.0.1:" in both[1].text and "is silent" in both[1].text


@pytest.mark.wide
def test_a_slow_network_that_loses_packets_changes_nothing() -> None:
    wires = Wires(delay=0.02, loss=0.01)
    with network(2, wires) as both_hosts, program("trains", 2, **between(both_hosts)) as both:
        assert [one.ends() for one in both] == [0, 0], both[0].text[-3000:]
    assert wires.lost > 3
    with program("trains", 1, TEST_DEVICES="4") as alone:
        assert alone[0].ends() == 0
    found, wanted = result(both[0]), result(alone[0])
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=0, atol=1e-12)
    for mine, other in zip(found["weights"], wanted["weights"], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12)


@pytest.mark.wide
def test_a_network_that_stalls() -> None:
    """For a moment: training goes on. For longer: the others end, which are told so in time."""
    wires = Wires()
    with (
        network(2, wires) as both_hosts,
        program("goes_on", 2, TEST_SILENCE="8", **between(both_hosts)) as both,
    ):
        both[0].until("training")
        wires.stall()
        time.sleep(3)
        wires.stall(False)
        trains_on(both[0])
        started = time.monotonic()
        wires.stall()
        assert [one.ends(SOON_SECONDS) for one in both] == [1, 1]
        assert time.monotonic() - started < SOON_SECONDS
    assert "gave no sign of life for 8 s" in both[0].text and "is silent" in both[1].text


@pytest.mark.wide
def test_closed_ports(hosts: list[Host]) -> None:
    """The recipe for several machines: the job's own pass, strangers do not."""
    if not shutil.which("nft"):
        pytest.skip("no `nft` on this machine")
    with program("goes_on", 2, **between(hosts)) as both:
        both[0].until("training")
        listening = subprocess.run(
            [*hosts[1].within, "ss", "-Hltnp"], capture_output=True, text=True, check=True
        ).stdout
        port = int(re.findall(rf":(\d+) .*pid={both[1].process.pid}\b", listening)[0])
        assert reached(hosts[2], hosts[1].address, port), "as the docs say: by anybody"
        for one in hosts[:2]:
            subprocess.run([*one.within, "nft", "-f", "-"], input=RULES, text=True, check=True)
        assert not reached(hosts[2], hosts[1].address, port)
        assert reached(hosts[0], hosts[1].address, port)
        trains_on(both[0])
    page = (Path(__file__).parents[2] / "docs" / "processes.md").read_text(encoding="utf-8")
    assert RULES.replace("{ 10.77.0.1, 10.77.0.2 }", "10.0.0.0/24").strip() in page


def reached(host: Host, address: str, port: int) -> bool:
    call = f"import socket; socket.create_connection(({address!r}, {port}), timeout=2)"
    command = [*host.within, sys.executable, "-c", call]
    return subprocess.run(command, capture_output=True).returncode == 0


def trains_on(process: Process) -> None:
    """Waits for more epochs."""
    before, end = len(process.lines), time.monotonic() + SOON_SECONDS
    while len(process.lines) == before:
        assert time.monotonic() < end and process.process.poll() is None, process.text[-2000:]
        time.sleep(0.2)
