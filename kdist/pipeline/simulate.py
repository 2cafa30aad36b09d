"""When each instruction of a schedule would run, given what each costs."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from kdist.display.tables import as_text, number
from kdist.pipeline.communication import incoming
from kdist.pipeline.dependencies import Dependencies
from kdist.pipeline.formulas import formula_of
from kdist.pipeline.instructions import Forward, Instruction
from kdist.pipeline.schedule import Schedule
from kdist.pipeline.timeline import Event, Time, Timeline
from kdist.pipeline.validate import validate

Cost = Time | Sequence[Time]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What instructions take, in any unit of time: one number, or one per virtual stage.

    With integers and `fractions.Fraction`s the simulation is exact.

    Attributes:
        forward: A forward.
        backward: A whole backward. None: the sum of its halves if both are given, else 2.
        backward_input: The gradient of the inputs. None: half of `backward`.
        backward_weight: The gradient of the weights. None: half of `backward`.
        latency: From the end of an instruction to the moment its result can be used on another
            stage, while both may compute; one number, or one per boundary between virtual stages.
        activation: What one micro-batch keeps between forward and backward, in any unit of memory.

    Raises:
        ValueError: If a number is negative or not a number.

    Example:
    ```python
    from kdist.pipeline import Costs

    Costs(forward=1, backward=2, latency=0.1)
    Costs(forward=(1, 1, 2, 1), backward=(2, 2, 4, 2))  # the third of four stages is slower
    ```
    """

    forward: Cost = 1
    backward: Cost | None = None
    backward_input: Cost | None = None
    backward_weight: Cost | None = None
    latency: Cost = 0
    activation: Cost = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            alone = isinstance(value, numbers.Real)
            try:
                found = [_number(one) for one in ((value,) if alone else value)]
            except TypeError:
                found = [None]
            if any(one is None or not one >= 0 for one in found):
                raise ValueError(
                    f"{field.name} is a number from 0 on, or one per virtual stage. "
                    f"Received: {field.name}={value!r}"
                )
            object.__setattr__(self, field.name, found[0] if alone else tuple(found))

    def table(self, virtual_stages: int) -> dict[str, tuple[Time, ...]]:
        """The costs by kind, as one number per virtual stage (latency: per boundary).

        Raises:
            ValueError: If a sequence has another length.
        """
        halves = self.backward_input, self.backward_weight
        whole = self.backward
        if whole is None and None not in halves:
            parts = [self._spread("backward", half, virtual_stages) for half in halves]
            whole = tuple(a + b for a, b in zip(*parts))
        backward = self._spread("backward", 2 if whole is None else whole, virtual_stages)
        half = tuple(b / 2 for b in backward)
        table = {
            "forward": self._spread("forward", self.forward, virtual_stages),
            "backward": backward,
            "latency": self._spread("latency", self.latency, virtual_stages - 1),
            "activation": self._spread("activation", self.activation, virtual_stages),
        }
        for name, value in zip(("backward_input", "backward_weight"), halves):
            table[name] = half if value is None else self._spread(name, value, virtual_stages)
        return table

    @staticmethod
    def _spread(name: str, value: Any, count: int) -> tuple[Time, ...]:
        values = value if isinstance(value, tuple) else (value,) * count
        if len(values) != count:
            raise ValueError(
                f"{name} is one number or {count} of them, one per "
                f"{'boundary between virtual stages' if name == 'latency' else 'virtual stage'}. "
                f"Received: {name}={value!r}"
            )
        return tuple(Fraction(v) if isinstance(v, int) else v for v in values)


def _number(value: Any) -> Time | None:
    """A number of any kind, NumPy's too, as Python's; None if it is none, or a boolean."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    return value if isinstance(value, Fraction) else float(value)


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a schedule would do.

    Attributes:
        schedule: The schedule.
        costs: What its instructions take.
        timeline: Start and end of every instruction and every transfer that takes time.
        peak_live: Per stage, the most micro-batches (on a chunk) kept at a time.
        peak_activations: Per stage, the same in the unit of `Costs.activation`.

    Example:
    ```python
    from kdist.pipeline import Costs, get_schedule, simulate

    found = simulate(get_schedule("gpipe", stages=2, micro_batches=2), Costs(forward=1, backward=2))
    assert found.total == 9 and found.peak_live == (2, 2)
    ```
    """

    schedule: Schedule
    costs: Costs
    timeline: Timeline
    peak_live: tuple[int, ...]
    peak_activations: tuple[Time, ...]

    @property
    def total(self) -> Time:
        """Time from the first start to the last end."""
        return self.timeline.total

    @property
    def bubble(self) -> Time:
        """Share of the stages' time in which they wait, from 0 to 1; exact for exact costs."""
        return self.timeline.bubble

    def __str__(self) -> str:
        columns = [number(title) for title in ("stage", "busy", "idle", "live activations")]
        rows = [
            (str(stage), f"{float(busy):g}", f"{float(self.total - busy):g}", str(live))
            for stage, (busy, live) in enumerate(zip(self.timeline.busy(), self.peak_live))
        ]
        return f"{self.schedule.name}: {self.caption()}\n{as_text(columns, rows, width=100)}"

    def caption(self) -> str:
        """Total time and bubble share, beside the formula's where there is one, in one line."""
        parts = [f"time {float(self.total):g}", f"bubble {float(self.bubble):.1%}"]
        formula = formula_of(self.schedule)
        if formula is not None:
            parts[1] += f" (formula for equal stages {float(formula):.1%})"
        live = self.peak_live
        same = len(set(live)) == 1
        parts.append(f"live activations {live[0] if same else ', '.join(map(str, live))}")
        return " · ".join(parts)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Runs a schedule on paper.

    Each stage runs its instructions one after the other, each as soon as what it uses has arrived.
    A transfer occupies neither sender nor receiver.

    Args:
        schedule: A schedule that `validate` accepts.
        costs: None: 1 for a forward, 2 for a backward, 1 for each half of it, free transfers.

    Returns:
        Start and end of everything, total time, bubble share, peak activations.

    Raises:
        ValueError: If the schedule cannot run, or the costs are not for its virtual stages.

    Example:
    ```python
    from kdist.pipeline import get_schedule, simulate

    simulation = simulate(get_schedule("1f1b", stages=4, micro_batches=8))
    simulation.bubble  # Fraction(3, 11): (p - 1) / (m + p - 1)
    ```
    """
    costs = costs or Costs()
    table = costs.table(schedule.virtual_stages)
    order = validate(schedule)
    dependencies, messages = Dependencies(schedule), incoming(schedule)
    ends: dict[Instruction, Time] = {}
    free: list[Time] = [Fraction(0)] * schedule.num_stages
    events: list[Event] = []
    for one in order:
        here = one.virtual_stage(schedule.num_stages)
        start = free[one.stage]
        for source in dependencies.inputs(one):
            arrival = ends[source]
            if one in messages and messages[one].source == source:
                boundary = here - 1 if isinstance(one, Forward) else here
                arrival += table["latency"][boundary]
                if arrival > ends[source]:
                    events.append(_transfer(source, one, ends[source], arrival))
            start = max(start, arrival)
        ends[one] = free[one.stage] = start + table[one.kind][here]
        events.append(_computation(one, start, ends[one]))
    return Simulation(
        schedule,
        costs,
        Timeline.of(events, schedule.num_stages),
        schedule.peak_live(),
        _peak_activations(schedule, table["activation"]),
    )


def _computation(one: Instruction, start: Time, end: Time) -> Event:
    return Event(
        kind=one.kind,  # type: ignore[arg-type]
        stage=one.stage,
        start=start,
        end=end,
        micro_batch=one.micro_batch,
        chunk=one.chunk,
    )


def _transfer(source: Instruction, target: Instruction, start: Time, end: Time) -> Event:
    return Event(
        kind="communication",
        stage=source.stage,
        start=start,
        end=end,
        micro_batch=source.micro_batch,
        chunk=source.chunk,
        peer=target.stage,
    )


def _peak_activations(schedule: Schedule, size: tuple[Time, ...]) -> tuple[Time, ...]:
    peaks = []
    for row in schedule.stages:
        live: Time = 0
        peak: Time = 0
        for one in row:
            if isinstance(one, Forward):
                live += size[one.virtual_stage(schedule.num_stages)]
                peak = max(peak, live)
            elif one.letter in "BW":
                live -= size[one.virtual_stage(schedule.num_stages)]
        peaks.append(peak)
    return tuple(peaks)
