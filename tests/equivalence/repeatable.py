"""How hypothesis chooses random models: building and running one takes longer than it expects."""

from __future__ import annotations

import hypothesis


def repeatable(examples: int) -> hypothesis.settings:
    """A decorator for tests of random models: the same examples on every run, however slow.

    Args:
        examples: How many are tried.
    """
    return hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
