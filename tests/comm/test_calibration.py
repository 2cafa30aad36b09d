"""Fitting the cost model, the benchmark's numbers, TensorFlow's internals, connections."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import kdist
from kdist import comm
from kdist._compat import collective_runtime
from kdist.comm import bench
from kdist.comm.algorithms import ALGORITHMS, OPERATIONS
from kdist.comm.calibration import error, fit
from kdist.comm.measure import Measurement, bus_factor, measure

import pytest
import tensorflow as tf
from absl import flags as absl_flags
from absl.testing import flagsaver


def timed(algorithm: str, nbytes: int, seconds: float) -> Measurement:
    return Measurement(
        operation="all_reduce",
        algorithm=algorithm,
        nbytes=nbytes,
        devices=4,
        seconds=seconds,
        wrong=0,
    )


def of_link(link: comm.LinkCost) -> list[Measurement]:
    return [
        timed(name, size, comm.predict("all_reduce", name, size, 4, link))
        for name in ALGORITHMS
        for size in (1 << 10, 1 << 20)
    ]


def test_the_fit_finds_the_constants():
    link = fit(of_link(comm.LinkCost(a=3e-5, b=2e-10)))
    assert (link.a, link.b) == (pytest.approx(3e-5), pytest.approx(2e-10))
    assert link.error == pytest.approx(0, abs=1e-9)


def test_no_constant_is_negative():
    faster_when_larger = [timed("ring", 1 << 10, 1e-3), timed("ring", 1 << 20, 1e-4)]
    link = fit(faster_when_larger)
    assert link.b == 0
    assert link.a > 0
    assert link.error > 0


def test_the_error_is_relative_to_what_was_measured():
    link = comm.LinkCost(a=1.0, b=0.0)
    assert error(timed("hypercube", 8, 4.0), link) == pytest.approx(-0.5)


def test_calibration_of_this_machine():
    link = comm.calibrate(kdist.mesh(data=2), sizes=(1 << 10, 1 << 16), iterations=1)
    assert isinstance(link, comm.HostCost)
    assert link.call + link.a + link.operation > 0
    assert link.error is not None and "median error" in str(link)
    assert kdist.FusionConfig(link=link).link is link
    with pytest.raises(ValueError, match="two sizes.*between two devices.*Received: devices=1"):
        comm.calibrate(kdist.mesh(data=1))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_value_is_wrong(operation):
    group = comm.Group.of(kdist.mesh(data=3), "data")
    found = measure(operation, "ring", 100, group, "float16", iterations=1)
    assert (found.wrong, found.nbytes, found.devices) == (0, 102, 3)


def test_wrong_values_are_counted(monkeypatch):
    from kdist.comm import collectives

    monkeypatch.setattr(collectives, "all_reduce", lambda values, *_, **__: values)
    group = comm.Group.of(kdist.mesh(data=2), "data")
    assert measure("all_reduce", "ring", 24, group, iterations=1).wrong == 12


def test_swapped_and_missing_parts_are_wrong(monkeypatch):
    from kdist.comm import collectives

    right = collectives.all_gather

    def swapped(values, *args, **options):
        found = right(values, *args, **options)
        first, *rest, last = tf.split(found[1], 4)
        return [found[0], tf.concat([last, *rest, first], 0), tf.zeros([0]), found[3]]

    monkeypatch.setattr(collectives, "all_gather", swapped)
    group = comm.Group.of(kdist.mesh(data=4), "data")
    wrong = measure("all_gather", "ring", 1600, group, iterations=1).wrong
    assert 400 + 100 < wrong <= 400 + 200


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--operations=barrier"], "Any of broadcast"),
        (["--algorithms=nonsense"], "Any of direct"),
        (["--algorithms=hypercube", "--devices=6"], "power of two"),
        (["--algorithms=runtime"], "across processes"),
        (["--devices=1"], "lower bound|integer"),
        (["--index=1"], "set by the first process"),
        (["--operations=all_reduce", "gather"], "flags alone"),
        (["--devices=6", "--processes=4"], "as many devices"),
        (["--min_bytes=8", "--max_bytes=4"], "largest buffer"),
    ],
)
def test_the_benchmark_refuses_before_it_starts(flags, told):
    with flagsaver.flagsaver():
        try:
            left = absl_flags.FLAGS(["bench", *flags])
            with pytest.raises(ValueError, match=told):
                bench.check_flags(left)
        except absl_flags.Error as error:
            assert re.search(told, str(error))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"axis": "data"}, "give it too"),
        ({"sizes": (float("nan"), 128)}, "sizes=nan"),
        ({"sizes": (1, 2)}, "apart by more than 4 bytes"),
        ({"iterations": 1.5}, "iterations=1.5"),
    ],
)
def test_calibration_refuses(arguments, told):
    with pytest.raises(ValueError, match=told):
        comm.calibrate(**arguments)


def test_calibration_over_several_axes_needs_one():
    with pytest.raises(ValueError, match="name of an axis"):
        comm.calibrate(kdist.mesh(data=2, model=2))


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert {name: bus_factor(name, 4) for name in OPERATIONS} == {
        "broadcast": 1,
        "reduce": 1,
        "all_reduce": 1.5,
        "gather": None,
        "all_gather": 0.75,
        "scatter": None,
        "reduce_scatter": 0.75,
        "all_to_all": 0.75,
        "scan": None,
    }
    found = timed("ring", 1000, 0.5)
    assert (found.algorithm_bandwidth, found.bus_bandwidth) == (2000, 3000)


def test_sizes_of_the_table():
    assert bench.sizes(8, 100, 4) == [8, 32, 100]
    assert bench.sizes(8, 8, 4) == [8]
    with pytest.raises(ValueError, match="Received: min_bytes=8, max_bytes=4"):
        bench.sizes(8, 4, 2)


def run_bench(*flags: str) -> str:
    command = [sys.executable, "-m", "kdist.comm.bench", "--iterations=1", "--max_bytes=1024"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_table():
    text = run_bench("--devices=2", "--operations=gather", "--algorithms=tree")
    for word in ("gather", "busbw GB/s", "wrong", "numpy copy", "median error", " - "):
        assert word in text


@pytest.mark.long
def test_the_table_as_json_across_processes():
    text = run_bench("--devices=2", "--processes=2", "--operations=all_reduce", "--format=json")
    document = json.loads(text)
    assert document["devices"] == 2
    assert [row["wrong"] for row in document["rows"]] == [0, 0, None]


def test_record_gradient_and_unrecorded():
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with collective_runtime.unrecorded():
            y = x * x
        collective_runtime.record_gradient("square", [y], [x], lambda grad: [7.0 * grad])
        z = 2.0 * y
    assert float(tape.gradient(z, x)) == 14.0


def test_runtime_started():
    tf.constant(1)
    assert collective_runtime.runtime_started()
    with pytest.raises(ValueError, match="once, before TensorFlow starts"):
        comm.connect(["127.0.0.1:1"], 0)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((["a:1", "a:1"], 0), "distinct"),
        ((["a"], 0), "host:port"),
        (("a:1", 0), "host:port"),
        ((["a:1"], 1), "from 0 to 0.*index=1"),
        ((["a:1"], 0, -1), "timeout_seconds=-1"),
    ],
)
def test_connections_are_checked(arguments, rule):
    with pytest.raises(ValueError, match=rule):
        comm.connect(*arguments)
