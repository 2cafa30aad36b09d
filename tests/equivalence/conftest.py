"""Which engine the suite tests.

`KDIST_EQUIVALENCE_ENGINE=reference` runs every row without kdist, the reference against itself:
what fails then is the suite's own fault.
"""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def engine() -> str:
    """Name of the engine under test."""
    return os.environ.get("KDIST_EQUIVALENCE_ENGINE", "kdist")
