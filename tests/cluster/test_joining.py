"""Processes come together, and end together; every way in which one can fail is named."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from . import member
from .processes import Process, free_port, program

SOON_SECONDS = 30
"""Within which every survivor has ended."""


def result(process: Process) -> dict:
    line = next(line for line in process.lines if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def test_training_over_two_processes_equals_one() -> None:
    """A program of one process takes the same devices from one process."""
    with program("trains", 2) as both, program("trains", 1, TEST_DEVICES="4") as alone:
        assert [one.ends() for one in both] == [0, 0], both[0].text[-2000:]
        assert alone[0].ends() == 0
    found, wanted = result(both[0]), result(alone[0])
    assert wanted["loss"][0] > wanted["loss"][-1]
    for name in ("loss", "predicted"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-12)
    for mine, other in zip(found["weights"], wanted["weights"], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12)
    assert "joined" not in both[1].text, "the script goes on in process 0 only"


def test_each_process_has_the_devices_that_tensorflow_was_told_of() -> None:
    with program("lends", 2) as both:
        assert [one.ends() for one in both] == [0, 0], both[0].text[-2000:]
    names = result(both[0])
    assert [one.split("/")[3] for one in names] == ["task:0"] * 3 + ["task:1"] * 3


def test_kernels_of_all_processes_work_as_the_script_says() -> None:
    with program("follows", 2) as both:
        assert [one.ends() for one in both] == [0, 0], both[0].text[-2000:]
    assert result(both[0]) == [[True] * 4, [False] * 4]


def of_tf_config(jobs: dict[str, int]) -> dict[int, dict[str, str]]:
    """What each process finds in its environment, by the number of processes of each job."""
    cluster = {job: [f"127.0.0.1:{free_port()}" for _ in range(n)] for job, n in jobs.items()}
    tasks = [{"type": job, "index": k} for job, n in jobs.items() for k in range(n)]
    none = {f"KDIST_{name}": "" for name in ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID")}
    return {
        k: {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task}), **none}
        for k, task in enumerate(tasks)
    }


@pytest.mark.wide
@pytest.mark.parametrize("workers", [2, 3])
def test_a_strategy_of_several_workers_is_joined(workers: int) -> None:
    """In the processes in which it has started servers; equal to one device."""
    each = of_tf_config({"worker": workers})
    with program("strategy", workers, each=each, TEST_CODE="7") as all_:
        assert [one.ends() for one in all_] == [7] * workers, all_[0].text[-2000:]
    refused = "REFUSED One process of kdist drives the devices of all workers. Call kdist.init()"
    assert all(refused in one.text for one in all_)
    assert [one.lines.count("equal") for one in all_] == [1, *[0] * (workers - 1)]
    devices = [f"/job:worker/task:{k}/device:CPU:0" for k in range(workers)]
    assert f"devices {devices}" in all_[0].text


@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_what_python_reads_and_assigns_between_steps_is_in_order(beside: bool) -> None:
    each = of_tf_config({"worker": 2}) if beside else {}
    with program("assigns", 2, each=each, TEST_DEVICES="1") as both:
        assert [one.ends() for one in both] == [0, 0], both[0].text[-2000:]
    assert "in order: True True" in both[0].text


@pytest.mark.wide
def test_a_strategy_with_a_chief_is_refused_and_its_place_taken() -> None:
    """What the refusal says to do instead works, with the very same TF_CONFIG."""
    each = of_tf_config({"chief": 1, "worker": 1})
    with program("strategy", 2, each=each) as both:
        assert [one.ends() for one in both] == [3, 3]
    assert all("REFUSED Variables of a strategy keep the names" in one.text for one in both)
    with program("trains", 2, each=each) as both:
        assert [one.ends() for one in both] == [0, 0], both[0].text[-2000:]
    assert result(both[0])["loss"]


@pytest.mark.wide
def test_what_stands_before_init_happens_everywhere_and_the_rest_once(tmp_path: Path) -> None:
    with program("writes", 2, TEST_FOLDER=str(tmp_path)) as both:
        assert [one.ends() for one in both] == [0, 0], both[0].text[-2000:]
    files = {"after-0", "before-0", "before-1"}
    assert {one.name for one in tmp_path.iterdir()} == files
    assert [one.lines.count("before") for one in both] == [1, 1]
    assert [one.lines.count("devices 4") for one in both] == [1, 0]


@pytest.mark.wide
@pytest.mark.parametrize(("scenario", "code"), [("ends", 0), ("ends", 7), ("raises", 1)])
def test_all_end_with_the_exit_code_of_process_0(scenario: str, code: int) -> None:
    with program(scenario, 2, TEST_CODE=str(code)) as both:
        assert [one.ends() for one in both] == [code, code]
    if scenario == "raises":
        assert "process 1 ends with process 0, which failed: KeyError: 'of the user'" in (
            both[1].text
        )


@pytest.mark.wide
@pytest.mark.parametrize(("way", "code"), [("quit", 3), ("hook", 1), ("caught", 0)])
def test_all_end_with_the_exit_code_of_process_0_by_other_ways(way: str, code: int) -> None:
    """The other ways are rows of `test_ending.py`."""
    with program("leaves", 2, TEST_CODE="3", TEST_WAY=way) as both:
        assert [one.ends() for one in both] == [code, code]
    assert ("failed: KeyError: 'of the user'" in both[1].text) == (way == "hook")


@pytest.mark.wide
def test_a_fork_that_ends_does_not_end_the_program(tmp_path: Path) -> None:
    with program("forks", 2, TEST_FOLDER=str(tmp_path)) as both:
        assert both[0].ends() == 5, both[0].text[-2000:]
        assert both[1].ends() == 5
    assert "trained" in both[0].text


@pytest.mark.parametrize(
    ("how", "silence"),
    [
        ("SIGKILL", 4),
        pytest.param("SIGSTOP", 4, marks=pytest.mark.wide),
        # As it is where nobody says another deadline.
        pytest.param("SIGSTOP", 20, marks=pytest.mark.long),
    ],
)
def test_a_process_that_dies_or_freezes(how: str, silence: int) -> None:
    variables = {"TEST_SILENCE": str(silence), "TEST_DEVICES": "1", "TEST_MESH": "3"}
    with program("goes_on", 3, **variables) as all_:
        all_[0].until("training")
        started = time.monotonic()
        os.kill(all_[1].process.pid, getattr(signal, how))
        assert all_[0].ends(SOON_SECONDS) == 1
        assert all_[2].ends(SOON_SECONDS) == 1
        assert time.monotonic() - started < SOON_SECONDS
    cause = {"SIGKILL": "ended", "SIGSTOP": f"gave no sign of life for {silence} s"}[how]
    for survivor in (all_[0], all_[2]):
        assert "Process 1 of 3" in survivor.text and cause in survivor.text


@pytest.mark.wide
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_process_0_dies_or_freezes(how: str) -> None:
    with program("goes_on", 2, TEST_SILENCE="4") as both:
        both[0].until("training")
        os.kill(both[0].process.pid, getattr(signal, how))
        assert both[1].ends(SOON_SECONDS) == 1
    cause = {"SIGKILL": "ended without a word", "SIGSTOP": "is silent"}[how]
    assert f"{cause}; process 1 of 2 ends too" in both[1].text


@pytest.mark.wide
def test_a_program_may_go_on_without_the_others() -> None:
    with program("catches", 2) as both:
        both[0].until("training")
        both[1].process.kill()
        assert both[0].ends(SOON_SECONDS) == 0
    assert "CAUGHT [1]" in both[0].text


@pytest.mark.wide
def test_one_never_starts() -> None:
    with program("ends", 3, only=[0, 2], TEST_START="6", TEST_CODE="0") as two:
        two[1].until("serves")  # from here on it counts: to start takes as long as the machine does
        assert [one.ends(SOON_SECONDS) for one in two] == [1, 1]
    for one in two:
        assert "Process 1 of 3 did not come to 127.0.0.1:" in one.text


@pytest.mark.wide
def test_process_0_never_starts() -> None:
    with program("ends", 2, only=[1], TEST_START="3", TEST_CODE="0") as one:
        one[0].until("serves")
        assert one[0].ends(SOON_SECONDS) == 1
    assert "Process 0 did not answer at 127.0.0.1:" in one[0].text


@pytest.mark.wide
def test_one_is_started_twice() -> None:
    with program("goes_on", 2) as both:
        both[0].until("training")
        port = int(_port(both[0]))
        with program("ends", 2, only=[1], port=port, TEST_CODE="0") as second:
            assert second[0].ends(SOON_SECONDS) == 1
        assert "Process 1 is there already: it was started twice" in second[0].text
        assert both[0].process.poll() is None, "training goes on"


def _port(process: Process) -> str:
    with open(f"/proc/{process.process.pid}/environ", "rb") as file:
        found = dict(one.split(b"=", 1) for one in file.read().split(b"\0") if b"=" in one)
    return found[b"KDIST_COORDINATOR"].rpartition(b":")[2].decode()


@pytest.mark.wide
def test_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with program("ends", 2, only=[0], port=port, TEST_CODE="0") as one:
            assert one[0].ends(SOON_SECONDS) == 1
    assert "which is taken, or of another machine" in one[0].text


@pytest.mark.wide
def test_nobody_takes_the_port_of_process_0s_server_meanwhile() -> None:
    own = f"127.0.0.1:{free_port()}"
    with program("wanted", 2, each={0: {"KDIST_ADDRESS": own}}) as both:
        assert [one.ends() for one in both] == [0, 0], both[0].text[-3000:]
    assert {"held", "trained", f"server at {own}"} <= set(both[0].lines)
    refused = next(line for line in both[0].lines if line.startswith("REFUSED"))
    assert "kdist.init has joined the processes of this program" in refused
    assert refused.endswith("Received: kdist.init joined 2 processes")


@pytest.mark.wide
def test_another_token_is_not_let_in() -> None:
    other = {1: {"KDIST_TOKEN": "of somebody else"}}
    with program("ends", 2, each=other, TEST_START="6", TEST_CODE="0") as both:
        assert both[1].ends(SOON_SECONDS) == 1
        assert both[0].ends(SOON_SECONDS) == 1
    assert "does not know the token of this job (KDIST_TOKEN)" in both[1].text


@pytest.mark.wide
def test_other_devices_are_named() -> None:
    with program("ends", 3, each={2: {"TEST_DEVICES": "3"}}, TEST_CODE="0") as all_:
        for one in all_[1:]:
            one.until("serves")
        assert [one.ends(SOON_SECONDS) for one in all_] == [1, 1, 1]
    for one in all_:
        assert "cpu_devices is 2 in process 0, 3 in process 2" in one.text


@pytest.mark.wide
def test_who_connects_and_says_nothing_holds_up_nobody() -> None:
    port = free_port()
    with program("ends", 2, only=[0], port=port, TEST_CODE="0") as first:
        silent = []
        while not silent:
            try:
                silent.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            except OSError:
                time.sleep(0.1)
        with program("ends", 2, only=[1], port=port, TEST_CODE="0") as second:
            assert [first[0].ends(SOON_SECONDS), second[0].ends(SOON_SECONDS)] == [0, 0]
        silent[0].close()


def test_init_after_tensorflow_has_started() -> None:
    assert tf.zeros([]).shape == ()
    assert member.kdist.init(cpu_devices=8) is None, "alone, the same call again is fine"
    with pytest.raises(ValueError, match="before TensorFlow starts"):
        member.kdist.init(coordinator="127.0.0.1:1", num_processes=2, process_id=0)
    with pytest.raises(ValueError, match="Set KDIST_PROCESS_ID too"):
        member.kdist.init(coordinator="127.0.0.1:1", num_processes=2)
    with pytest.raises(ValueError, match="num_processes is an integer"):
        member.kdist.init(coordinator="127.0.0.1:1", num_processes="2", process_id=0)
    with pytest.raises(ValueError, match="A deadline is a finite number"):
        member.kdist.init(peer_timeout_s=0)
