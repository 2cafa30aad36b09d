"""What every test gets: eight logical CPU devices, a seed, and a clean Keras.

Eight CPU devices come from one processor, so the suite needs no accelerator. With several
processes (pytest-xdist) each keeps to one thread per operation.
"""

import gc
import math
import os
import random
import time
import zlib
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

import kdist

import keras
import pytest
import tensorflow as tf

from . import kept_memory, one_card
from .part import Part
from .tiers import Tiers
from .within import REASON, default_first, summary

one_card.cut_as_asked()
# Across processes, `python -m kdist.launch` says how many devices each has.
kdist.init(cpu_devices=None if "KDIST_CPU_DEVICES" in os.environ else 8)

TIERS = Tiers()
STARTED = time.monotonic()
TESTS_RUN = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wide", action="store_true", help="run the tests marked `wide` too")
    parser.addoption("--long", action="store_true", help="run those marked `wide` or `long` too")
    parser.addoption(
        "--that-fit",
        action="store_true",
        help="skip tests on meshes of more devices than there are",
    )
    parser.addoption(
        "--part",
        type=Part.parse,
        metavar="i/n",
        help="run the i-th of n parts of the selected tests; the same tests on every run",
    )
    parser.addoption(
        "--within",
        type=float,
        metavar="MINUTES",
        help="after so many minutes leave out tests marked `wide` or `long`, and say which",
    )
    parser.addoption(
        "--begin",
        type=float,
        metavar="SHARE",
        help="with --within, the share of those tests that comes last, 0 to 1; drawn unless given",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU, and is skipped without one")
    if config.option.durations is None:  # what is slow is seen before it adds up
        config.option.durations, config.option.durations_min = 25, 2.0
    if config.option.begin is None:
        drawn = round(random.SystemRandom().random(), 2)
        config.option.begin = getattr(config, "workerinput", {}).get("begin", drawn)
    # The default expression is in pyproject.toml; an expression of the user's own stays.
    if config.option.markexpr == "not long and not wide":
        if config.getoption("--long"):
            config.option.markexpr = ""
        elif config.getoption("--wide"):
            config.option.markexpr = "not long"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker of pytest-xdist what is drawn, so that all collect in one order."""
    node.workerinput["begin"] = node.config.getoption("--begin")


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("long") is None and TIERS.leaves_out(item.nodeid):
        item.add_marker(pytest.mark.wide)


@pytest.hookimpl(trylast=True)  # of what is left when marks and names have been looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part: Part | None = config.getoption("--part")
    if part is not None:
        config.hook.pytest_deselected(items=part.rest(items))
        items[:] = part.of(items)
    if config.getoption("--within") is not None:
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        items[:] = default_first(items, beyond_default, workers, config.getoption("--begin"))


def beyond_default(item: pytest.Item) -> bool:
    """Whether the default suite leaves it out."""
    return any(item.get_closest_marker(tier) is not None for tier in ("wide", "long"))


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes: float | None = item.config.getoption("--within")
    if minutes is not None and beyond_default(item) and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(REASON)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if (minutes := config.getoption("--within")) is not None:
        skipped = terminalreporter.stats.get("skipped", [])
        left_out = [report.nodeid for report in skipped if REASON in str(report.longrepr)]
        terminalreporter.write_line(summary(left_out, minutes, config.getoption("--begin")))


@pytest.fixture(scope="session", autouse=True)
def light_collections() -> Iterator[None]:
    """Takes the objects of TensorFlow's import out of the garbage collections after each test."""
    collect()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def kept_no_longer() -> Iterator[None]:
    """Frees the models of a file, which TensorFlow would keep."""
    before = kept_memory.registered()
    yield
    kept_memory.forget(kept_memory.registered() - before)
    gc.unfreeze()
    collect()
    kept_memory.give_back()


def collect() -> None:
    """Collects garbage, and takes what is left out of later collections.

    A collection looks at all that lives: with the objects of some models, which live until their
    file ends, it would take a second, longer than most tests take themselves.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_keras(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seeds from the test's name, so that order and selection change nothing; restores globals."""
    keras.utils.set_random_seed(zlib.crc32(request.node.nodeid.encode()) % 2**31)
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
    keras.utils.clear_session(free_memory=False)
    # Collecting takes as long as a small test; models of a few tests fit into memory together.
    request.config.stash[TESTS_RUN] = request.config.stash.get(TESTS_RUN, 0) + 1
    if request.config.stash[TESTS_RUN] % 10 == 0:
        collect()


@pytest.fixture(autouse=True)
def meshes_that_fit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--that-fit`, the first mesh of more devices than there are skips its test."""
    if not request.config.getoption("--that-fit"):
        return
    found, mesh = len(tf.config.list_logical_devices("CPU")), kdist.mesh

    def fitting(**axes: Any) -> Any:
        sizes = [size for axis, size in axes.items() if axis != "devices"]
        if math.prod(sizes) > found:
            pytest.skip(f"a mesh of {sizes}, and {found} devices")
        return mesh(**axes)

    monkeypatch.setattr(kdist, "mesh", fitting)


@pytest.fixture
def float64() -> Iterator[None]:
    """Makes float64 the dtype of new layers and losses, for comparisons down to rounding."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield


@pytest.fixture
def float64_factors(float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes factors of LoRA float64 too, which Keras keeps in float32 whatever the policy."""
    add: Any = keras.Layer.add_weight

    def exact(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("name")).startswith("lora"):
            kwargs["dtype"] = "float64"
        return add(layer, *args, **kwargs)

    monkeypatch.setattr(keras.Layer, "add_weight", exact)
