"""Command-line flags of the examples, kept apart from absl's global ones.

Each call to `parse` gets fresh values, so several examples (and the tests) can run in one process.
"""

import sys
from collections.abc import Sequence
from typing import Any

import kdist

from absl import flags


def parse(values: flags.FlagValues, argv: Sequence[str], about: str) -> flags.FlagValues:
    """Parses `argv` into `values`.

    Args:
        values: flags defined with `flag_values=values`.
        argv: the program's name and its arguments.
        about: text that `--help` prints above the flags.

    Returns:
        `values`, parsed.
    """
    if any(argument in ("--help", "-h", "--helpfull") for argument in argv[1:]):
        print(f"{about}\n\nFlags:{values.get_help()}")
        sys.exit(0)
    try:
        rest = values(list(argv))
    except flags.Error as error:
        sys.exit(f"{error}\n--help lists the flags.")
    if len(rest) > 1:
        sys.exit(f"Only flags are accepted; --help lists them. Received: {rest[1:]}")
    return values


def parse_mesh(text: str) -> dict[str, Any]:
    """Turns `"data=2,model=2"` into `{"data": 2, "model": 2}`.

    Raises:
        ValueError: if a part is not `name=size`.
    """
    axes: dict[str, Any] = {}  # Any: a type checker cannot match keyword names and sizes
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not name or not equals or not size.isdigit():
            raise ValueError(
                "A mesh is written as axis=size, separated by commas, such as data=2,model=2. "
                f"Received: {text!r}"
            )
        axes[name] = int(size)
    return axes


def start(cpu_devices: int = 8) -> None:
    """Gives the examples `cpu_devices` logical CPU devices, so that they run on a laptop."""
    kdist.init(cpu_devices=cpu_devices)
