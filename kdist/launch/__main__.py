"""`python -m kdist.launch --processes 4 --cpu-devices 2 train.py ARGUMENTS`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kdist.launch.run import Launch

from rich.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a script in several processes of this machine; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kdist.launch",
        description="Runs a script that calls kdist.init() in several processes of this machine. "
        "For several machines, see docs/processes.md.",
    )
    parser.add_argument("--processes", type=_count, required=True, help="how many")
    parser.add_argument("--cpu-devices", type=_count, help="logical CPU devices of each")
    parser.add_argument(
        "--max-restarts", type=int, default=0, help="times that all start again if one fails"
    )
    parser.add_argument("--logs", type=Path, help="directory of their output; default: a new one")
    parser.add_argument("script", help="a Python file, or -m MODULE")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    words = list(sys.argv[1:] if arguments is None else arguments)
    module = "-m" in words and "script" or ""
    if module:
        words.remove("-m")
    given = parser.parse_args(words)
    logs = given.logs or Path(tempfile.mkdtemp(prefix="kdist-launch-"))
    command = [sys.executable, *(["-m"] if module else []), given.script, *given.arguments]
    return Launch(command, given.processes, given.cpu_devices, logs, Console(stderr=True)).run(
        given.max_restarts
    )


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"at least 1. Received: {text}")
    return count


if __name__ == "__main__":
    sys.exit(main())
