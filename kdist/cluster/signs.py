"""What tells others of this process's `kdist.init`: the launcher, and children of the process.

And what tells this process that its launcher is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from kdist.cluster.place import Place

CALLED = "KDIST_CALLED"
"""Variable with the path of a file that `kdist.init` makes; the launcher sets it."""
LAUNCHER = "KDIST_LAUNCHER"
"""Variable with the id of the launcher, which is the parent of those that it starts."""
JOINED = "KDIST_JOINED"
"""Variable with the id and the place of a process that has joined; its children inherit it."""
_PARENT_DIED = 1
"""Linux's PR_SET_PDEATHSIG."""
_IMPORTED = "__mp_main__"
"""The script while a child of multiprocessing imports it; else another name of `__main__`."""


def called() -> None:
    """Notes that the script calls `kdist.init`."""
    if path := os.environ.get(CALLED):
        with contextlib.suppress(OSError):  # a disk that is full stops nobody
            Path(path).touch()


def follow_launcher() -> None:
    """Has SIGTERM come to this process when its launcher is killed, which then ends nobody."""
    launcher = os.environ.get(LAUNCHER)
    if sys.platform != "linux" or launcher != str(os.getppid()):  # or a child of a process
        return
    with contextlib.suppress(OSError, AttributeError):  # no C library to ask
        ctypes.CDLL(None).prctl(_PARENT_DIED, int(signal.SIGTERM), 0, 0, 0)
    if launcher != str(os.getppid()):  # it was killed meanwhile
        os.kill(os.getpid(), signal.SIGTERM)


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
