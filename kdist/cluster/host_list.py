"""Lists of host names, as Slurm and MPI write them."""

from __future__ import annotations

import re

_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_RANGES = re.compile(r"\[(?P<ranges>[^\]]*)\]")


def expanded(text: str) -> list[str]:
    """The names in a list such as `"gpu[01-03,7]a,login"`, in its order.

    Args:
        text: As in SLURM_STEP_NODELIST: names apart by commas, ranges of numbers in brackets.

    Raises:
        ValueError: A range is none.
    """
    parts = _PART.findall(text)
    if text.count("[") != text.count("]") or "".join(parts).count("[") != text.count("["):
        raise ValueError(
            "A range in a list of hosts is '[3]' or '[01-12]', with both brackets. "
            f"Received: {text!r}"
        )
    return [name for part in parts for name in _names(part.strip())]


def _names(part: str) -> list[str]:
    """All names of one part; the first bracket changes slowest."""
    match = _RANGES.search(part)
    if match is None:
        return [part]
    before, after = part[: match.start()], part[match.end() :]
    numbers = [n for one in match["ranges"].split(",") for n in _numbers(one.strip(), part)]
    return [before + number + rest for number in numbers for rest in _names(after)]


def _numbers(text: str, part: str) -> list[str]:
    first, dash, last = text.partition("-")
    if not dash and first.isdigit():
        return [first]
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise ValueError(
            f"A range in a list of hosts is '3' or '01-12'. Received: {text!r}, in {part!r}"
        )
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]


def host_file(text: str) -> list[tuple[str, int]]:
    """Hosts and their slots, of a file with lines `host slots=n`; `#` starts a comment.

    Raises:
        ValueError: A line is something else.
    """
    found = []
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        slots = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
        if len(slots) > 1 or not all(n.isdigit() and int(n) > 0 for n in slots):
            raise ValueError(
                f"A line of a host file is 'host slots=n', n at least 1. Received: {line!r}"
            )
        found.append((words[0], int(slots[0]) if slots else 1))
    return found
