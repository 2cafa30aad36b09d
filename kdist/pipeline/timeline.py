"""Timed events of a pipeline, planned or executed, and the Chrome trace of them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Literal, get_args

Time = int | float | Fraction
Kind = Literal["forward", "backward", "backward_input", "backward_weight", "communication", "idle"]
KINDS: tuple[str, ...] = get_args(Kind)
LETTERS = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "communication": "C",
    "idle": "",
}
NAMES = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "input gradient",
    "backward_weight": "weight gradient",
    "communication": "communication",
    "idle": "idle",
}
"""What charts call the kinds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a stage did, or will do, over a span of time.

    Attributes:
        kind: What it was.
        stage: Which stage; for communication the sender.
        start: When it began, in any unit.
        end: When it ended, in the same unit.
        micro_batch: Of which micro-batch; None for idle time.
        chunk: On which chunk of the stage.
        peer: The stage that communication goes to.

    Raises:
        ValueError: If the kind is unknown or the end lies before the start.

    Example:
    ```python
    from kdist.pipeline import Event

    Event(kind="forward", stage=0, start=0.0, end=1.5, micro_batch=0)
    ```
    """

    kind: Kind
    stage: int
    start: Time
    end: Time
    micro_batch: int | None = None
    chunk: int = 0
    peer: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"kind of an event is one of {', '.join(KINDS)}. Received: kind={self.kind!r}"
            )
        if self.end < self.start:
            raise ValueError(
                "An event ends after it starts. "
                f"Received: start={self.start!r}, end={self.end!r} in {self.kind} of stage "
                f"{self.stage}"
            )

    @property
    def computes(self) -> bool:
        """Whether the stage is at work: neither idle nor only waiting for a transfer."""
        return self.kind not in ("idle", "communication")


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Events of all stages.

    Attributes:
        events: Sorted by start. `Timeline.of` makes one from events in any order.
        num_stages: Number of stages, those without events included.

    Example:
    ```python
    from kdist.pipeline import Event, Timeline

    first = Event(kind="forward", stage=0, start=0, end=1, micro_batch=0)
    second = Event(kind="forward", stage=1, start=1, end=2, micro_batch=0)
    assert Timeline.of([second, first]).bubble == 0.5  # each stage waits half of the time
    ```
    """

    events: tuple[Event, ...]
    num_stages: int

    @staticmethod
    def of(events: Iterable[Event], num_stages: int | None = None) -> Timeline:
        """A timeline of events in any order.

        Args:
            events: At least one event.
            num_stages: None: one more than the largest stage.

        Raises:
            ValueError: Without events, or if an event is on a stage beyond `num_stages`.
        """
        ordered = tuple(sorted(events, key=lambda e: (e.start, e.stage, e.end)))
        if not ordered:
            raise ValueError("A timeline has at least one event. Received: events=[]")
        largest = 1 + max(max(e.stage, e.peer or 0) for e in ordered)
        if num_stages is None:
            num_stages = largest
        if num_stages < largest:
            raise ValueError(
                f"The events name stages up to {largest - 1}. Received: num_stages={num_stages}"
            )
        return Timeline(ordered, num_stages)

    @property
    def start(self) -> Time:
        """When the first event begins."""
        return min(e.start for e in self.events)

    @property
    def total(self) -> Time:
        """Time from the start of the first event to the end of the last."""
        return max(e.end for e in self.events) - self.start

    def of_stage(self, stage: int) -> tuple[Event, ...]:
        """The computations of a stage, by start."""
        return tuple(e for e in self.events if e.stage == stage and e.computes)

    def busy(self) -> tuple[Time, ...]:
        """Per stage, the time in which it computes. What overlaps counts once."""
        return tuple(_covered(self.of_stage(stage)) for stage in range(self.num_stages))

    @property
    def bubble(self) -> Time:
        """Share of the stages' time in which they do not compute, from 0 to 1."""
        if not self.total:
            return 0
        share: Time = sum(self.busy()) / (_exact(self.total) * self.num_stages)
        return 1 - share

    def with_idle(self) -> Timeline:
        """The same with an `idle` event for every gap of every stage."""
        begin, end = self.start, self.start + self.total
        kept = [e for e in self.events if e.kind != "idle"]
        for stage in range(self.num_stages):
            now = begin
            for event in self.of_stage(stage):
                if event.start > now:
                    kept.append(Event(kind="idle", stage=stage, start=now, end=event.start))
                now = max(now, event.end)
            if end > now:
                kept.append(Event(kind="idle", stage=stage, start=now, end=end))
        return Timeline.of(kept, self.num_stages)


def _exact(value: Time) -> Time:
    """Integers as fractions, so that their quotients stay exact."""
    return Fraction(value) if isinstance(value, int) else value


def _covered(events: Iterable[Event]) -> Time:
    covered: Time = 0
    now: Time | None = None
    for event in events:
        if now is None or event.start > now:
            covered += event.end - event.start
        elif event.end > now:
            covered += event.end - now
        now = event.end if now is None else max(now, event.end)
    return covered


def label(event: Event, chunks: int = 1) -> str:
    """What a cell of a chart says: kind and micro-batch, and a letter for the chunk if any."""
    batch = "" if event.micro_batch is None else str(event.micro_batch)
    return LETTERS[event.kind] + batch + (chunk_letter(event.chunk) if chunks > 1 else "")


def chunk_letter(chunk: int) -> str:
    """a, b, c, ...; beyond z a number in brackets."""
    return chr(ord("a") + chunk) if chunk < 26 else f"[{chunk}]"


def chrome_trace(timeline: Timeline, seconds: float = 1.0) -> dict[str, Any]:
    """The events in the trace format of Chrome (chrome://tracing) and Perfetto.

    Each stage is one row for its computations and, where there is any, one for what it sends.

    Args:
        timeline: The events.
        seconds: Length of the events' unit of time in seconds. A planned timeline without a unit is
            readable with 1e-3.

    Returns:
        What to dump as JSON.

    Example:
    ```python
    from kdist.pipeline import chrome_trace, get_schedule

    timeline = get_schedule("1f1b", stages=2, micro_batches=2).chart().timeline
    events = chrome_trace(timeline, seconds=1e-3)["traceEvents"]
    ```
    """
    per_unit = seconds * 1e6
    rows: dict[tuple[int, bool], None] = {}
    spans = []
    for event in timeline.events:
        sends = event.kind == "communication"
        rows[event.stage, sends] = None
        spans.append(_span(event, timeline.start, per_unit, 2 * event.stage + sends))
    names: list[dict[str, Any]] = [_metadata("process_name", 0, name="pipeline")]
    for stage, sends in sorted(rows):
        row = 2 * stage + sends
        title = f"stage {stage}" + (" sends" if sends else "")
        names.append(_metadata("thread_name", row, name=title))
        names.append(_metadata("thread_sort_index", row, sort_index=row))
    return {"traceEvents": names + spans, "displayTimeUnit": "ms"}


def _span(event: Event, origin: Time, per_unit: float, row: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"stage": event.stage, "chunk": event.chunk}
    if event.micro_batch is not None:
        arguments["micro_batch"] = event.micro_batch
    if event.peer is not None:
        arguments["to_stage"] = event.peer
    batch = "" if event.micro_batch is None else f" {event.micro_batch}"
    return {
        "name": NAMES[event.kind] + batch,
        "cat": event.kind,
        "ph": "X",
        "ts": float(event.start - origin) * per_unit,
        "dur": float(event.end - event.start) * per_unit,
        "pid": 0,
        "tid": row,
        "args": arguments,
    }


def _metadata(kind: str, row: int, **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": row, "args": arguments}


def write_trace(timeline: Timeline, path: str | os.PathLike[str], seconds: float = 1.0) -> None:
    """Writes `chrome_trace` as a JSON file.

    Args:
        timeline: The events.
        path: File to write.
        seconds: See `chrome_trace`.

    Example:
    ```python
    from kdist.pipeline import get_schedule, write_trace

    write_trace(get_schedule("1f1b", stages=2, micro_batches=2).chart().timeline, "plan.json", 1e-3)
    ```
    """
    with open(path, "w", encoding="utf-8") as file:
        json.dump(chrome_trace(timeline, seconds), file)
