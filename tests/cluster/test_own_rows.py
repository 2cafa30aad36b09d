"""A `tf.data.Dataset` over processes: each reads the rows of its own replicas."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .processes import program
from .test_joining import result

ROWS = 45
"""No multiple of a batch of 7, nor that of 4 replicas."""
READ_BY_0 = "process 0 reads this tf.data.Dataset"
SLICES = {"data": 2, "model": 2}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Files of unequal length."""
    draw = np.random.default_rng(3)
    lines = [",".join(map(str, row)) for row in draw.normal(size=(ROWS, 16))]
    for number, some in enumerate((lines[:20], lines[20:23], lines[23:])):
        (tmp_path / f"rows-{number}").write_text("\n".join(some) + "\n")
    for number, line in enumerate(lines):
        (tmp_path / f"row-{number}").write_text(line)
    return tmp_path


def equal_to_one_process(given: dict[str, str], devices: int = 4) -> dict[str, Any]:
    """What a run of two processes gives, which is what a run of one gives."""
    with program("reads", 2, TEST_DEVICES=str(devices // 2), **given) as both:
        assert [one.ends() for one in both] == [0, 0], both[0].text[-3000:]
    with program("reads", 1, TEST_DEVICES=str(devices), **given) as alone:
        assert alone[0].ends() == 0, alone[0].text[-3000:]
    found, wanted = result(both[0]), result(alone[0])
    assert found["step"] == wanted["step"]
    for key, values in wanted["history"].items():
        np.testing.assert_allclose(found["history"][key], values, rtol=1e-12, err_msg=key)
    np.testing.assert_allclose(found["scores"], wanted["scores"], rtol=1e-12)
    np.testing.assert_allclose(found["predicted"], wanted["predicted"], rtol=0, atol=1e-12)
    for mine, other in zip(found["weights"], wanted["weights"], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12)
    return found


@pytest.mark.wide
@pytest.mark.parametrize(
    "name",
    [
        *("plain", "seeded", "full", "python", "split", "columns", "weighted", "cached"),
        *("repeated", "a file each", "in a tuple"),
    ],
)
def test_datasets_over_two_processes_equal_one(name: str, files: Path) -> None:
    """Losses, which depend on the order, and sums of labels, on whether each counts once."""
    given = {"TEST_DATA": name, "TEST_FOLDER": str(files)}
    found = equal_to_one_process(given)
    by_0 = [line for line in found["said"] if READ_BY_0 in line]
    assert len(by_0) == (name == "python"), found["said"]
    if by_0:
        assert "EagerPyFunc is stateful" in by_0[0]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("axes", "name"),
    [
        ({"data": 2, "pipe": 2}, "plain"),
        ({"pipe": 2, "data": 2}, "plain"),
        (SLICES, "plain"),
        (SLICES, "sizes"),
        (SLICES, "weighted"),
        pytest.param({"data": 2, "pipe": 2}, "seeded", marks=pytest.mark.long),
        pytest.param(SLICES, "seeded", marks=pytest.mark.long),
        pytest.param({"data": 2, "pipe": 2, "model": 2}, "plain", marks=pytest.mark.long),
        pytest.param({"pipe": 2, "data": 2, "model": 2}, "sizes", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_slices_and_stages_read_their_rows(axes: dict[str, int], name: str, files: Path) -> None:
    """Those of the first stage, for all; of inner axes, the first device of each replica.

    "sizes" has batches of five shapes, more than have graphs of their own.
    """
    given = {"TEST_DATA": name, "TEST_FOLDER": str(files), "TEST_AXES": json.dumps(axes)}
    found = equal_to_one_process(given, math.prod(axes.values()))
    assert not [line for line in found["said"] if READ_BY_0 in line], found["said"]


@pytest.mark.wide
@pytest.mark.parametrize("name", ["unseeded", "loose"])
def test_shuffles_without_a_seed_see_each_example_once(name: str, files: Path) -> None:
    """In every epoch, in one order for all processes; or process 0 reads them."""
    given = {"TEST_DATA": name, "TEST_FOLDER": str(files)}
    with program("reads", 2, **given) as both:
        assert [one.ends() for one in both] == [0, 0], both[0].text[-3000:]
    found = result(both[0])
    np.testing.assert_allclose(found["history"]["seen"], found["history"]["val_seen"], rtol=1e-9)
    by_0 = [line for line in found["said"] if READ_BY_0 in line]
    assert len(by_0) == (name == "loose"), found["said"]


@pytest.mark.wide
@pytest.mark.parametrize("axes", [{"data": 4}, SLICES], ids=str)
def test_a_run_goes_on_within_an_epoch(axes: dict[str, int], files: Path) -> None:
    """The shuffled epoch is read once more, and what was trained on is passed over."""
    given = {"TEST_DATA": "seeded", "TEST_FOLDER": str(files), "TEST_AXES": json.dumps(axes)}
    states = {"TEST_STATES": str(files / "broken")}
    with program("reads", 2, TEST_FAILS="1", **states, **given) as both:
        assert [one.ends() for one in both] == [1, 1]
        assert "of the first start" in both[0].text
    found = []
    for folder in ("broken", "unbroken"):
        with program("reads", 2, TEST_STATES=str(files / folder), **given) as both:
            assert both[0].ends() == 0, both[0].text[-3000:]
        found.append(result(both[0]))
    again, unbroken = found
    assert again["history"] == unbroken["history"]
    assert again["weights"] == unbroken["weights"]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "count", "axes"),
    [
        *(("by file", count, {"data": 4}) for count in (2, 4)),
        ("one file", 2, {"data": 4}),
        *(("by file", 2, axes) for axes in (SLICES, {"data": 2, "pipe": 2})),
    ],
    ids=str,
)
def test_files_of_their_own_are_seen_once(
    name: str, count: int, axes: dict[str, int], files: Path
) -> None:
    """In every epoch, though they are of 20, 3 and 22 rows, and fewer than processes."""
    given = {"TEST_DATA": name, "TEST_FOLDER": str(files), "TEST_DEVICES": str(4 // count)}
    given["TEST_AXES"] = json.dumps(axes)
    with program("reads", count, **given) as members:
        assert [one.ends() for one in members] == [0] * count, members[0].text[-3000:]
    found = result(members[0])
    np.testing.assert_allclose(found["history"]["seen"], found["history"]["val_seen"], rtol=1e-9)
    own = [line for line in found["said"] if "each process reads files of its own" in line]
    assert len(own) == 1, found["said"]
    # Batches of 4 and 3 rows: of 22 or 23 rows each, or of 20 and none.
    assert found["step"] > 3 * (3 if name == "one file" else 5)


@pytest.mark.wide
def test_a_run_goes_on_with_as_many_readers_of_files(files: Path) -> None:
    """By file, the batches of an epoch are others for each number of processes."""
    given = {"TEST_DATA": "by file", "TEST_FOLDER": str(files), "TEST_STATES": str(files / "kept")}
    with program("reads", 2, TEST_FAILS="1", **given) as both:
        assert [one.ends() for one in both] == [1, 1]
    with program("reads", 1, TEST_DEVICES="4", **given) as alone:
        assert alone[0].ends() == 1
    # Where the run was saved after more batches than an epoch of one process has, that is said.
    said = ("1 process to read now, and 2 before", "Received: steps_per_epoch=7; before: ")
    assert any(one in alone[0].text for one in said)
    with program("reads", 2, **given) as both:
        assert both[0].ends() == 0, both[0].text[-3000:]
    seen = result(both[0])["history"]
    np.testing.assert_allclose(seen["seen"], seen["val_seen"], rtol=1e-9)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["plain", "full"])
def test_several_steps_over_inner_axes_are_some_calls(name: str, files: Path) -> None:
    """Each takes a batch where it was read."""
    axes = {"TEST_AXES": json.dumps(SLICES), "TEST_STEPS": "3"}
    equal_to_one_process({"TEST_DATA": name, "TEST_FOLDER": str(files), **axes})


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "together"), [("plain", 1), ("repeated", 1), ("full", 1), ("plain", 2), ("full", 3)]
)
def test_several_steps_are_one_call(name: str, together: int, files: Path) -> None:
    """Of 7 batches, 13, or 4 of an endless dataset: three steps a call, and what is left."""
    given = {"TEST_DATA": name, "TEST_FOLDER": str(files), "TEST_STEPS": "3"}
    found = equal_to_one_process({**given, "TEST_TOGETHER": str(together)})
    # A call takes one batch outside of its graph; an epoch's end is asked for once more.
    validation, last = 3 * (3 + 1), (3 + 1) + (7 + 2)
    calls = {"plain": 3 * (3 + 1), "repeated": 3 * (5 + 1), "full": 3 * 2}[name]
    assert found["takes"] <= calls + validation + last
