"""Who reaches this machine: TensorFlow's servers listen on every address that it has."""

from __future__ import annotations

import ipaddress
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
