"""Tracing a model draws random numbers on the way; who does so on the side leaves no mark."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def chance_kept() -> Iterator[None]:
    """Meanwhile, random numbers may be drawn; then Python's and NumPy's go on as if none was."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
