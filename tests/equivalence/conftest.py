"""Which engine the suite tests.

`KDIST_EQUIVALENCE_ENGINE=reference` runs every row without kdist, the reference against itself:
what fails then is the suite's own fault.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

# KerasHub is an optional extra: without it there is nothing to collect.
collect_ignore = [] if importlib.util.find_spec("keras_hub") else ["test_kerashub.py"]


@pytest.fixture(scope="session")
def engine() -> str:
    """Name of the engine under test."""
    return os.environ.get("KDIST_EQUIVALENCE_ENGINE", "kdist")
