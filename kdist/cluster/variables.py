"""What environment variables say: numbers, parts, and places without an address."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

Environment = Mapping[str, str]
KDIST = ("KDIST_COORDINATOR", "KDIST_NUM_PROCESSES", "KDIST_PROCESS_ID")
INDEX = "JOB_COMPLETION_INDEX"
HERE = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Rank:
    """Which process this is, from a source that does not say where process 0 is.

    Attributes:
        process: Number of this process.
        count: Number of processes; None where that is not said either.
        source: Who said so.
        lacks: What to do where no other source says the rest.
    """

    process: int
    count: int | None
    source: str
    lacks: str


def check_all(source: str, given: Environment, names: Sequence[str]) -> None:
    """Raises `ValueError` unless all variables of a source are there."""
    missing = [name for name in names if not given.get(name)]
    if missing:
        there = {name: given[name] for name in names if given.get(name)}
        raise ValueError(
            f"{source} says a part of this process's place only. Set {', '.join(missing)} too, or "
            f"unset the others. Received: {there}"
        )


def number(given: Environment, name: str) -> int:
    """The integer that a variable says."""
    try:
        return int(given[name])
    except ValueError:
        raise ValueError(f"{name} is an integer. Received: {given[name]!r}") from None


def content(given: Environment, name: str) -> str:
    """The text of the file whose path a variable says."""
    try:
        return Path(given[name]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{name} is the path of a file of text that this process can read. "
            f"Received: {name}={given[name]!r}, {error}"
        ) from error
