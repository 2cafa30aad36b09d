"""The schedules by name and by file, as data."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import kdist.pipeline
from kdist.pipeline import (
    NAMES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    get_schedule,
    live_formula,
    read_csv,
    validate,
    write_csv,
)

import numpy as np
import pytest
from hypothesis import given, settings

from .schedules import SHAPES, build, named, schedule_of

_PURE = """
    chart chart_png communication csv_file dependencies feasible formulas generators graph
    instructions partition schedule simulate timeline validate
"""
PURE = [Path(kdist.pipeline.__file__).parent / f"{name}.py" for name in _PURE.split()]


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.stem)
def test_no_framework_is_imported(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert not names & {"tensorflow", "keras"}


def test_1f1b_of_a_textbook():
    assert build("1f1b", 3, 4) == schedule_of(
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    )


def test_interleaved_of_the_paper():
    """Groups of p micro-batches go through chunk 0, then chunk 1; warm-up 2(p-s-1) + (v-1)p."""
    assert build("interleaved", 2, 4, 2) == schedule_of(
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    )


def test_zero_bubble_of_the_paper():
    """ZB-H1: stage s puts weight gradients off by s."""
    assert build("zero_bubble", 2, 3) == schedule_of(
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_live_activations_are_the_formula(shape):
    assert build(*shape).peak_live() == live_formula(*shape)


def test_live_activations_of_1f1b_and_gpipe():
    assert build("1f1b", 4, 8).peak_live() == (4, 3, 2, 1)
    assert build("1f1b", 4, 2).peak_live() == (2, 2, 2, 1)
    assert build("gpipe", 4, 8).peak_live() == (8, 8, 8, 8)
    assert build("zero_bubble", 4, 8).peak_live() == (4, 4, 4, 4)


def test_what_is_kept_of_other_micro_batches():
    """Either their backward pass has not begun, or their weight gradient is put off."""

    def alone(*pairs):
        return tuple({(one,)} for one in pairs)

    zero_bubble = alone((3, 0), (2, 1), (1, 2), (0, 3))
    assert build("zero_bubble", 4, 8).kept_beside() == zero_bubble
    assert build("1f1b", 4, 8).kept_beside() == alone((3, 0), (2, 0), (1, 0), (0, 0))
    assert build("gpipe", 2, 3).kept_beside() == alone((2, 0), (2, 0))


def test_what_is_kept_of_other_chunks():
    """Per virtual stage what its stage keeps of each chunk, the one that computes left out."""
    found = build("interleaved", 2, 4, 2).kept_beside()
    # Before 0F3, (0F1, 0F2 and 2F0 to) 2B0 is done; before 0F2, 0F0 to 2F1 are.
    assert found[0] == {((3, 0), (1, 0)), ((2, 0), (2, 0))}
    # Before 2F2, 0F0 to 0F3 are there, and no other one of its own; before 2B1, one less of 0.
    assert found[2] == {((4, 0), (0, 0)), ((3, 0), (1, 0))}
    # Stage 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 ...
    assert found[1] == found[3] == {((2, 0), (0, 0))}


def test_what_is_kept_at_a_time():
    """Nothing where each backward pass follows its forward pass."""
    assert build("1f1b", 4, 8).held() == (4, 3, 2, 0)
    assert build("zero_bubble", 4, 8).held() == (4, 4, 4, 4)
    assert build("interleaved", 2, 4, 2).held() == (4, 3, 2, 0)


def test_properties():
    schedule = build("interleaved", 2, 4, 3)
    shape = schedule.num_stages, schedule.micro_batches, schedule.chunks, schedule.virtual_stages
    assert shape == (2, 4, 3, 6)
    assert not schedule.splits_backward
    assert build("zero_bubble", 2, 2).splits_backward
    assert {one.virtual_stage(2) for one in schedule.stages[1]} == {1, 3, 5}


def test_frozen_hashable_printable():
    schedule = build("1f1b", 2, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.stages[0][0].stage = 3
    assert len({schedule, dataclasses.replace(schedule, name="again")}) == 1
    assert str(schedule) == (
        "Schedule 1f1b: 2 stages, 2 micro-batches\n"
        "  stage 0: 0F0 0F1 0B0 0B1\n"
        "  stage 1: 1F0 1B0 1F1 1B1"
    )
    assert str(Forward(1, 2, 1)) == "forward of micro-batch 2 on stage 1, chunk 1"
    assert str(BackwardInput(1, 2)) == "backward input of micro-batch 2 on stage 1"
    assert [kind(1, 2).cell(4) for kind in (Forward, Backward, BackwardInput, BackwardWeight)] == [
        "1F2", "1B2", "1I2", "1W2"
    ]  # fmt: skip


# -- names, objects, files -----------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(named())
def test_a_file_gives_back_the_schedule(tmp_path_factory, schedule):
    path = tmp_path_factory.mktemp("csv") / f"{schedule.name}.csv"
    write_csv(schedule, path)
    assert read_csv(path) == schedule
    assert read_csv(path).name == schedule.name


def test_a_file_written_by_hand(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("# two stages\n0F0, 0F1 ,,0B0,\t,0B1\n\n,1F0,1B0,1F1,1B1,,,\r\n")
    assert read_csv(path) == schedule_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    wanted = build("1f1b", 2, 2)
    assert get_schedule(path, stages=2, micro_batches=2) == wanted
    assert get_schedule(str(path), stages=2, micro_batches=2, chunks=1) == wanted
    assert get_schedule(wanted, stages=2, micro_batches=2) is wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0X0\n", r"F \(forward\).*Received: '0X0' in row 0, cell 2"),
        ("0F0,F1\n", r"Received: 'F1'"),
        ("0F0,0B0\n0F1,0B1\n", r"2 rows.*row 1 are 1, 3, 5.*Move the cell to row 0.*'0F1'"),
        ("# nothing\n", r"one row of cells.*Received: path="),
        ("", r"one row of cells"),
    ],
)
def test_wrong_files(tmp_path, text, words):
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"(?s){words}"):
        read_csv(path)


def test_a_given_schedule_is_validated(tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_text("0B0,0F0\n")
    with pytest.raises(ValueError, match=r"before the forward 0F0.*Received: schedule='wrong'"):
        get_schedule(path, stages=1, micro_batches=1)
    for wrong in ({"stages": 3}, {"micro_batches": 3}, {"chunks": 2}):
        numbers = {"stages": 2, "micro_batches": 2} | wrong
        (name,) = wrong
        with pytest.raises(ValueError, match=rf"{name}=\d.*Received: {name}={wrong[name]}"):
            get_schedule(build("1f1b", 2, 2), **numbers)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "2f2b"}, r"'gpipe', '1f1b', 'interleaved', 'zero_bubble'.*'2f2b'"),
        ({"schedule": 3}, r"Received: schedule=3"),
        ({"stages": 0}, r"from 1 on.*Received: stages=0"),
        ({"micro_batches": 2.0}, r"Received: micro_batches=2.0"),
        ({"chunks": True}, r"Received: chunks=True"),
        ({"chunks": 2}, r"schedule='interleaved'.*Received: schedule='1f1b', chunks=2"),
        ({"schedule": "interleaved", "chunks": 1}, r"at least 2.*'1f1b'.*chunks=1"),
        ({"schedule": "zero_bubble", "chunks": 2}, r"one chunk.*chunks=2"),
    ],
)
def test_wrong_settings(options, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        get_schedule(**({"schedule": "1f1b", "stages": 2, "micro_batches": 4} | options))


def test_chunks_of_interleaved_default_to_two():
    assert get_schedule("interleaved", stages=2, micro_batches=4).chunks == 2
    assert [n for n in NAMES if get_schedule(n, stages=2, micro_batches=2)] == list(NAMES)


def test_integers_of_numpy_are_integers():
    two, four = np.int64(2), np.array(4)
    given = get_schedule("interleaved", stages=two, micro_batches=four, chunks=np.uint8(2))
    assert given == get_schedule("interleaved", stages=2, micro_batches=4, chunks=2)
    assert type(next(iter(given)).micro_batch) is int
    one = Forward(np.int32(1), two, np.int64(0))
    assert one == Forward(1, 2) and type(one.stage) is int and repr(one) == repr(Forward(1, 2))
    assert get_schedule(given, stages=two, micro_batches=four) == given


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Forward(np.True_, 0), r"integer from 0 on. Received: stage="),
        (lambda: Schedule(stages=()), r"at least one stage.*Received: stages=\(\)"),
        (
            lambda: Schedule(stages=[[Forward(1, 0)]]),
            r"index 0.*stage 0.*Received: Forward\(stage=1",
        ),
        (lambda: Schedule(stages=[["0F0"]]), r"Received: '0F0' in the list of stage 0"),
        (lambda: Forward(-1, 0), r"Received: stage=-1"),
        (lambda: Backward(0, 0.5), r"Received: micro_batch=0.5"),
    ],
)
def test_wrong_data(make, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        make()


@settings(max_examples=40, deadline=None)
@given(named())
def test_every_named_schedule_is_valid(schedule):
    live = live_formula(schedule.name, schedule.num_stages, schedule.micro_batches, schedule.chunks)
    validate(schedule, max_live=live, in_order=True)


def test_what_a_schedule_says_of_its_order() -> None:
    first = {name: get_schedule(name, stages=2, micro_batches=4).forwards_first for name in NAMES}
    assert first == {"gpipe": True, "1f1b": False, "interleaved": False, "zero_bubble": False}
    assert get_schedule("1f1b", stages=2, micro_batches=1).forwards_first
