"""Timelines as PNG, drawn with matplotlib (the extra `plot`)."""

from __future__ import annotations

import itertools
import pathlib
from typing import TYPE_CHECKING, Any

from kdist.display.figure import new_figure
from kdist.pipeline.colors import shade, text_color
from kdist.pipeline.communication import Receive, Send
from kdist.pipeline.timeline import NAMES, Event, Time

if TYPE_CHECKING:
    from kdist.pipeline.chart import Chart

_DPI = 160
_ROW = 0.46
_BAR = 0.78
_MAX_WIDTH = 36.0
_TYPE_SIZES = (9.0, 7.5, 6.0, 5.0)
_INK, _GRAY = "#1F2328", "#6E7781"


def save_png(chart: Chart, path: pathlib.Path) -> None:
    """Draws one bar per instruction, one row per stage.

    Args:
        chart: What to draw.
        path: File to write.

    Raises:
        ImportError: Without matplotlib.
    """
    rows = chart.timeline.num_stages
    width, height = _width(chart), 1.55 + _ROW * rows
    figure = new_figure(width, height, "print(chart)", dpi=_DPI, facecolor="white")
    left, right, top, bottom = 0.85, 0.25, 0.78, 0.77
    axes = figure.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    )
    _draw_rows(axes, chart)
    for event in chart.timeline.events:
        if event.computes:
            _draw_bar(axes, chart, event, width - left - right)
        elif event.kind == "communication":
            _draw_transfer(axes, chart, event)
    for stage, (messages, weights) in enumerate(zip(chart.messages, chart.weights)):
        # What is done at one time, from a send to a receive.
        marks = sorted((*messages, *weights), key=_turn)
        for time, together in itertools.groupby(marks, lambda mark: mark[0]):
            at, letters = (float(time), stage + (_BAR + 0.2) / 2), "".join(m for _, m in together)
            axes.text(*at, letters, ha="center", va="center", fontsize=5.0, color=_GRAY)
    figure.text(1 - right / width, 0.42 / height, "   ".join(chart.marks()), ha="right",
                va="center", fontsize=6.5, color=_GRAY)  # fmt: skip
    _style_axes(axes, chart)
    figure.text(left / width, 1 - 0.27 / height, chart.title, fontsize=13, weight="bold",
                color=_INK, va="center")  # fmt: skip
    _draw_legend(figure, chart, (1 - right / width, 1 - 0.57 / height))
    figure.text(left / width, 0.2 / height, chart.caption, fontsize=9.5, color=_INK, va="center")
    figure.savefig(path, format="png")


def _turn(mark: tuple[Time, str]) -> tuple[Time, int]:
    time, letter = mark
    return time, {Send.letter: 0, Receive.letter: 2}.get(letter, 1)


def _width(chart: Chart) -> float:
    """Inches: enough for the shortest bar's number, within limits."""
    lengths = [float(e.end - e.start) for e in chart.timeline.events if e.computes]
    shortest = min((length for length in lengths if length > 0), default=1.0)
    bars = float(chart.timeline.total) / shortest
    return max(7.5, min(_MAX_WIDTH, 1.1 + bars * 0.095 * (1 + _digits(chart))))


def _number(event: Event) -> str:
    return "" if event.micro_batch is None else str(event.micro_batch)


def _digits(chart: Chart) -> int:
    return max(len(_number(event)) for event in chart.timeline.events)


def _draw_rows(axes: Any, chart: Chart) -> None:
    """Idle time is the ground on which the bars stand."""
    from matplotlib.patches import Rectangle

    for stage in range(chart.timeline.num_stages):
        ground = Rectangle(
            (0, stage - _BAR / 2), float(chart.timeline.total), _BAR,
            facecolor="#EEF0F2", edgecolor="#DDE1E5", hatch="////", linewidth=0,
        )  # fmt: skip
        axes.add_patch(ground)


def _draw_bar(axes: Any, chart: Chart, event: Event, inches: float) -> None:
    from matplotlib.patches import Rectangle

    start = float(event.start - chart.timeline.start)
    length = float(event.end - event.start)
    color = shade(event.kind, event.chunk, chart.chunks)
    axes.add_patch(
        Rectangle(
            (start, event.stage - _BAR / 2),
            length,
            _BAR,
            facecolor=color,
            edgecolor="white",
            linewidth=0.9,
        )  # fmt: skip
    )
    number = _number(event)
    # As if all numbers had as many digits, so that equal bars have equal type.
    points = length / float(chart.timeline.total) * inches * 72 / (0.75 * max(_digits(chart), 1))
    size = next((s for s in _TYPE_SIZES if s <= points), None) if length else None
    if number and size is not None:
        ink = text_color(event.kind, event.chunk, chart.chunks)
        middle = start + length / 2, event.stage
        axes.text(*middle, number, ha="center", va="center_baseline", fontsize=size, color=ink)


def _draw_transfer(axes: Any, chart: Chart, event: Event) -> None:
    """A thin line from the sender's bar to the receiver's row."""
    if event.peer is None:
        return
    down = 1 if event.peer > event.stage else -1
    begin, end = (float(t - chart.timeline.start) for t in (event.start, event.end))
    edges = event.stage + down * _BAR / 2, event.peer - down * _BAR / 2
    axes.plot((begin, end), edges, color=_GRAY, linewidth=0.6, alpha=0.8, zorder=0.5)


def _style_axes(axes: Any, chart: Chart) -> None:
    rows = chart.timeline.num_stages
    axes.set_xlim(0, float(chart.timeline.total) or 1)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_yticks(range(rows), [f"stage {stage}" for stage in range(rows)])
    axes.tick_params(axis="y", length=0, labelsize=9.5, labelcolor=_INK)
    axes.tick_params(axis="x", length=3, labelsize=8.5, color=_GRAY, labelcolor=_GRAY)
    unit = "time (units of cost)" if chart.seconds is None else "time"
    if chart.seconds is not None:
        factor, unit = _readable_unit(float(chart.timeline.total) * chart.seconds)
        scale = chart.seconds * factor
        axes.xaxis.set_major_formatter(lambda value, _: f"{value * scale:g}")
        unit = f"time ({unit})"
    axes.set_xlabel(unit, fontsize=8.5, color=_GRAY, labelpad=2)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#C8CDD2")


def _readable_unit(seconds: float) -> tuple[float, str]:
    if seconds >= 2:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 2e-3 else (1e6, "µs")


def _draw_legend(figure: Any, chart: Chart, corner: tuple[float, float]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for kind in chart.kinds():
        if kind == "idle":
            handles.append(Patch(facecolor="#EEF0F2", edgecolor="#DDE1E5", hatch="////",
                                 linewidth=0, label=NAMES[kind]))  # fmt: skip
        elif kind == "communication":
            handles.append(Line2D([], [], color=_GRAY, linewidth=1, label=NAMES[kind]))
        else:
            # Of many chunks the first and the last: the shades between them lie in order.
            count = chart.chunks
            for chunk in range(count) if count <= 3 else (0, count - 1):
                name = NAMES[kind] + (f", chunk {chunk}" if chart.chunks > 1 else "")
                handles.append(Patch(facecolor=shade(kind, chunk, chart.chunks), label=name))
    figure.legend(
        handles=handles, loc="center right", bbox_to_anchor=corner, ncols=len(handles),
        frameon=False, fontsize=9, handlelength=1.1, handleheight=0.9, columnspacing=1.1,
        handletextpad=0.45, borderpad=0, borderaxespad=0, labelcolor=_INK,
    )  # fmt: skip
