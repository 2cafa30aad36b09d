"""Which engine the suite tests.

`KDIST_EQUIVALENCE_ENGINE=reference` runs every row without kdist, the reference against itself:
what fails then is the suite's own fault.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from . import harness


@pytest.fixture(scope="session")
def engine() -> str:
    """Name of the engine under test."""
    return os.environ.get("KDIST_EQUIVALENCE_ENGINE", "kdist")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that kdist has trained in a test."""
    found: list[Any] = []
    engine = harness.ENGINES["kdist"]

    def noting(model: Any, run: harness.Run) -> Any:
        found.append(engine(model, run))
        return found[-1]

    monkeypatch.setitem(harness.ENGINES, "kdist", noting)  # type: ignore[call-overload]
    return found
