"""Timelines as text, PNG and Chrome trace."""

from __future__ import annotations

import builtins
import io
import json

from kdist.pipeline import Chart, Costs, Event, Timeline, chrome_trace
from kdist.pipeline.colors import shade, text_color

import numpy as np
import pytest
import rich.console
from hypothesis import given, settings

from .schedules import build, named

EXECUTED = [
    Event(kind="forward", stage=0, start=10.0, end=10.2, micro_batch=0),
    Event(kind="communication", stage=0, start=10.2, end=10.25, micro_batch=0, peer=1),
    Event(kind="forward", stage=1, start=10.25, end=10.5, micro_batch=0),
]


def test_text_to_scale():
    assert build("1f1b", 2, 2).chart().text(80) == (
        "1f1b · 2 stages · 2 micro-batches\n"
        "stage 0 F0 F1 ······B0    ···B1\n"
        "stage 1 ···F0 B0    F1 B1    ······\n"
        "F forward  B backward  · idle\n"
        "time 9 · bubble 33.3% (formula for equal stages 33.3%) · live activations 2, 1"
    )


def test_text_of_a_split_backward_and_of_chunks():
    text = build("zero_bubble", 2, 2).chart().text(80)
    assert "stage 0 F0 F1 ···I0 W0 I1 W1" in text
    assert "I input gradient  W weight gradient  · idle" in text
    text = build("interleaved", 2, 2, 2).chart().text(120)
    assert "stage 0 F0a F1a F0b F1b" in text
    assert "chunks a to b" in text


@pytest.mark.parametrize("width", [12, 30, 60, 100, 300])
@settings(max_examples=25, deadline=None)
@given(schedule=named())
def test_rows_fit_the_width(width, schedule):
    lines = schedule.chart().text(width).splitlines()
    rows = lines[1 : 1 + schedule.num_stages]
    assert all(row.startswith(f"stage {i}") for i, row in enumerate(rows))
    assert max(map(len, rows)) <= max(width, len("stage 0 .."))


def test_a_terminal_gets_colors():
    output = io.StringIO()
    console = rich.console.Console(record=True, width=80, force_terminal=True, file=output)
    console.print(build("1f1b", 2, 2).chart())
    styled = console.export_text(styles=True)
    assert "\x1b[" in styled
    assert "B1" in styled


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["forward", "backward", "backward_weight"])
def test_numbers_read_well_on_their_bar(kind, chunks):
    """Contrast of at least 3 : 1, the least for large text (WCAG 2)."""

    def luminance(color):
        values = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return np.dot(linear, (0.2126, 0.7152, 0.0722))

    for chunk in range(chunks):
        pair = luminance(shade(kind, chunk, chunks)), luminance(text_color(kind, chunk, chunks))
        assert (max(pair) + 0.05) / (min(pair) + 0.05) >= 3
    assert len({shade(kind, chunk, chunks) for chunk in range(chunks)}) == chunks


# -- PNG -----------------------------------------------------------------------------------------


def test_png_shows_what_the_timeline_says(tmp_path):
    """The share of pixels in each color of a row is the share of time."""
    image = pytest.importorskip("matplotlib.image")
    chart = build("1f1b", 2, 4).chart()
    path = chart.save(tmp_path / "plan.png")
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int)
    colors = {
        kind: [int(shade(kind, 0, 1)[i : i + 2], 16) for i in (1, 3, 5)]
        for kind in ("forward", "backward")
    }
    found = {kind: (pixels == color).all(-1) for kind, color in colors.items()}
    # The line with the most bar pixels is a clean cut below the numbers of a stage.
    line = max(range(len(pixels)), key=lambda y: sum(mask[y].sum() for mask in found.values()))
    forward, backward = (found[kind][line].sum() for kind in ("forward", "backward"))
    assert backward / forward == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize(
    "shape", [("interleaved", 2, 4, 5), ("zero_bubble", 3, 40, 1), ("gpipe", 1, 1, 1)]
)
def test_png_of_many_shapes(tmp_path, shape):
    pytest.importorskip("matplotlib")
    chart = build(*shape).chart(Costs(latency=0.25))
    assert chart.save(tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_png_of_an_executed_timeline(tmp_path):
    pytest.importorskip("matplotlib")
    chart = Chart(Timeline.of(EXECUTED), "executed", "measured", seconds=1.0)
    assert chart.save(tmp_path / "run.png").stat().st_size > 1000


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'kdist\[plot\]'"):
        build("1f1b", 2, 2).chart().save(tmp_path / "plan.png")


def test_other_files(tmp_path):
    chart = build("1f1b", 2, 2).chart()
    assert "stage 1" in chart.save(tmp_path / "plan.txt").read_text(encoding="utf-8")
    trace = json.loads(chart.save(tmp_path / "plan.json").read_text())
    assert max(e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X") == 9000
    with pytest.raises(ValueError, match=r"\.png, \.json.*\.txt\. Received: path='.*plan\.gif'"):
        chart.save(tmp_path / "plan.gif")


# -- events and the trace ------------------------------------------------------------------------


def test_trace_of_executed_events():
    trace = chrome_trace(Timeline.of(EXECUTED).with_idle())
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert rows == {0: "stage 0", 1: "stage 0 sends", 2: "stage 1"}
    (sent,) = [e for e in spans if e["cat"] == "communication"]
    assert sent["tid"] == 1
    assert sent["args"] == {"stage": 0, "chunk": 0, "micro_batch": 0, "to_stage": 1}
    assert sent["ts"] == pytest.approx(0.2e6) and sent["dur"] == pytest.approx(0.05e6)
    idle = {e["tid"]: e["dur"] for e in spans if e["cat"] == "idle"}
    assert idle == {0: pytest.approx(0.3e6), 2: pytest.approx(0.25e6)}
    json.dumps(trace)


def test_timeline_of_executed_events():
    timeline = Timeline.of(reversed(EXECUTED))
    assert timeline.start == 10.0
    assert timeline.total == pytest.approx(0.5)
    assert timeline.busy() == pytest.approx((0.2, 0.25))
    assert timeline.bubble == pytest.approx(1 - 0.45 / 1.0)
    assert Timeline.of(EXECUTED, 4).busy()[3] == 0


def test_events_that_overlap_count_once():
    events = [
        Event(kind="forward", stage=0, start=0, end=4, micro_batch=0),
        Event(kind="backward", stage=0, start=1, end=2, micro_batch=0),
        Event(kind="forward", stage=0, start=3, end=6, micro_batch=1),
        Event(kind="forward", stage=0, start=8, end=10, micro_batch=2),
    ]
    timeline = Timeline.of(events)
    assert timeline.busy() == (8,)
    assert timeline.bubble == pytest.approx(0.2)
    (idle,) = [e for e in timeline.with_idle().events if e.kind == "idle"]
    assert (idle.start, idle.end) == (6, 8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Event(kind="pause", stage=0, start=0, end=1),
            r"forward, .*Received: kind='pause'",
        ),
        (lambda: Event(kind="idle", stage=0, start=2, end=1), r"Received: start=2, end=1"),
        (lambda: Timeline.of([]), r"at least one event"),
        (lambda: Timeline.of(EXECUTED, 1), r"up to 1.*Received: num_stages=1"),
    ],
)
def test_wrong_events(make, words):
    with pytest.raises(ValueError, match=words):
        make()
