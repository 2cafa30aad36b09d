"""Writes checkpoints in a process whose calls of the C library fail as it is told.

Run by tests: `python failing_writer.py CHECKOUT DIRECTORY`, with `failing_calls.c` before the C
library. Each line it reads is a step, a kind of call, a number, an errno, and whether later calls
fail too; each that it prints is what became of the save, how many calls failed, and how many calls
of each kind there were.
"""

import ctypes
import sys
from pathlib import Path

KINDS = ("write", "fsync", "rename", "open", "truncate", "remove", "mkdir")


def main() -> None:
    import without_tensorflow

    checkout, directory = sys.argv[1:]
    manifest, writer = without_tensorflow.modules(checkout)
    library = ctypes.CDLL(None)
    library.failing_count.restype = ctypes.c_long
    target = writer.Target(Path(directory), 1)
    for line in sys.stdin:
        step, kind, number, error, later = map(int, line.split())
        snapshot = without_tensorflow.snapshot_of(manifest, writer, step)
        library.failing_arm(kind, ctypes.c_long(number), error, later)
        try:
            writer.write(snapshot, target)
            said = "written"
        except (manifest.CheckpointError, OSError):
            said = "refused"
        counts = [library.failing_count(n) for n in range(len(KINDS))]
        failed = library.failing_fired()
        library.failing_arm(-1, ctypes.c_long(0), 0, 0)
        print(said, failed, *counts, flush=True)


if __name__ == "__main__":
    main()
