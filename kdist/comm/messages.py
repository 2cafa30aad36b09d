"""Messages of a collective, as data.

A collective over p devices is a list of rounds; a round is a set of messages, and in one round a
device sends at most one message and receives at most one (the *single-port* model). Nothing here
touches a device: `kdist.comm.algorithms` writes schedules, `kdist.comm.cost` prices them,
`kdist.comm.execute` carries them out.

What a device holds is a set of numbered *chunks*. What the numbers mean depends on the operation:

| operation | chunks |
| --- | --- |
| broadcast, reduce, all_reduce | pieces of the flattened value, `Schedule.pieces` of them |
| gather, all_gather, scatter, reduce_scatter | chunk j is the block of rank j |
| all_to_all | chunk s·p + d is what rank s has for rank d |
| scan | 0 (`RUNNING`): the sum so far that travels; 1 (`PREFIX`): the device's result |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

RUNNING, PREFIX = 0, 1


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message from a device to another.

    Attributes:
        source: Rank that sends.
        target: Rank that receives.
        chunks: The chunks that travel, together, as they are at the start of the round.
        combine: True if the target combines (adds, ...) them with its own; False if it keeps them.
        into: Chunks of the target that take what arrives; empty means those of the same numbers.
            With `into`, exactly one chunk travels.

    Example:
        >>> print(kdist.comm.Message(source=0, target=1, chunks=(2, 3), combine=True))
        0->1 +[2, 3]
    """

    source: int
    target: int
    chunks: tuple[int, ...]
    combine: bool = False
    into: tuple[int, ...] = ()

    def __str__(self) -> str:
        sign = "+" if self.combine else "="
        return f"{self.source}->{self.target} {sign}{list(self.chunks)}"


Rounds = tuple[tuple[Message, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """All messages of a collective over `size` devices.

    Attributes:
        operation: Such as `"all_reduce"`.
        algorithm: Such as `"ring"`.
        size: Number of devices p.
        root: Rank of the root, 0 where the operation has none.
        pieces: Into how many chunks a value, or a block, is cut.
        rounds: The messages, round after round.

    Raises:
        ValueError: If a round is not single-port, a rank does not exist or sends to itself, or a
            message carries no chunk, or several `into` others.

    Example:
        >>> print(kdist.comm.schedule("broadcast", "tree", 4))
        broadcast by tree, 4 devices, 3 messages in 2 rounds
        0: 0->2 =[0]
        1: 0->1 =[0]  2->3 =[0]
    """

    operation: str
    algorithm: str
    size: int
    root: int = 0
    pieces: int = 1
    rounds: Rounds = ()

    def __post_init__(self) -> None:
        for number, messages in enumerate(self.rounds):
            for role in ("source", "target"):
                ranks = [getattr(message, role) for message in messages]
                if len(set(ranks)) != len(ranks):
                    raise ValueError(
                        f"In one round a device is the {role} of at most one message. Put the "
                        f"messages into two rounds. Received: round {number}={messages}"
                    )
                if not all(0 <= rank < self.size for rank in ranks):
                    raise ValueError(
                        f"A {role} is a rank from 0 to {self.size - 1}. "
                        f"Received: round {number}={messages}"
                    )
            if any(not m.chunks or (m.into and len(m.chunks) != 1) for m in messages):
                raise ValueError(
                    "A message carries at least one chunk, and one alone `into` others. "
                    f"Received: round {number}={messages}"
                )
            if any(message.source == message.target for message in messages):
                raise ValueError(
                    "A device keeps what it has without a message. "
                    f"Received: round {number}={messages}"
                )

    @property
    def messages(self) -> tuple[Message, ...]:
        """Every message, in order."""
        return tuple(message for messages in self.rounds for message in messages)

    def sent_bytes(self, chunk_bytes: Sequence[float] | float) -> float:
        """Bytes on all wires together.

        Args:
            chunk_bytes: Bytes of each chunk, or of every chunk.
        """
        return sum(_bytes(message, chunk_bytes) for message in self.messages)

    def critical_bytes(self, chunk_bytes: Sequence[float] | float) -> float:
        """Bytes that must travel one after the other: the largest message of each round, summed."""
        return sum(
            max(_bytes(message, chunk_bytes) for message in messages) for messages in self.rounds
        )

    def __str__(self) -> str:
        count = len(self.messages)
        head = (
            f"{self.operation} by {self.algorithm}, {self.size} devices, "
            f"{count} message{'s' * (count != 1)} in {len(self.rounds)} "
            f"round{'s' * (len(self.rounds) != 1)}"
        )
        lines = [
            f"{number}: " + "  ".join(map(str, messages))
            for number, messages in enumerate(self.rounds)
        ]
        return "\n".join([head, *lines])


def _bytes(message: Message, chunk_bytes: Sequence[float] | float) -> float:
    if isinstance(chunk_bytes, int | float):
        return len(message.chunks) * chunk_bytes
    return sum(chunk_bytes[chunk] for chunk in message.chunks)


def transposed(rounds: Rounds, *, combine: bool) -> Rounds:
    """The messages backwards: the last round first, each from its target to its source.

    A broadcast becomes a reduce, a scatter a gather, an all-gather a reduce-scatter: each
    delivers along a tree, and the transpose collects along it. It is also the gradient.

    Args:
        rounds: Messages without `into`, in which no device gets a chunk twice.
        combine: Whether what arrives is combined.
    """
    return tuple(
        tuple(Message(m.target, m.source, m.chunks, combine) for m in messages)
        for messages in reversed(rounds)
    )


def with_chunks(rounds: Rounds, chunks: tuple[int, ...]) -> Rounds:
    """The same messages, each of them with all of some chunks."""
    return tuple(
        tuple(Message(m.source, m.target, chunks, m.combine) for m in messages)
        for messages in rounds
    )


def all_blocks(rounds: Rounds, p: int, *, of_source: bool) -> Rounds:
    """A gather or scatter in which block j is all that rank j sends, or all that it gets."""

    def blocks(chunks: tuple[int, ...]) -> tuple[int, ...]:
        if of_source:
            return tuple(j * p + d for j in chunks for d in range(p))
        return tuple(s * p + j for j in chunks for s in range(p))

    return tuple(
        tuple(Message(m.source, m.target, blocks(m.chunks), m.combine) for m in messages)
        for messages in rounds
    )


def rooted_at(rounds: Rounds, operation: str, algorithm: str, p: int, root: int) -> Rounds:
    """The same messages with another root: ranks shifted, on a hypercube by exclusive or."""

    def place(rank: int) -> int:
        return rank ^ root if algorithm == "hypercube" else (rank + root) % p

    blocks = operation in ("gather", "scatter")
    return tuple(
        tuple(
            Message(
                place(m.source),
                place(m.target),
                tuple(map(place, m.chunks)) if blocks else m.chunks,
                m.combine,
            )
            for m in messages
        )
        for messages in rounds
    )
