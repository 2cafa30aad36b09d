"""Tracing a model draws random numbers on the way; who does so on the side leaves no mark."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

from kdist._compat import keras_seeds

import numpy as np


@contextlib.contextmanager
def chance_kept() -> Iterator[None]:
    """Meanwhile, random numbers may be drawn; then Python, NumPy and Keras go on as if none was."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with keras_seeds.generators_kept():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
