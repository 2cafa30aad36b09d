"""Time, bubble and memory of schedules against the formulas, exactly."""

from __future__ import annotations

from fractions import Fraction

from kdist.pipeline import Costs, bubble_formula, simulate
from kdist.pipeline.dependencies import Dependencies
from kdist.pipeline.formulas import formula_of

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .schedules import SHAPES, build, fractions, named, schedule_of

positive = fractions(1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bubble_is_the_formula(shape):
    formula = bubble_formula(*shape)
    if formula is None:
        name, p, m, _ = shape
        assert name == "zero_bubble" and m < 2 * p - 1
    else:
        assert simulate(build(*shape)).bubble == formula


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 16), positive, positive
)
def test_gpipe_and_1f1b_for_any_equal_costs(name, p, m, forward, backward):
    result = simulate(build(name, p, m), Costs(forward=forward, backward=backward))
    assert result.bubble == Fraction(p - 1, m + p - 1)
    assert result.total == (m + p - 1) * (forward + backward)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(0, 10), st.integers(2, 4), positive, positive)
def test_interleaved_for_any_equal_costs(p, more, v, forward, backward):
    m = p + more
    result = simulate(build("interleaved", p, m, v), Costs(forward=forward, backward=backward))
    assert result.bubble == Fraction(p - 1, v * m + p - 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(1, 20), positive)
def test_zero_bubble_is_below_1f1b_at_equal_memory(p, m, cost):
    costs = Costs(forward=cost, backward_input=cost, backward_weight=cost)
    zero, plain = (simulate(build(name, p, m), costs) for name in ("zero_bubble", "1f1b"))
    assert zero.bubble < plain.bubble
    assert zero.total < plain.total
    assert max(zero.peak_live) == max(plain.peak_live)
    assert sum(zero.timeline.busy()) == sum(plain.timeline.busy())


def test_1f1b_is_gpipe_with_less_memory():
    one, other = simulate(build("1f1b", 4, 8)), simulate(build("gpipe", 4, 8))
    assert one.total == other.total == 33
    assert one.peak_live == (4, 3, 2, 1)
    assert other.peak_live == (8,) * 4
    assert one.peak_activations == (4, 3, 2, 1)


@settings(max_examples=60, deadline=None)
@given(named(), st.data())
def test_any_costs(schedule, data):
    """Nothing starts too early, nothing overlaps, nothing waits without a reason."""
    v = schedule.virtual_stages
    numbers = {
        name: data.draw(st.lists(fractions(), min_size=n, max_size=n))
        for name, n in (
            ("forward", v), ("backward", v), ("backward_input", v), ("backward_weight", v),
            ("latency", v - 1),
        )
    }  # fmt: skip
    result = simulate(schedule, Costs(**numbers))
    p, dependencies = schedule.num_stages, Dependencies(schedule)
    at = {
        (e.kind, e.stage, e.chunk, e.micro_batch): (e.start, e.end)
        for e in result.timeline.events
        if e.computes
    }

    def span(one):
        return at[one.kind, one.stage, one.chunk, one.micro_batch]

    for row in schedule.stages:
        free = Fraction(0)
        for one in row:
            start, end = span(one)
            assert end - start == numbers[one.kind][one.virtual_stage(p)]
            arrivals = [free]
            for source in dependencies.inputs(one):
                boundary = min(source.virtual_stage(p), one.virtual_stage(p))
                latency = numbers["latency"][boundary] if source.stage != one.stage else 0
                arrivals.append(span(source)[1] + latency)
            assert start == max(arrivals)
            free = end
    assert result.total == max(end for _, end in at.values()) - min(s for s, _ in at.values())
    busy = sum(end - start for start, end in at.values())
    assert result.bubble == (1 - busy / (p * result.total) if result.total else 0)
    with_idle = result.timeline.with_idle()
    idle = sum(e.end - e.start for e in with_idle.events if e.kind == "idle")
    assert idle + busy == p * result.total


def test_the_slowest_stage_and_latency():
    schedule = build("1f1b", 2, 4)
    assert simulate(schedule, Costs(forward=(1, 3), backward=(2, 6))).total == 1 + 4 * 9 + 2
    late = simulate(schedule, Costs(latency=Fraction(1, 2)))
    assert late.total > simulate(schedule).total
    sent = [e for e in late.timeline.events if e.kind == "communication"]
    assert len(sent) == 8
    assert {(e.stage, e.peer) for e in sent} == {(0, 1), (1, 0)}


def test_activations_of_unequal_size():
    costs = Costs(activation=(1, 10, 100, 1000))
    assert simulate(build("interleaved", 2, 2, 2), costs).peak_activations == (202, 10 + 10 + 1000)
    assert simulate(build("gpipe", 2, 3), Costs(activation=(1, 7))).peak_activations == (3, 21)


def test_floats_stay_close_to_the_formula():
    result = simulate(build("1f1b", 4, 8), Costs(forward=0.1, backward=0.2))
    assert result.bubble == pytest.approx(3 / 11, rel=1e-12)


def test_costs_complete_each_other():
    table = Costs(backward_input=2, backward_weight=3).table(2)
    assert table["backward"] == (5, 5)
    table = Costs(backward=3).table(1)
    assert table["backward_input"] == table["backward_weight"] == (Fraction(3, 2),)
    assert Costs().table(1)["backward"] == (2,)


def test_numbers_of_numpy_are_numbers():
    costs = Costs(forward=np.float32(1), backward=np.array([2, 4]), latency=np.int64(1))
    plain = Costs(forward=1.0, backward=(2, 4), latency=1)
    assert costs == plain and {type(one) for one in costs.backward} == {int}
    schedule = build("1f1b", 2, 4)
    assert simulate(schedule, costs).timeline == simulate(schedule, plain).timeline


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"forward": np.True_}, r"from 0 on.*Received: forward="),
        ({"forward": np.array(1.0)}, r"from 0 on.*Received: forward=array"),
        ({"forward": object()}, r"from 0 on.*Received: forward=<object"),
        ({"forward": -1}, r"from 0 on.*Received: forward=-1"),
        ({"backward": "2"}, r"Received: backward='2'"),
        ({"forward": (1, 2, 3)}, r"one number or 2 of them, one per virtual.*forward=\(1, 2, 3\)"),
        ({"latency": (1, 2)}, r"1 of them, one per boundary.*latency=\(1, 2\)"),
        ({"forward": float("nan")}, r"Received: forward=nan"),
    ],
)
def test_wrong_costs(options, words):
    with pytest.raises(ValueError, match=words):
        simulate(build("1f1b", 2, 2), Costs(**options))


def test_a_schedule_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="deadlock"):
        simulate(schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))


def test_the_summary():
    text = str(simulate(build("1f1b", 4, 8)))
    assert "1f1b: time 33 · bubble 27.3% (formula for equal stages 27.3%)" in text
    assert "live activations 4, 3, 2, 1" in text


def test_a_formula_only_for_what_it_holds_for():
    assert formula_of(build("1f1b", 2, 2)) == Fraction(1, 3)
    renamed = schedule_of("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", name="1f1b")
    assert formula_of(renamed) is None
    assert formula_of(schedule_of("0F0 0B0")) is None
    assert bubble_formula("mine", 2, 2) is None
