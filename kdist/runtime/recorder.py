"""When each instruction of a training step ran, read by the step's own graph.

Around each call three clocks are read on the stage's device: when the inputs had arrived, when the
stage began, when it was done. They are operations of the graph, so what is recorded is what was
executed. A call's beginning waits for what the schedule says (see `Chain`), and for its inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from kdist._compat import keras_trainer
from kdist.pipeline.communication import incoming
from kdist.pipeline.instructions import Instruction
from kdist.pipeline.schedule import Schedule
from kdist.pipeline.timeline import Event, Kind, Timeline

import numpy as np
import tensorflow as tf

Place = tuple[int, int]
"""(replica, stage)"""


@dataclasses.dataclass
class Stamps:
    """Clock readings of one instruction, float64 seconds: arrival of the inputs, start, end."""

    arrived: Any
    start: Any
    end: Any


class TimelineRecorder:
    """Keeps the times of the last training step.

    Attributes:
        schedule: What was run, once a step has been traced.
    """

    def __init__(self) -> None:
        self.schedule: Schedule | None = None
        self._rows: dict[Place, list[tuple[Instruction, Stamps]]] = {}
        self._order: dict[Place, list[Instruction]] = {}
        self._stored: dict[Place, tf.Variable] = {}

    def begin(self, schedule: Schedule) -> None:
        """A step is traced."""
        self.schedule = schedule
        self._rows = {}

    @staticmethod
    def now(after: Sequence[Any]) -> Any:
        """The clock of the device in scope, once some tensors are there, or operations done."""
        here = [t if isinstance(t, tf.Operation) else tf.identity(t) for t in after]
        with tf.control_dependencies(here):
            time = tf.timestamp()
        if not tf.executing_eagerly():
            keras_trainer.run_independently(time.op)
        return time

    def add(self, replica: int, one: Instruction, stamps: Stamps) -> None:
        """Notes an instruction's clock readings."""
        self._rows.setdefault((replica, one.stage), []).append((one, stamps))

    def end(self, devices: Any) -> None:
        """Has the step keep the readings.

        Args:
            devices: Gives the device of a replica and a stage.
        """
        for (replica, stage), rows in self._rows.items():
            self._order[replica, stage] = [one for one, _ in rows]
            with tf.device(devices(replica, stage)):
                values = tf.stack([tf.stack([s.arrived, s.start, s.end]) for _, s in rows])
                self._variable((replica, stage), len(rows)).assign(values)
        self._rows = {}

    def _variable(self, place: Place, rows: int) -> tf.Variable:
        known = self._stored.get(place)
        if known is None or known.shape[0] != rows:
            with tf.init_scope():
                known = self._stored[place] = tf.Variable(
                    tf.zeros([rows, 3], tf.float64), trainable=False
                )
        return known

    def times(self, replica: int = 0) -> dict[Instruction, np.ndarray]:
        """Arrival, start and end of every instruction of the last step, in seconds."""
        found: dict[Instruction, np.ndarray] = {}
        for (r, stage), order in self._order.items():
            if r == replica:
                found.update(zip(order, self._stored[r, stage].numpy()))
        return found

    def executed(self, replica: int = 0) -> list[list[Instruction]]:
        """Per stage, the instructions in the order in which they started."""
        assert self.schedule is not None
        times = self.times(replica)
        return [sorted(row, key=lambda one: times[one][1]) for row in self.schedule.stages]

    def timeline(self, replica: int = 0) -> Timeline:
        """The last step, from its first instruction on, in seconds.

        Raises:
            ValueError: No step has run.
        """
        times = self.times(replica)
        if self.schedule is None or not times:
            raise ValueError(
                "A timeline needs a training step that was recorded. Train with the callback "
                f"first. Received: replica={replica}"
            )
        origin = min(float(start) for _, start, _ in times.values())
        events = []
        for one, (_, start, end) in times.items():
            kind = cast(Kind, one.kind)
            events.append(
                Event(
                    kind=kind,
                    stage=one.stage,
                    start=float(start) - origin,
                    end=float(max(start, end)) - origin,
                    micro_batch=one.micro_batch,
                    chunk=one.chunk,
                )
            )
        for target, message in incoming(self.schedule).items():
            left = float(times[message.source][2]) - origin
            events.append(
                Event(
                    kind="communication",
                    stage=message.source.stage,
                    start=left,
                    end=max(left, float(times[target][0]) - origin),
                    micro_batch=target.micro_batch,
                    chunk=target.chunk,
                    peer=target.stage,
                )
            )
        return Timeline.of(events, self.schedule.num_stages)
