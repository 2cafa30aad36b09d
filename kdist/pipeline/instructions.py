"""The instructions of a pipeline schedule, and which of them feed which.

A model cut into `p * v` parts runs on `p` *stages* with `v` *chunks* each: chunk `c` of stage `s`
is *virtual stage* `c * p + s`, so that data goes round the stages `v` times. A schedule is the
order in which each stage computes; what is sent and received follows from it, see
`kdist.pipeline.communication`.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar


def as_index(value: Any) -> int | None:
    """An integer of any kind, NumPy's too, as Python's; None if it is none, or a boolean."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


@dataclasses.dataclass(frozen=True, order=True)
class Instruction:
    """One computation of one stage. Use the subclasses.

    Attributes:
        stage: Index of the stage that computes, from 0.
        micro_batch: Index of the micro-batch, from 0.
        chunk: Which of the stage's chunks, from 0.

    Raises:
        ValueError: If an index is not an integer from 0 on.

    Example:
    ```python
    from kdist.pipeline import Backward, Forward, Schedule

    rows = (Forward(0, 0), Backward(0, 0)), (Forward(1, 0), Backward(1, 0))
    print(Schedule(stages=rows))  # two stages, one micro-batch
    ```
    """

    stage: int
    micro_batch: int
    chunk: int = 0

    letter: ClassVar[str] = ""
    """How a cell of a CSV file or a chart names the kind."""

    kind: ClassVar[str] = ""
    """The kind in words, as in `kdist.pipeline.Event.kind`."""

    def __post_init__(self) -> None:
        for name in ("stage", "micro_batch", "chunk"):
            value = getattr(self, name)
            index = as_index(value)
            if index is None or index < 0:
                raise ValueError(
                    f"{name} of an instruction is an integer from 0 on. Received: {name}={value!r}"
                )
            object.__setattr__(self, name, index)

    def virtual_stage(self, stages: int) -> int:
        """Index of the part of the model that this computes, of `stages * chunks`."""
        return self.chunk * stages + self.stage

    def cell(self, stages: int) -> str:
        """The compact text of a schedule file, such as "0F1": virtual stage, kind, micro-batch."""
        return f"{self.virtual_stage(stages)}{self.letter}{self.micro_batch}"

    def __str__(self) -> str:
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        kind = self.kind.replace("_", " ")
        return f"{kind} of micro-batch {self.micro_batch} on stage {self.stage}{chunk}"


@dataclasses.dataclass(frozen=True, order=True)
class Forward(Instruction):
    """The forward pass; what the backward pass needs of it is kept."""

    letter = "F"
    kind = "forward"


@dataclasses.dataclass(frozen=True, order=True)
class Backward(Instruction):
    """The whole backward pass: gradients of the inputs and of the weights."""

    letter = "B"
    kind = "backward"


@dataclasses.dataclass(frozen=True, order=True)
class BackwardInput(Instruction):
    """The half of the backward pass that the stage before waits for: gradients of the inputs."""

    letter = "I"
    kind = "backward_input"


@dataclasses.dataclass(frozen=True, order=True)
class BackwardWeight(Instruction):
    """The half of the backward pass that nobody waits for: gradients of the weights."""

    letter = "W"
    kind = "backward_weight"


KINDS: dict[str, type[Instruction]] = {
    kind.letter: kind for kind in (Forward, Backward, BackwardInput, BackwardWeight)
}
"""Instruction class by its letter."""


@dataclasses.dataclass(frozen=True, order=True)
class WeightInstruction:
    """What a stage does with weights between two computations. Use the subclasses.

    Attributes:
        stage: Index of the stage, from 0.
        weights: Positions among the model's trainable weights.
        chunk: For which of the stage's chunks.

    Example:
    ```python
    from kdist.pipeline import Gather

    print(Gather(stage=0, weights=(0, 1)))  # gather of weights [0, 1] on stage 0
    ```
    """

    stage: int
    weights: tuple[int, ...]
    chunk: int = 0

    letter: ClassVar[str] = ""
    """How a row and a chart name the kind."""

    kind: ClassVar[str] = ""
    """The kind in words, as in `kdist.pipeline.Event.kind`."""

    def cell(self, stages: int) -> str:
        """Compact text, such as "2G(4,5)": virtual stage, kind, weights."""
        weights = ",".join(map(str, self.weights))
        return f"{self.chunk * stages + self.stage}{self.letter}({weights})"

    def __str__(self) -> str:
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind} of weights {list(self.weights)} on stage {self.stage}{chunk}"


@dataclasses.dataclass(frozen=True, order=True)
class Gather(WeightInstruction):
    """Weights of which the stage's replicas store parts come whole to each, as one message."""

    letter = "G"
    kind = "gather"


@dataclasses.dataclass(frozen=True, order=True)
class Free(WeightInstruction):
    """What was gathered of weights is let go."""

    letter = "X"
    kind = "free"


@dataclasses.dataclass(frozen=True, order=True)
class Penalty(WeightInstruction):
    """Penalties of weights and their gradients, which count once: on the first replica."""

    letter = "P"
    kind = "penalty"


@dataclasses.dataclass(frozen=True, order=True)
class Reduce(WeightInstruction):
    """Gradients are complete: they are summed over the replicas, with the buckets they complete."""

    letter = "R"
    kind = "reduce"


@dataclasses.dataclass(frozen=True, order=True)
class Await(WeightInstruction):
    """The stage goes on when gradients have been summed, so that they are freed."""

    letter = "A"
    kind = "await"


@dataclasses.dataclass(frozen=True, order=True)
class Update(WeightInstruction):
    """The optimizer uses sums; new values are written wherever the weights are stored."""

    letter = "U"
    kind = "update"
