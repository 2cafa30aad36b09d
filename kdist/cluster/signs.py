"""What tells others of this process's `kdist.init`: the launcher, and children of the process."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from kdist.cluster.place import Place

CALLED = "KDIST_CALLED"
"""Variable with the path of a file that `kdist.init` makes; the launcher sets it."""
JOINED = "KDIST_JOINED"
"""Variable with the id and the place of a process that has joined; its children inherit it."""
_IMPORTED = "__mp_main__"
"""The script while a child of multiprocessing imports it; else another name of `__main__`."""


def called() -> None:
    """Notes that the script calls `kdist.init`."""
    if path := os.environ.get(CALLED):
        with contextlib.suppress(OSError):  # a disk that is full stops nobody
            Path(path).touch()


def joined(place: Place) -> None:
    """Notes that this process has joined, for those that it starts."""
    os.environ[JOINED] = f"{os.getpid()} {_named(place)}"


def check(place: Place) -> None:
    """Refuses a place that this process has from its parent, which has joined there.

    Args:
        place: What the environment says.

    Raises:
        RuntimeError: See above.
    """
    process, _, taken = os.environ.get(JOINED, "").partition(" ")
    if taken != _named(place) or process == str(os.getpid()):
        return
    main = sys.modules["__main__"]
    if sys.modules.get(_IMPORTED, main) is not main:
        advice = (
            "A child of multiprocessing imports the script first: put kdist.init() under "
            '`if __name__ == "__main__":`, with all that is for the parent alone'
        )
    else:
        advice = (
            f"Start it without the variables of {place.source}, as with subprocess.run(..., env="
            "{name: value for name, value in os.environ.items() if not name.startswith('KDIST_')})"
        )
    raise RuntimeError(
        "kdist.init was called in a child of a process that has joined, and found the place of "
        f"that process, which is taken. {advice}. Received: {_named(place)}, from {place.source}; "
        f"the process with id {process} is there"
    )


def _named(place: Place) -> str:
    return f"process {place.process} of {place.count} at {place.coordinator}"
