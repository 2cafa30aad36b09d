"""`python -m kdist.launch --processes 4 --cpu-devices 2 train.py ARGUMENTS`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kdist.launch.run import Launch

from rich.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a script in several processes of this machine; returns the exit code."""
    given = parsed(arguments)
    logs = given.logs or Path(tempfile.mkdtemp(prefix="kdist-launch-"))
    console = Console(stderr=True)
    launch = Launch(command_of(given), given.processes, given.cpu_devices, logs, console)
    return launch.run(given.max_restarts)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says; what stands behind the script is the script's."""
    parser = argparse.ArgumentParser(
        prog="python -m kdist.launch",
        description="Runs a script that calls kdist.init() in several processes of this machine. "
        "For several machines, see docs/processes.md.",
    )
    parser.add_argument("--processes", type=_at_least(1), required=True, help="how many")
    parser.add_argument("--cpu-devices", type=_at_least(1), help="logical CPU devices of each")
    parser.add_argument(
        "--max-restarts",
        type=_at_least(0),
        default=0,
        help="times that all start again if one fails",
    )
    parser.add_argument("--logs", type=Path, help="directory of their output; default: a new one")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    parser.add_argument("script", help="a Python file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser.parse_args(arguments)


def command_of(given: argparse.Namespace) -> list[str]:
    """What runs in each process."""
    module = ["-m"] if given.module else []
    return [sys.executable, *module, given.script, *given.arguments]


def _at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if (number := int(text)) < least:
            raise argparse.ArgumentTypeError(f"at least {least}. Received: {text}")
        return number

    return count


if __name__ == "__main__":
    sys.exit(main())
