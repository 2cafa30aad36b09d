"""The equivalence matrix over several processes: the same rows, with devices of all of them.

Eight processes with a device each: every axis of every mesh crosses processes.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
FEW = (
    "tests/equivalence/test_every_level.py::test_model_at_level_equals_one_device[mlp-level2-data2_model2]",
    "tests/equivalence/test_pipeline.py::test_model_equals_one_device",
    "tests/equivalence/test_split_tables.py::test_levels",
    "tests/equivalence/test_compressed.py::test_equals_numpy",
    "tests/equivalence/test_compressed.py::test_columns_of_replicas_equal_numpy",
    "tests/equivalence/test_texts.py::test_they_equal_one_device[pipe2_data2-level0-sample_weight]",
    "tests/equivalence/test_texts.py::test_in_functions_inside[data2-True]",
)


def rows(processes: int, devices: int, *selection: str, limit: int) -> int:
    """Runs tests in a program of several processes; returns how many passed."""
    environment = {n: v for n, v in os.environ.items() if "XDIST" not in n}
    found = subprocess.run(
        [
            *(sys.executable, "-m", "kdist.launch", "--processes", str(processes)),
            *("--cpu-devices", str(devices), "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *selection,
        ],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit,
    )
    assert found.returncode == 0, found.stdout[-4000:]
    passed = re.search(r"(\d+) passed", found.stdout)
    assert passed is not None
    return int(passed[1])


@pytest.mark.wide
def test_rows_over_eight_processes() -> None:
    """Whatever tier they are in: a row that became slow would leave this test unseen."""
    assert rows(8, 1, "--wide", *FEW, limit=900) >= 19


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "devices", "least"),
    [(8, 1, 100), (4, 2, 100), (2, 4, 100), (2, 2, 80), (4, 1, 80), (2, 1, 40)],
)
def test_all_default_rows(processes: int, devices: int, least: int) -> None:
    """Those of meshes that fit: one of as many devices as there are crosses all processes."""
    assert rows(processes, devices, "tests/equivalence", "--that-fit", limit=3000) >= least


@pytest.mark.long
def test_collectives_over_eight_processes() -> None:
    selection = ("tests/comm/test_collectives.py", "tests/comm/test_gradients.py")
    assert rows(8, 1, *selection, limit=3000) >= 100
