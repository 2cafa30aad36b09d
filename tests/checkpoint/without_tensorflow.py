"""Writes checkpoints in a process without TensorFlow, until it is killed.

Run by tests: `python without_tensorflow.py CHECKOUT DIRECTORY FIRST KEEP`.
"""

import sys
import types
from pathlib import Path

import numpy as np


def modules(checkout: str):
    """Kdist's modules that write, below packages whose `__init__` is not run."""
    for name in ("kdist", "kdist.checkpoint"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(checkout, *name.split(".")))]
        sys.modules[name] = package
    from kdist.checkpoint import manifest, writer

    return manifest, writer


def arrays_of(step: int):
    """Arrays whose every value is the step; one is larger than what stands inside a node."""
    return [np.full((n, 7), step, np.int64) for n in (1, 40, 3000)]


def snapshot_of(manifest, writer, step: int):
    """The checkpoint of a step."""
    parts, saved = [], []
    for n, values in enumerate(arrays_of(step)):
        part = manifest.SavedPart(f"model/{n}/0", (0, 0), values.shape)
        parts.append((part, values))
        saved.append(manifest.SavedArray(f"v{n}", values.shape, "int64", (part,)))
    made = manifest.Manifest(step, {"model": tuple(saved)})
    return writer.Snapshot(made, parts, {"state": str(step).encode() * 1000})


def main() -> None:
    checkout, directory, first, keep = sys.argv[1:]
    manifest, writer = modules(checkout)
    target = writer.Target(Path(directory), int(keep))
    assert "tensorflow" not in sys.modules
    print("ready", flush=True)
    for step in range(int(first), 10**6):
        writer.write(snapshot_of(manifest, writer, step), target)
        print(step, flush=True)


if __name__ == "__main__":
    main()
