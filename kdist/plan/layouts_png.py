"""The layouts of a plan as PNG, drawn with matplotlib (the extra `plot`).

A row per weight and a column per device, as `jax.debug.visualize_array_sharding` draws one array:
here with what optimizer parallelism makes of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kdist.display.figure import new_figure
from kdist.plan.layout_cells import Box, LayoutCell, LayoutRow, columns, rows

if TYPE_CHECKING:
    from kdist.plan.plan import Plan

MOST_ROWS = 60
_WIDTH, _HEIGHT, _FLAT, _GAP = 0.78, 0.34, 0.13, 0.16
_ABSENT, _STORED, _UPDATED = "#ECEEF0", "#A9BCD2", "#3E5C84"
_INK, _GRAY = "#1F2328", "#6E7781"


def save_png(plan: Plan, path: str | os.PathLike[str], title: str = "") -> None:
    """Draws which part of each weight every device stores, and which it updates.

    Args:
        plan: The plan.
        path: File to write.
        title: Of the picture.

    Raises:
        ImportError: Without matplotlib.
    """
    shown, left_out = _largest(rows(plan))
    devices = columns(plan)
    heights = [_FLAT if len(row.shape) < 2 else _HEIGHT for row in shown]
    lines = 1 + max(at.count("\n") + bool(at) for _, at in devices)
    label = 0.2 + 0.068 * max(len(_label(row)) for row in shown)
    top, bottom = 0.42 + 0.16 * lines, 0.34 + 0.2 * bool(left_out)
    width = max(label + len(devices) * (_WIDTH + _GAP) + 0.1, 5.2)
    height = top + sum(heights) + _GAP * len(shown) + bottom
    figure = new_figure(width, height, "print(model.plan())", dpi=150, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    axes.text(0.12, 0.22, title or _title(plan), fontsize=11, weight="bold", color=_INK,
              va="center")  # fmt: skip
    for d, (device, at) in enumerate(devices):
        middle = label + d * (_WIDTH + _GAP) + _WIDTH / 2
        axes.text(middle, top - 0.08, f"{device}\n{at}".strip(), fontsize=7, color=_GRAY,
                  ha="center", va="bottom", linespacing=1.2)  # fmt: skip
    y = top
    for row, tall in zip(shown, heights):
        axes.text(label - 0.12, y + tall / 2, _label(row), fontsize=7.5, color=_INK, ha="right",
                  va="center", family="monospace")  # fmt: skip
        for d, cell in enumerate(row.cells):
            _draw(axes, cell, (label + d * (_WIDTH + _GAP), y, _WIDTH, tall))
        y += tall + _GAP
    _legend(axes, y + 0.06)
    if left_out:
        axes.text(0.12, y + 0.26, left_out, fontsize=7.5, color=_GRAY, va="center")
    figure.savefig(path, format="png")


def _largest(found: Sequence[LayoutRow]) -> tuple[list[LayoutRow], str]:
    """The rows to draw, and what is said of those that are too many."""
    largest = sorted(range(len(found)), key=lambda i: -found[i].nbytes)[:MOST_ROWS]
    shown = [found[i] for i in sorted(largest)]
    rest = sum(row.count for row in found) - sum(row.count for row in shown)
    return shown, f"and {rest} smaller weights, which print(model.plan()) has" if rest else ""


def _title(plan: Plan) -> str:
    return f"Layouts on {plan.topology.describe_axes()}"


def _label(row: LayoutRow) -> str:
    times = f" x {row.count}" if row.count > 1 else ""
    return f"{row.name} {'x'.join(map(str, row.shape)) or 'scalar'}{times}"


def _draw(axes: Any, cell: LayoutCell, place: Box) -> None:
    """What a device has of a weight, over the outline of the whole."""
    _rectangle(axes, place, (0, 0, 1, 1), _ABSENT)
    for box in cell.stored:
        _rectangle(axes, place, box, _STORED)
    for box in cell.updated:
        _rectangle(axes, place, box, _UPDATED)


def _rectangle(axes: Any, place: Box, box: Box, color: str) -> None:
    from matplotlib.patches import Rectangle

    left, top, width, height = place
    corner = left + box[0] * width, top + box[1] * height
    axes.add_patch(Rectangle(corner, box[2] * width, box[3] * height, color=color, lw=0))


def _legend(axes: Any, y: float) -> None:
    x = 0.12
    for color, text in (
        (_UPDATED, "updated here, with its optimizer state"),
        (_STORED, "stored here"),
        (_ABSENT, "elsewhere"),
    ):
        _rectangle(axes, (x, y - 0.06, 0.2, 0.12), (0, 0, 1, 1), color)
        axes.text(x + 0.28, y, text, fontsize=7.5, color=_INK, va="center")
        x += 0.45 + 0.062 * len(text)
