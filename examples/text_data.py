"""The text of the GPT example: the source files of Python's own standard library, as bytes.

Every machine that can run the example has this text already, so nothing is downloaded.
"""

import dataclasses
import os
import zlib
from pathlib import Path

import numpy as np

_HELD_OUT_PART = 20  # one file in this many is held out


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Two disjoint texts, cut by file.

    Attributes:
        train: uint8 array, the bytes to train on.
        held_out: uint8 array, the bytes of files that training never sees.
        files: how many files they come from.
    """

    train: np.ndarray
    held_out: np.ndarray
    files: int


def load(megabytes: float) -> Corpus:
    """Reads the standard library's sources, in an order that only depends on their names.

    Args:
        megabytes: where to stop reading, in units of 10**6 bytes.
    """
    root = Path(os.path.dirname(os.__file__))
    # A checksum of the name spreads the packages evenly over the order, and is the same everywhere.
    files = sorted(_sources(root), key=lambda path: zlib.crc32(_name(path, root)))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    size = 0
    for path in files:
        text = path.read_bytes()
        held_out = zlib.crc32(b"split " + _name(path, root)) % _HELD_OUT_PART == 0
        parts[held_out].append(text)
        size += len(text)
        if size >= megabytes * 1e6 and all(parts.values()):
            break
    train, held_out_text = (
        np.frombuffer(b"".join(parts[part]), np.uint8) for part in (False, True)
    )
    return Corpus(train, held_out_text, sum(len(texts) for texts in parts.values()))


def windows(
    text: np.ndarray, count: int, length: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts random windows out of a text, with the byte after each position as its target.

    Args:
        text: uint8 array of at least `length + 1` bytes.
        count: number of windows.
        length: bytes in a window.
        rng: where the positions come from.

    Returns:
        Inputs and targets, int32 arrays of shape `(count, length)`.
    """
    if len(text) <= length:
        raise ValueError(
            f"A window of {length} bytes needs a text of at least {length + 1}: shorten the window "
            f"or read more text. Received: text of {len(text)} bytes"
        )
    starts = rng.integers(0, len(text) - length, count)
    cut = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return cut[:, :-1], cut[:, 1:]


def _sources(root: Path) -> list[Path]:
    # Packages of sources that people wrote: no test data, nothing installed later, no tables.
    skipped = {
        "test",
        "tests",
        "idlelib",
        "site-packages",
        "dist-packages",
        "encodings",
        "__pycache__",
    }
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return found


def _name(path: Path, root: Path) -> bytes:
    return path.relative_to(root).as_posix().encode()
