"""Models at each level, prepared once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import keras
import pytest

from .memory_parts import prepared


@pytest.fixture(scope="module")
def at_level() -> Iterator[Callable[[int], keras.Model]]:
    """One model per level, for all tests; the step of each is analysed once."""
    made: dict[int, keras.Model] = {}

    def get(level: int) -> keras.Model:
        if level not in made:
            made[level] = prepared(level)
        return made[level]

    yield get
    made.clear()
