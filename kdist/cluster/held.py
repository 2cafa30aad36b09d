"""What a process other than 0 keeps, and does, when process 0 asks: arrays, and functions on them.

Process 0 hands tensors over that lie on this process's devices (`kdist.cluster.elsewhere`), and
then has a function run on them, by a message. Only functions that kdist has put into `FUNCTIONS`
run, with what JSON can say.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

THREADS = 8
"""Copy at most; a few take all the bandwidth that there is."""


@dataclasses.dataclass(frozen=True)
class HandedArrays:
    """Arrays that process 0 has handed over.

    Attributes:
        about: What process 0 says of them, in JSON's types.
        arrays: One for each tensor.
    """

    about: Any
    arrays: list[np.ndarray]


FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""What process 0 may have run here: with `held=` and arguments in JSON's types; returns such."""

_held: dict[int, HandedArrays] = {}


def hold(words: bytes, *arrays: np.ndarray) -> bytes:
    """Keeps arrays until a function has run on them; see `kdist.cluster.elsewhere.hand_over`."""
    said = json.loads(words)
    kept = list(arrays)
    if said["copied"]:
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            kept = list(pool.map(np.array, arrays))
    _held[said["number"]] = HandedArrays(said["about"], kept)
    return b""


def run(name: str, number: int | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a function, on what is held by a number; it is let go then.

    Returns:
        `value=`, or `problem=` if it raised.
    """
    try:
        held = None if number is None else _held.pop(number)
        return {"value": FUNCTIONS[name](held=held, **arguments)}
    except Exception as error:  # told to process 0, which raises it
        return {"problem": str(error) or repr(error)}
