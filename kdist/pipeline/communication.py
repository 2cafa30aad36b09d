"""What stages send each other, and an order of sends and receives that cannot deadlock.

Only neighbouring stages talk, in a ring: stage s sends activations to stage s + 1 (from the last
to the first between chunks) and gradients the other way.

Two ways of sending. *Buffered*: a send returns at once, the message waits for its receiver; any
schedule without a cycle runs (see `kdist.pipeline.dependencies`). *Rendezvous*: a send returns when
the other side receives, as collectives across processes with a fixed order per device do. There the
order matters: 1F1B that receives just before use and sends just after deadlocks, because one stage
sends an activation while its neighbour sends a gradient. `stage_actions` avoids this: it runs the
schedule in rounds, and writes each message down for both its sides at the same moment. So all lists
are parts of one global order; the first message of that order that has not been exchanged always
has both its sides ready for it, hence no stage waits for ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kdist.pipeline.dependencies import Dependencies
from kdist.pipeline.instructions import BackwardWeight, Forward, Instruction
from kdist.pipeline.schedule import Schedule
from kdist.pipeline.validate import validate


@dataclasses.dataclass(frozen=True)
class Message:
    """What one instruction makes and one on another stage uses.

    Attributes:
        source: The instruction that makes it.
        target: The instruction that uses it.

    Example:
    ```python
    from kdist.pipeline import Forward, Message

    print(Message(Forward(0, 2), Forward(1, 2)))
    # activation of micro-batch 2 from stage 0 to stage 1
    ```
    """

    source: Instruction
    target: Instruction

    @property
    def content(self) -> str:
        """What it carries: "activation" on the way forward, "gradient" on the way back."""
        return "activation" if isinstance(self.source, Forward) else "gradient"

    def __str__(self) -> str:
        return (
            f"{self.content} of micro-batch {self.source.micro_batch} from stage "
            f"{self.source.stage} to stage {self.target.stage}"
        )


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One side of a message. Use the subclasses.

    Attributes:
        message: What is sent and received.
    """

    message: Message

    letter: ClassVar[str] = ""
    """How a row and a chart name the kind."""

    kind: ClassVar[str] = ""
    """The kind in words."""

    def __str__(self) -> str:
        return f"{self.kind} of the {self.message}"


class Send(Transfer):
    """A stage sends a message.

    Example:
    ```python
    from kdist.pipeline import Forward, Message, Send

    print(Send(Message(Forward(0, 2), Forward(1, 2))).cell(stages=2))  # 0F2>1
    ```
    """

    letter, kind = ">", "send"

    @property
    def stage(self) -> int:
        """Index of the stage that sends."""
        return self.message.source.stage

    def cell(self, stages: int) -> str:
        """Compact text, such as "0F2>1": what is sent, and to which virtual stage."""
        message = self.message
        return f"{message.source.cell(stages)}>{message.target.virtual_stage(stages)}"


class Receive(Transfer):
    """A stage receives a message.

    Example:
    ```python
    from kdist.pipeline import Forward, Message, Receive

    print(Receive(Message(Forward(0, 2), Forward(1, 2))).cell(stages=2))  # 1<0F2
    ```
    """

    letter, kind = "<", "receive"

    @property
    def stage(self) -> int:
        """Index of the stage that receives."""
        return self.message.target.stage

    def cell(self, stages: int) -> str:
        """Compact text, such as "1<0F2": which virtual stage receives what."""
        message = self.message
        return f"{message.target.virtual_stage(stages)}<{message.source.cell(stages)}"


Action = Instruction | Send | Receive
MESSAGES = (Receive.letter, Send.letter)
"""How charts name what is done with messages."""


def incoming(schedule: Schedule) -> dict[Instruction, Message]:
    """For each instruction that uses something of another stage, the message that brings it.

    An instruction receives at most one message: a forward the activations, a backward the
    gradients. With one stage there are none.
    """
    dependencies = Dependencies(schedule)
    return {
        one: Message(maker, one)
        for one in schedule
        for maker in dependencies.inputs(one)
        if maker.stage != one.stage
    }


def with_transfers(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Instructions, sends and receives of each stage, where sending waits for nobody.

    A stage sends what it made at once, and receives just before use.

    Args:
        schedule: A schedule, or the forwards of one.

    Returns:
        One tuple per stage. The instructions keep their order.
    """
    arriving = incoming(schedule)
    leaving = {message.source: message for message in arriving.values()}

    def actions(row: Sequence[Instruction]) -> Iterator[Action]:
        for one in row:
            if one in arriving:
                yield Receive(arriving[one])
            yield one
            if one in leaving:
                yield Send(leaving[one])

    return tuple(tuple(actions(row)) for row in schedule.stages)


def stage_actions(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Instructions, sends and receives of each stage, in an order that needs no buffers.

    Args:
        schedule: A schedule that `validate` accepts.

    Returns:
        One tuple per stage. The instructions keep their order.

    Raises:
        ValueError: If the schedule cannot run.

    Example:
    ```python
    from kdist.pipeline import get_schedule, stage_actions

    for action in stage_actions(get_schedule("1f1b", stages=2, micro_batches=2))[0]:
        print(action)
    ```
    """
    validate(schedule)
    outgoing = {message.source: message for message in incoming(schedule).values()}
    lists: list[list[Action]] = [[] for _ in schedule.stages]
    rounds, _ = Dependencies(schedule).rounds()
    for ready in rounds:
        for one in ready:
            lists[one.stage].append(one)
        for one in ready:
            if one in outgoing:
                message = outgoing[one]
                lists[one.stage].append(Send(message))
                lists[message.target.stage].append(Receive(message))
    return tuple(map(tuple, lists))


def check_actions(actions: Sequence[Sequence[Action]]) -> None:
    """Executes lists of actions over channels without buffers, to prove that they come to an end.

    A send and the receive of the same message happen together, when each is the next action of its
    stage. An instruction of the lists runs when it is next; what it uses must have been received.

    Args:
        actions: One list per stage, such as those of `stage_actions`.

    Raises:
        ValueError: Naming what each stage waits in, or the instruction that uses what its stage
            has not received.

    Example:
    ```python
    from kdist.pipeline import check_actions, get_schedule, stage_actions

    check_actions(stage_actions(get_schedule("1f1b", stages=2, micro_batches=2)))
    ```
    """
    wanted = {a.message.target: a.message for row in actions for a in row if isinstance(a, Send)}
    position = [0] * len(actions)
    received: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(actions):
            while position[stage] < len(row) and _advance(
                stage, actions, position, received, wanted
            ):
                moved = True
    waiting = [
        f"stage {stage} waits in the {row[i]}"
        for stage, (row, i) in enumerate(zip(actions, position))
        if i < len(row)
    ]
    if waiting:
        raise ValueError(
            f"Deadlock without buffers: {'; '.join(waiting)}. Put each receive where its sender "
            "sends, as kdist.pipeline.stage_actions does, or use buffered sends. "
            f"Received: actions of {len(actions)} stages"
        )


def _advance(
    stage: int,
    actions: Sequence[Sequence[Action]],
    position: list[int],
    received: set[Message],
    wanted: dict[Instruction, Message],
) -> bool:
    """Does the next action of a stage if it can be done, together with its other side."""
    action = actions[stage][position[stage]]
    if isinstance(action, Instruction):
        message = None if isinstance(action, BackwardWeight) else wanted.get(action)
        if message is not None and message not in received:
            raise ValueError(
                f"Stage {stage} runs the {action} before it receives the {message}. Put the "
                f"receive before it. Received: actions of {len(actions)} stages"
            )
        position[stage] += 1
        return True
    message = action.message
    other = message.target.stage if isinstance(action, Send) else message.source.stage
    counterpart = Receive(message) if isinstance(action, Send) else Send(message)
    if position[other] >= len(actions[other]) or actions[other][position[other]] != counterpart:
        return False
    received.add(message)
    position[stage] += 1
    position[other] += 1
    return True
