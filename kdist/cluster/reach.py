"""Who reaches this machine, and where: its addresses, and names of them."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

_NETWORK = Path("/proc/net")
UNKNOWN = "addresses that this system does not tell"


def outside_addresses(network: Path = _NETWORK) -> list[str]:
    """This machine's addresses that are not its loopback's, sorted.

    Args:
        network: Where Linux lists them.

    Returns:
        Them; `[UNKNOWN]` on another system.
    """
    try:
        lines = (network / "fib_trie").read_text(encoding="ascii").splitlines()
    except OSError:
        return [UNKNOWN]
    # A line of an address, and under it what is there: `|-- 10.0.0.1`, `/32 host LOCAL`.
    found = {
        line.split("|-- ")[1].strip()
        for line, under in zip(lines, lines[1:], strict=False)
        if "|-- " in line and "/32 host LOCAL" in under
    }
    version_6 = network / "if_inet6"
    if version_6.exists():  # not where version 6 is switched off
        for line in version_6.read_text(encoding="ascii").splitlines():
            found.add(str(ipaddress.IPv6Address(int(line.split()[0], 16))))
    return sorted(one for one in found if not ipaddress.ip_address(one).is_loopback)


def is_loopback(host: str) -> bool:
    """Whether a host as the user wrote it, a name or an address, is this machine to itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "ip6-localhost") or host.endswith(".localhost")


def listener(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens where others look for a host, which is this machine.

    A name that is this machine's loopback to itself alone (Debian writes `127.0.1.1` and its name
    into /etc/hosts) has other addresses for other machines: then at every address.

    Raises:
        OSError: The port is taken, or the address is of another machine.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if is_loopback(str(address[0])) and not is_loopback(host):
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
        return socket.create_server(("", port), backlog=backlog)
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError:
        made.close()
        raise
    made.listen(backlog)
    return made


def address_for_others(here: str, coordinator: str) -> str:
    """By which host others reach this process, which is connected with process 0.

    Args:
        here: This side's address of that connection.
        coordinator: Host of process 0, as the user wrote it.
    """
    # Process 0 is on this machine, whose loopback is no address to others; its name is.
    return coordinator if is_loopback(here) and not is_loopback(coordinator) else here


def without_token(coordinator: str, source: str) -> str | None:
    """What to say where no secret keeps strangers out; None where there are none.

    Args:
        coordinator: Host of process 0.
        source: Who said so.
    """
    if is_loopback(coordinator):
        return None
    return (
        "KDIST_TOKEN is not set: whoever reaches process 0, and knows or guesses what the launcher "
        "calls this job, can join in place of a process. Set it to a secret, the same in all "
        f"processes (docs/processes.md). Received: a coordinator at {coordinator}, from {source}"
    )
