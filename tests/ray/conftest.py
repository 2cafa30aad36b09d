"""A Ray of the tests' own, stopped after them."""

import os
import secrets
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def settings() -> Iterator[None]:
    """What holds of each Ray of the tests."""
    ray = pytest.importorskip("ray", reason="needs Ray Train: pip install 'kdist[ray]'")
    from . import functions

    ray.cloudpickle.register_pickle_by_value(functions)
    with pytest.MonkeyPatch.context() as patch:
        # Else Ray makes a token in the home directory.
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # reports wait for it
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
        for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
            patch.delenv(name)
        try:
            yield
        finally:
            ray.shutdown()
            ray.cloudpickle.unregister_pickle_by_value(functions)


@pytest.fixture(scope="module")
def started(settings: None) -> None:
    """A Ray with four processors, and 100 MB of shared memory."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
