"""What the user says about a pipeline."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kdist.config.unknown_fields import explains_fields
from kdist.pipeline.known_schedules import check_known, get_schedule
from kdist.pipeline.schedule import Schedule
from kdist.pipeline.validate import validate

import keras


@explains_fields
@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a model is trained as a pipeline over the mesh's `pipe` axis.

    Each replica's part of a batch is cut into micro-batches that follow each other through the
    stages, in the order of a schedule.

    Raises:
        ValueError: For a number that is not a positive integer, an unknown schedule, or stages of
            another form. What depends on the mesh and the model is checked by `kdist.parallelize`.

    Example:
    ```python
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(pipe=4, data=2),
        pipeline=kdist.PipelineConfig(micro_batches=8, schedule="1f1b"),
    )
    ```
    """

    micro_batches: int
    """Micro-batches per step and replica, m. A batch need not divide: sizes differ by at most one
    row, and every row counts the same."""

    schedule: str | os.PathLike[str] | Schedule = "auto"
    """`"gpipe"`, `"1f1b"`, `"interleaved"`, `"zero_bubble"`, a `kdist.pipeline.Schedule`, or the
    path of a CSV file with one (see docs/pipeline.md). `"auto"` is `"1f1b"`; where the model's loss
    is one over the whole batch, so that no backward can begin before the last forward is done, it
    is `"gpipe"`."""

    stages: Literal["auto"] | Mapping[str, int] | Sequence[Sequence[keras.Layer]] = "auto"
    """`"auto"`: stages of about equal time with small boundaries. A mapping of layer name, or regex
    of whole names, to stage fixes these layers; the others follow their neighbours. With several
    chunks a stage here is a *virtual* stage, from 0 to p * v - 1. `kdist.set_stage` says the same
    for one layer. For a model that is not made of a graph of layers (subclassed): a list of layers
    per virtual stage, which the model calls one after the other, each on the output of the one
    before."""

    chunks: int | None = None
    """Parts of the model per stage, v. None: 2 for `"interleaved"`, what a file or an object has,
    else 1."""

    costs: Literal["estimate", "measured"] = "estimate"
    """What `stages="auto"` balances by. `"estimate"`: operations and bytes of each layer, by its
    class and shapes. `"measured"`: the time of each layer, forward and backward, on one device with
    the shapes of the first micro-batch; the model is then cut when its first batch comes, and the
    plan shows both."""

    def __post_init__(self) -> None:
        get_schedule("gpipe", stages=1, micro_batches=self.micro_batches)
        if self.schedule != "auto":
            check_known(self.schedule)
        if self.chunks is not None and not (_is_count(self.chunks) and self.chunks > 0):
            raise ValueError(f"chunks is an integer from 1 on. Received: chunks={self.chunks!r}")
        if isinstance(self.stages, Mapping):
            object.__setattr__(self, "stages", dict(self.stages))
            wrong = {k: v for k, v in self.stages.items() if not _is_count(v)}
            if wrong or not all(isinstance(key, str) for key in self.stages):
                raise ValueError(
                    "stages maps names (or regexes) of layers to integers from 0 on. "
                    f"Received: {wrong or self.stages!r}"
                )
        elif _is_lists(self.stages):
            object.__setattr__(self, "stages", tuple(tuple(row) for row in self.stages))
        elif self.stages != "auto":
            raise ValueError(
                "stages is 'auto', a mapping of layer name, or regex, to stage, or a list per "
                "stage of its layers (the layers themselves, not their names), one at least. "
                f"Received: stages={self.stages!r}"
            )

        if self.costs not in ("estimate", "measured"):
            raise ValueError(
                "costs is 'estimate' (by class and shapes of layers) or 'measured' (their time). "
                f"Received: costs={self.costs!r}"
            )
        if self.costs == "measured" and self.stages != "auto":
            raise ValueError(
                "Measured costs are for stages='auto'; here the stages are given. Leave one of "
                f"them out. Received: costs='measured', stages={self.stages!r}"
            )

    def schedule_for(self, stages: int, whole_loss: str = "") -> Schedule:
        """The schedule for a number of stages, proved to run.

        Args:
            stages: Their number.
            whole_loss: Why the loss is one over the whole batch, "" if it is not.

        Raises:
            ValueError: It has no form for this number, or does not pass the proof; or the loss is
                one over the whole batch, and some backward comes before a forward.
        """
        known = self.schedule
        if known == "auto":
            known = "gpipe" if whole_loss else "1f1b"
        schedule = get_schedule(
            known, stages=stages, micro_batches=self.micro_batches, chunks=self.chunks
        )
        validate(schedule)
        if whole_loss and not schedule.forwards_first:
            raise ValueError(
                "A loss over the whole batch is there when all micro-batches have gone forward: "
                "until then no backward can begin. Leave the schedule to 'auto', use 'gpipe', or "
                "one whose stages have all forwards first. "
                f"Received: schedule={schedule.name!r}, and {whole_loss}"
            )
        return schedule

    @property
    def lists(self) -> bool:
        """Whether `stages` is a list of layers per stage."""
        return isinstance(self.stages, tuple)

    @property
    def needs_batch(self) -> bool:
        """Whether the model can be cut only when a batch has shown its shapes."""
        return self.lists or self.costs == "measured"

    @property
    def _unit(self) -> str:
        return "lists of layers" if self.lists else "patterns"

    def __str__(self) -> str:
        name = self.schedule.name if isinstance(self.schedule, Schedule) else self.schedule
        chunks = "" if self.chunks is None else f", {self.chunks} chunks"
        by = " by measured costs" if self.costs == "measured" else ""
        stages = f"auto{by}" if self.stages == "auto" else f"{len(self.stages)} {self._unit}"
        return f"{name}, {self.micro_batches} micro-batches{chunks}, stages {stages}"


def _is_lists(value: object) -> bool:
    rows = value if isinstance(value, list | tuple) else ()
    return bool(rows) and all(
        isinstance(row, list | tuple)
        and len(row) > 0
        and all(isinstance(layer, keras.layers.Layer) for layer in row)
        for row in rows
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
