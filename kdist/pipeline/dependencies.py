"""What an instruction waits for, and an order in which all of them can run.

An instruction starts once the instruction before it on its stage is done and its inputs have been
made. Sending does not wait for the receiver: a message that was sent stays until it is used. This
is how kdist runs a pipeline: transfers are edges of one graph, and TensorFlow's rendezvous keeps a
tensor until its receiver asks. For channels without buffers see `kdist.pipeline.communication`.
"""

from __future__ import annotations

import dataclasses

from kdist.pipeline.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
)
from kdist.pipeline.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Need:
    """Something that an instruction uses: the result of others on some virtual stage.

    Attributes:
        kinds: The instruction classes that make it, any one of them.
        virtual_stage: Where it is made.
        micro_batch: For which micro-batch.
    """

    kinds: tuple[type[Instruction], ...]
    virtual_stage: int
    micro_batch: int


def needs(one: Instruction, stages: int, chunks: int) -> tuple[Need, ...]:
    """What an instruction uses. Each is on its own virtual stage or on a neighbouring one."""
    here = one.virtual_stage(stages)
    if isinstance(one, Forward):
        return (Need((Forward,), here - 1, one.micro_batch),) if here else ()
    if isinstance(one, BackwardWeight):
        return (Need((BackwardInput,), here, one.micro_batch),)
    own = Need((Forward,), here, one.micro_batch)
    if here == stages * chunks - 1:
        return (own,)
    return (own, Need((Backward, BackwardInput), here + 1, one.micro_batch))


Key = tuple[type[Instruction], int, int]


class Dependencies:
    """The dependency graph of a schedule.

    Attributes:
        schedule: The schedule.
        made_by: Class, virtual stage and micro-batch of each instruction, to the instruction.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self._stages, self._chunks = schedule.num_stages, schedule.chunks
        self.made_by: dict[Key, Instruction] = {self.key(one): one for one in schedule}

    def key(self, one: Instruction) -> Key:
        """What identifies an instruction."""
        return type(one), one.virtual_stage(self._stages), one.micro_batch

    def needs(self, one: Instruction) -> tuple[Need, ...]:
        """What an instruction uses."""
        return needs(one, self._stages, self._chunks)

    def maker(self, need: Need) -> Instruction | None:
        """The instruction that makes what is needed, or None if the schedule has none."""
        found = (self.made_by.get((k, need.virtual_stage, need.micro_batch)) for k in need.kinds)
        return next((one for one in found if one is not None), None)

    def inputs(self, one: Instruction) -> tuple[Instruction, ...]:
        """The instructions whose results an instruction uses. All must be in the schedule."""
        makers = (self.maker(need) for need in self.needs(one))
        return tuple(maker for maker in makers if maker is not None)

    def rounds(self) -> tuple[list[list[Instruction]], list[int]]:
        """Runs the schedule: in each round every stage whose next instruction can run, runs it.

        Returns:
            The rounds, and how many instructions each stage has run. Where that is all of them, the
            rounds one after another are an order in which the schedule runs; else the rest waits
            for ever.
        """
        schedule = self.schedule
        done: set[Instruction] = set()
        position = [0] * schedule.num_stages
        rounds: list[list[Instruction]] = []
        while True:
            ready = []
            for row, index in zip(schedule.stages, position):
                if index < len(row) and self._can_run(row[index], done):
                    ready.append(row[index])
            if not ready:
                return rounds, position
            rounds.append(ready)
            done.update(ready)
            for one in ready:
                position[one.stage] += 1

    def _can_run(self, one: Instruction, done: set[Instruction]) -> bool:
        return all(self.maker(need) in done for need in self.needs(one))
