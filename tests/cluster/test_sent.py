"""What goes between processes: executed graphs against the plan."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .hosts import network
from .processes import program
from .test_joining import result

CASES = [({"data": 4}, 0), ({"data": 4}, 1), ({"data": 4}, 3), ({"data": 2, "model": 2}, 1)]
LOSSES = r"PartitionedCall(?!.*(/gradient_tape/|/kdist_segment)).*"
OTHERS = rf"strided_slice.*|{LOSSES}"
"""The batch, losses. A whole gradient leaves as the program made it, a part of one as a slice."""
SCALAR = 8
"""Bytes of a learning rate, a count."""


@pytest.mark.wide
@pytest.mark.parametrize(("axes", "level"), CASES, ids=str)
def test_what_is_sent_equals_the_plan(axes: dict[str, int], level: int) -> None:
    variables = {"TEST_AXES": json.dumps(axes), "TEST_LEVEL": str(level)}
    with program("sends", 2, **variables) as both:
        assert both[0].ends() == 0, both[0].text[-2000:]
    found = result(both[0])
    sent = [
        (name, nbytes)
        for name, nbytes in found["sent"]
        if not re.fullmatch(OTHERS, name) and (nbytes is None or nbytes > SCALAR)
    ]
    assert len(sent) == found["planned"]["tensors"], sent
    known = sum(nbytes or 0 for _, nbytes in sent)
    assert 0 < known <= found["planned"]["nbytes"]
    assert f"between processes: {len(sent)} tensors" in found["printed"]
    assert not any("cross processes" in line for line in found["said"])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("axes", "sent"), [({"data": 4}, [2] * 4), ({"data": 2, "model": 2}, [4] * 4)], ids=str
)
def test_rows_that_workers_read_are_not_sent(
    axes: dict[str, int], sent: list[int], tmp_path: Path
) -> None:
    """Beside gradients and new values nothing travels but scalars; given arrays, rows do."""
    (tmp_path / "rows").write_bytes(bytes(8 * 256 * 4))
    variables = {"TEST_AXES": json.dumps(axes), "TEST_LEVEL": "0"}
    found = []
    for more in ({}, {"TEST_FOLDER": str(tmp_path)}):
        with program("sends", 2, **variables, **more) as both:
            assert both[0].ends() == 0, both[0].text[-2000:]
        found.append(result(both[0]))
    given, read = (
        [
            (name, nbytes)
            for name, nbytes in one["sent"]
            if not re.fullmatch(LOSSES, name) and (nbytes is None or nbytes > SCALAR)
        ]
        for one in found
    )
    assert len(read) == found[1]["planned"]["tensors"], read
    # The rows of the other process's replicas, x and y.
    rows = [nbytes for name, nbytes in given if name.startswith("strided_slice")]
    assert rows == [n * 256 * 4 for n in sent]
    assert not any("process 0 reads" in line for line in found[1]["said"])


@pytest.mark.wide
def test_an_inner_axis_over_processes_is_told() -> None:
    with program("sends", 2, TEST_AXES=json.dumps({"model": 4}), TEST_LEVEL="0") as both:
        assert both[0].ends() == 0, both[0].text[-2000:]
    (line,) = [line for line in result(both[0])["said"] if "cross processes" in line]
    # The second layer's sum: 8 rows of 256 numbers. Nobody needs the gradient of the batch.
    assert "'model'" in line and "(collectives: 1, of 8.0 KB, per slice and step)" in line


ALGORITHMS = ["direct", "ring", "tree", "halving", "hypercube", "torus", "auto"]


@pytest.mark.parametrize(
    ("axes", "levels"),
    [
        pytest.param({"data": 8}, [0, 1], marks=pytest.mark.wide),
        pytest.param({"data": 8}, [2, 3], marks=pytest.mark.long),
        pytest.param({"data": 4, "model": 2}, [0, 1, 2, 3], marks=pytest.mark.long),
        pytest.param({"pipe": 2, "data": 4}, [0, 1, 2, 3], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_sums_go_by_the_algorithm_that_was_asked_for(
    axes: dict[str, int], levels: list[int]
) -> None:
    """Equal to one device, and with the messages of the plan, by each algorithm at each level."""
    variables = {
        "TEST_AXES": json.dumps(axes),
        "TEST_LEVELS": json.dumps(levels),
        "TEST_ALGORITHMS": json.dumps(ALGORITHMS),
    }
    with program("routes", 4, **variables) as all_of_them:
        assert all_of_them[0].ends(400) == 0, all_of_them[0].text[-2000:]
    counts: dict[Any, int] = {}
    other_tensors, other_bytes = set(), set()
    for one in result(all_of_them[0]):
        (level, algorithm), planned = one["case"], one["planned"]
        assert one["off"] < 1e-9, one["case"]
        sent = [nbytes for _, nbytes in one["sent"] if nbytes is None or nbytes > SCALAR]
        other_tensors.add(len(sent) - planned["tensors"])
        if algorithm in ("ring", "halving", "torus"):  # of the others TensorFlow tells few sizes
            other_bytes.add(sum(nbytes or 0 for nbytes in sent) - planned["nbytes"])
        counts[level, algorithm] = planned["tensors"]
        assert algorithm == "auto" or planned["ways"].get(algorithm, 0) > 0, one["case"]
    # The batch, losses, and what goes between stages: as much by each algorithm.
    assert len(other_tensors) == 1 == len(other_bytes)
    # A row that cannot tell is no row: more messages by pieces, as many by trees.
    for level in set(levels) - {3} if "pipe" not in axes else ():
        assert counts[level, "ring"] > counts[level, "tree"] == counts[level, "direct"]


FEW = [["kernels", 1, "direct"], ["kernels", 0, "tree"], ["kernels", 1, "hypercube"]]
TABLE = ["table", 0, "direct"]


@pytest.mark.parametrize(
    ("devices", "cases"),
    [
        pytest.param(1, [*FEW, TABLE], marks=pytest.mark.wide),
        # What several devices of a process read goes there once.
        pytest.param(2, [["kernels", n, "direct"] for n in (0, 3)], marks=pytest.mark.wide),
        pytest.param(
            1,
            [["kernels", n, a] for n in (0, 2, 3) for a in ALGORITHMS],
            marks=pytest.mark.long,
        ),
    ],
    ids=["few", "two devices each", "all"],
)
def test_bytes_on_the_wire_are_those_of_the_plan(devices: int, cases: list[list[Any]]) -> None:
    """Counted by the network cards of four hosts, with what TCP and gRPC add: half a percent."""
    with network(4) as hosts:
        names = " ".join(one.name for one in hosts)
        variables = {"TEST_DEVICES": str(devices), "TEST_HOSTS": names}
        before = {k: one.within for k, one in enumerate(hosts)}
        variables["TEST_CASES"] = json.dumps(cases)
        with program("on_wires", 4, host=hosts[0].address, before=before, **variables) as all_:
            assert all_[0].ends(500) == 0, all_[0].text[-2000:]
    for case, (sent, planned, ways) in zip(cases, result(all_[0]), strict=True):
        what, _, algorithm = case
        assert what == "table" or algorithm == "auto" or ways.get(algorithm, 0) > 0, case
        assert 1 < sent / planned < 1.01, (case, sent, planned)
