"""Timelines as text, PNG and Chrome trace."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kdist.pipeline.colors import shade, text_color
from kdist.pipeline.communication import MESSAGES, Action, Receive, Send
from kdist.pipeline.instructions import (
    Await,
    Free,
    Gather,
    Instruction,
    Penalty,
    Reduce,
    Update,
    WeightInstruction,
)
from kdist.pipeline.timeline import NAMES, Event, Time, Timeline, chunk_letter, label, write_trace

import rich.console
import rich.text

if TYPE_CHECKING:
    from kdist.pipeline.simulate import Simulation

Marks = tuple[tuple[tuple[Time, str], ...], ...]
"""Per stage, times and letters."""
_WIDTH = 120
_IDLE = "·"
_BETWEEN = (Receive, Send, Gather, Free, Penalty, Reduce, Await, Update)
BETWEEN = {kind.letter: kind.kind for kind in _BETWEEN}
"""What charts call what stages do between computations, by letter."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """A timeline to look at: planned, from `Schedule.chart`, or executed.

    Attributes:
        timeline: What is drawn.
        title: Above it.
        caption: Below it.
        seconds: Length of the timeline's unit of time in seconds, None if it has no unit (a plan).
        weights: Per stage, what it does with weights: time and letter; see `kdist.pipeline.Work`.
        messages: Per stage, when it receives and sends, likewise.

    Example:
    ```python
    from kdist.pipeline import get_schedule

    chart = get_schedule("1f1b", stages=4, micro_batches=8).chart()
    print(chart)  # plain text; rich.print(chart) in color
    chart.save("plan.png")  # needs the extra `plot`: pip install "kdist[plot]"
    chart.save("plan.json")  # for chrome://tracing or ui.perfetto.dev
    ```
    """

    timeline: Timeline
    title: str = "Pipeline"
    caption: str = ""
    seconds: float | None = None
    weights: Marks = ()
    messages: Marks = ()

    @staticmethod
    def of_simulation(
        simulation: Simulation, rows: Sequence[Sequence[Action | WeightInstruction]] = ()
    ) -> Chart:
        """The chart of what a schedule would do; `rows` are those of a `kdist.pipeline.Work`."""
        schedule = simulation.schedule
        title = f"{schedule.name} · {schedule.num_stages} stages"
        title += f" · {schedule.micro_batches} micro-batches"
        title += f" · {schedule.chunks} chunks per stage" if schedule.chunks > 1 else ""
        marks = [
            tuple(_marks(row, simulation.timeline.of_stage(stage)))
            for stage, row in enumerate(rows)
        ]
        messages, weights = (
            tuple(tuple(one for one in row if (one[1] in MESSAGES) == sent) for row in marks)
            for sent in (True, False)
        )
        return Chart(simulation.timeline, title, simulation.caption(), None, weights, messages)

    @property
    def chunks(self) -> int:
        """Chunks per stage."""
        return 1 + max(event.chunk for event in self.timeline.events)

    def kinds(self) -> list[str]:
        """The kinds of events in the chart, in the order of a legend; idle time last."""
        found = {event.kind for event in self.timeline.events} | {"idle"}
        return [kind for kind in NAMES if kind in found]

    def marks(self) -> list[str]:
        """What stages do between computations, each with its letter: "G gather"."""
        there = {letter for row in (*self.weights, *self.messages) for _, letter in row}
        return [f"{letter} {BETWEEN[letter]}" for letter in BETWEEN if letter in there]

    def text(self, width: int | None = None) -> str:
        """The chart as plain text, one line per stage.

        Each cell begins with F (forward), B (backward), I (input gradient) or W (weight gradient)
        and the micro-batch, then a letter for the chunk if there are several; dots are idle time.
        Communication is not shown.

        Args:
            width: Characters per line, None: the terminal's. Cells that are too narrow for their
                name repeat its letter; the shortest ones may vanish in a long timeline.
        """
        if width is None:
            width = shutil.get_terminal_size(fallback=(_WIDTH, 24)).columns
        return "\n".join(line.plain.rstrip() for line in self._lines(width))

    def __str__(self) -> str:
        return self.text()

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterator[rich.text.Text]:
        yield from self._lines(options.max_width)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the chart to a file: `.png`, `.json` (Chrome trace) or `.txt`.

        Args:
            path: The file; its suffix says the format.

        Returns:
            The path.

        Raises:
            ValueError: If the suffix is another one.
            ImportError: For PNG without matplotlib, which the extra `plot` installs.
        """
        path = pathlib.Path(path)
        if path.suffix == ".png":
            from kdist.pipeline.chart_png import save_png

            save_png(self, path)
        elif path.suffix == ".json":
            # A plan has no unit; one unit per millisecond reads well.
            write_trace(self.timeline, path, 1e-3 if self.seconds is None else self.seconds)
        elif path.suffix == ".txt":
            path.write_text(self.text() + "\n", encoding="utf-8")
        else:
            raise ValueError(
                "A chart is saved as .png, .json (Chrome trace) or .txt. "
                f"Received: path={str(path)!r}"
            )
        return path

    def _lines(self, width: int) -> Iterator[rich.text.Text]:
        timeline, chunks = self.timeline, self.chunks
        yield rich.text.Text(self.title, style="bold")
        names = [f"stage {stage} " for stage in range(timeline.num_stages)]
        margin = max(map(len, names))
        columns = _columns(timeline, chunks, width - margin)
        for stage, name in enumerate(names):
            line = rich.text.Text(name.ljust(margin))
            line.append_text(_row(timeline, timeline.of_stage(stage), columns, chunks))
            yield line
            for below in self._below(stage, columns):
                yield rich.text.Text(" " * margin + below, style="dim")
        yield self._legend(chunks)
        if self.caption:
            yield rich.text.Text(self.caption)

    def _below(self, stage: int, columns: int) -> Iterator[str]:
        """What a stage does between its computations, as letters under its cells: messages first.

        A message is received where a cell begins, and sent where one ends.
        """
        scale, messages, weights = columns / float(self.timeline.total or 1), [" "] * columns, ""
        for time, letter in self.messages[stage] if self.messages else ():
            messages[max(round(float(time) * scale) - (letter == Send.letter), 0)] = letter
        for time, letter in self.weights[stage] if self.weights else ():
            weights = weights.ljust(round(float(time) * scale)) + letter
        yield from (line for line in ("".join(messages).rstrip(), weights) if line)

    def _legend(self, chunks: int) -> rich.text.Text:
        line = rich.text.Text()
        for kind in self.kinds():
            if kind != "communication":
                example = Event(kind=kind, stage=0, start=0, end=0, micro_batch=0)  # type: ignore[arg-type]
                mark = _IDLE if kind == "idle" else label(example)[0]
                line.append(f"{mark} {NAMES[kind]}", style=_style(kind, 0, 1))
                line.append("  ")
        if chunks > 1:
            line.append(f"chunks a to {chunk_letter(chunks - 1)}")
        line.append("  ".join(["", *self.marks()]))
        return line


def _marks(
    row: Sequence[Action | WeightInstruction], events: Sequence[Event]
) -> Iterator[tuple[Time, str]]:
    """When a stage does what else: between two computations, one mark of each kind."""
    seen, done = set[str](), 0
    for one in row:
        if isinstance(one, Instruction):
            seen, done = set(), done + 1
        elif one.letter not in seen:
            seen.add(one.letter)
            if isinstance(one, Receive):  # maybe long after the computation before
                yield events[done].start, one.letter
            else:
                yield (events[done - 1].end if done else 0), one.letter


def _columns(timeline: Timeline, chunks: int, room: int) -> int:
    """Columns of the time axis: what the shortest cell needs for its name, if there is room."""
    shortest: dict[int, float] = {}
    for event in timeline.events:
        if event.computes and event.end > event.start:
            need = len(label(event, chunks)) + 1
            length = float(event.end - event.start)
            shortest[need] = min(length, shortest.get(need, length))
    total = float(timeline.total)
    if not shortest or not total:
        return max(room, 1)
    fits = int(room / total * min(shortest.values()))
    if fits >= 1:
        # Whole columns for the shortest cell, so that equal costs are drawn equally wide.
        return max(1, round(total / min(shortest.values()) * min(fits, max(shortest))))
    return max(1, room)


def _row(
    timeline: Timeline, events: tuple[Event, ...], columns: int, chunks: int
) -> rich.text.Text:
    scale = columns / float(timeline.total) if timeline.total else 0.0
    line, now = rich.text.Text(), 0
    for event in events:
        begin = max(now, round(float(event.start - timeline.start) * scale))
        end = max(begin, round(float(event.end - timeline.start) * scale))
        line.append(_IDLE * (begin - now), style="dim")
        line.append(
            _cell(event, end - begin, chunks), style=_style(event.kind, event.chunk, chunks)
        )
        now = end
    line.append(_IDLE * (columns - now), style="dim")
    return line


def _cell(event: Event, width: int, chunks: int) -> str:
    """A name in its span: in full with a space after it, cut to its letter, or the letter alone."""
    name = label(event, chunks)
    return name.ljust(width) if len(name) <= width else name[0] * width


def _style(kind: str, chunk: int, chunks: int) -> str:
    if kind == "idle":
        return "dim"
    return f"{text_color(kind, chunk, chunks)} on {shade(kind, chunk, chunks)}"
