"""Carries schedules out: each message becomes one transfer, each combine one operation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.comm import processes
from kdist.comm.messages import Message, Schedule
from kdist.sharding.mesh import Device

import tensorflow as tf

Shape = Sequence[Any]  # integers, or scalar tensors where a size is not known before the run
Fold = Callable[[list[tf.Tensor]], tf.Tensor]
Finish = Callable[[tf.Tensor], tf.Tensor]

FOLDS: dict[str, Fold] = {
    # One pass over all terms, where a chain of additions would write every partial sum.
    "sum": lambda terms: tf.add_n(terms),
    "product": lambda terms: functools.reduce(tf.multiply, terms),
    "max": lambda terms: functools.reduce(tf.maximum, terms),
    "min": lambda terms: functools.reduce(tf.minimum, terms),
}


class ChunkSlot:
    """One chunk on one device: terms that are combined when it is read."""

    def __init__(self, terms: Sequence[tf.Tensor], finished: bool = False) -> None:
        self.terms = list(terms)
        self.finished = finished

    def read(self, fold: Fold, finish: Finish | None = None) -> tf.Tensor:
        """Its value; call it in the scope of its device.

        Args:
            fold: Combines terms.
            finish: Applied, once, to a value that nothing is combined with any more.
        """
        if len(self.terms) > 1:
            self.terms = [fold(self.terms)]
        if finish is not None and not self.finished:
            self.terms, self.finished = [finish(self.terms[0])], True
        return self.terms[0]


Held = list[dict[int, ChunkSlot]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One group of devices in which one collective runs.

    Attributes:
        devices: Device of each rank.
        local: Whether each rank is in this process.
        operation: Name of the operation, for errors and keys.
        axis: Name of the mesh axis.
        about: Text that tells this communication from others in the process.
        timeout_seconds: For messages between processes.
        started: Messages between processes that were started.
    """

    devices: tuple[str, ...]
    local: tuple[bool, ...]
    operation: str
    axis: str
    about: str = ""
    timeout_seconds: float = processes.TIMEOUT_SECONDS
    started: list[tf.Operation] = dataclasses.field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @property
    def ranks(self) -> list[int]:
        """Those in this process."""
        return [rank for rank, here in enumerate(self.local) if here]

    def on(self, rank: int) -> Any:
        """The device scope of a rank."""
        return tf.device(self.devices[rank])

    def move(
        self, message: Message, number: int, value: tf.Tensor | None, spec: tuple[Shape, str] | None
    ) -> tf.Tensor | None:
        """Carries one message.

        Args:
            message: From whom to whom.
            number: Of its round.
            value: What travels; None where the source is elsewhere.
            spec: Its shape and dtype; None where the source is here.

        Returns:
            The value on the target, None where that is elsewhere.
        """
        source, target = self.devices[message.source], self.devices[message.target]
        if value is not None and self.local[message.target]:
            with self.on(message.target):
                return tf.identity(value)
        about = f"{self.about}|{number}"
        if value is not None:
            name = processes.node_name(self.operation, self.axis, "to", target, number)
            with self.on(message.source):
                self.started.append(
                    processes.send(value, source, target, about, name, self.timeout_seconds)
                )
            return None
        assert spec is not None
        name = processes.node_name(self.operation, self.axis, "from", source, number)
        with self.on(message.target):
            arrived = processes.receive(*spec, source, target, about, name, self.timeout_seconds)
        self.started.append(arrived.op)
        return arrived


def run(
    schedule: Schedule,
    held: Held,
    row: Row,
    *,
    fold: Fold = FOLDS["sum"],
    finish: Finish | None = None,
    remote: tuple[Mapping[int, Shape], str] | None = None,
) -> None:
    """Carries a schedule out, for the ranks of this process.

    Args:
        schedule: Its messages.
        held: For each rank, its chunks; empty for ranks elsewhere. Changed in place.
        row: The devices.
        fold: Combines terms of a chunk.
        finish: Applied to a complete chunk before it is spread.
        remote: Shape of each chunk, and the dtype, where ranks are in other processes.
    """
    for number, messages in enumerate(schedule.rounds):
        near = [m for m in messages if row.local[m.source] or row.local[m.target]]
        # What a message carries is what was there before its round.
        values = [_read(m, held, row, fold, finish) for m in near]
        for message, tensors in zip(near, values):
            parts = _carry(message, number, tensors, row, remote)
            if parts is not None:
                _deliver(message, parts, held[message.target])


def _read(
    message: Message, held: Held, row: Row, fold: Fold, finish: Finish | None
) -> list[tf.Tensor] | None:
    if not row.local[message.source]:
        return None
    mine = held[message.source]
    with row.on(message.source):
        return [mine[c].read(fold, None if message.combine else finish) for c in message.chunks]


def _carry(
    message: Message,
    number: int,
    tensors: list[tf.Tensor] | None,
    row: Row,
    remote: tuple[Mapping[int, Shape], str] | None,
) -> list[tf.Tensor] | None:
    """Several chunks travel as one flat tensor."""
    if len(message.chunks) == 1:
        spec = None if tensors else (remote[0][message.chunks[0]], remote[1])  # type: ignore[index]
        arrived = row.move(message, number, tensors[0] if tensors else None, spec)
        return None if arrived is None else [arrived]
    if tensors is not None:
        with row.on(message.source):
            shapes: list[Shape] = [shape_of(tensor) for tensor in tensors]
            flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
        arrived = row.move(message, number, flat, None)
    else:
        assert remote is not None
        shapes = [remote[0][chunk] for chunk in message.chunks]
        arrived = row.move(message, number, None, ([sum(map(_count, shapes))], remote[1]))
    if arrived is None:
        return None
    with row.on(message.target):
        parts = tf.split(arrived, [_count(shape) for shape in shapes])
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes)]


def _deliver(message: Message, parts: list[tf.Tensor], mine: dict[int, ChunkSlot]) -> None:
    for chunk, part in zip(message.chunks, parts):
        for into in message.into or (chunk,):
            if message.combine and into in mine:
                mine[into].terms.append(part)
            else:
                mine[into] = ChunkSlot([part], finished=not message.combine)


def shape_of(tensor: Any) -> Shape:
    """Its shape: integers where they are known, else scalar tensors."""
    if tensor.shape.is_fully_defined():
        return tuple(tensor.shape)
    dynamic = tf.shape(tensor)
    return [
        dynamic[dim] if size is None else size for dim, size in enumerate(tensor.shape.as_list())
    ]


def _count(shape: Shape) -> Any:
    """Number of elements."""
    return functools.reduce(lambda a, b: a * b, shape, 1)


def task_of(device: str) -> tuple[str, int]:
    """The process of a device."""
    return Device.parse(device).process
