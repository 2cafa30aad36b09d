"""Sums and values that go between processes by the messages of `kdist.plan.routes`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kdist.comm.execute import ChunkSlot, Held, Row, run
from kdist.plan.routes import Route, routes
from kdist.storage import nccl
from kdist.storage.transfer import Sent, added, process_of

import tensorflow as tf


def summed(
    parts: Sequence[Any], devices: Sequence[str], at: str, algorithm: str, name: str, turn: int = 0
) -> Any:
    """The sum of tensors of one shape, on a device: each process adds up its own first.

    Args:
        parts: The tensors, more than one.
        devices: Where each of them is.
        at: The device that gets the sum.
        algorithm: How it goes between processes.
        name: Of the operations, for graphs and profiles.
        turn: Which of a process's devices adds up; see `kdist.storage.transfer.added`.
    """
    if not tf.executing_eagerly() and nccl.adds_up(devices, at, parts[0].dtype):
        return nccl.summed(parts, devices, at, name)
    mine: dict[Any, list[int]] = {}
    for number, device in enumerate(devices):
        mine.setdefault(process_of(device), []).append(number)
    ranks = list(dict.fromkeys([*mine, process_of(at)]))
    root, width = ranks.index(process_of(at)), min(map(len, mine.values()))
    shape = parts[0].shape
    made = routes("reduce", algorithm, len(ranks), root, shape.num_elements() or 0, width)
    if len(mine) < 2 or not made:
        with tf.device(at):
            return added(parts, devices, name, turn)
    cut = [_cut(part, device, made) for part, device in zip(parts, devices)]
    found = []
    for i, one in enumerate(made):
        # On a torus, device i of each process adds up part i.
        place = {p: devices[numbers[(turn + i) % len(numbers)]] for p, numbers in mine.items()}
        if len(made) == 1:
            place[process_of(at)] = at
        rows = tuple(place.get(process, at) for process in ranks)
        held: Held = [{} for _ in ranks]
        for rank, process in enumerate(ranks):
            terms = [cut[n][i] for n in mine.get(process, ())]
            with tf.device(rows[rank]):
                total = tf.add_n(terms, name=name) if terms else tf.zeros_like(cut[0][i])
            held[rank] = _chunks(total, rows[rank], one.sizes)
        run(one.schedule, held, _row(rows, "reduce"))
        found.append(_joined(held[root], rows[root]))
    with tf.device(at):
        return tf.reshape(found[0] if len(found) == 1 else tf.concat(found, 0), shape, name=name)


class Routed(Sent):
    """A tensor that devices of several processes read, and pass on to each other.

    Args:
        value: The tensor.
        source: The device that it is on.
        algorithm: How it goes between processes.
        targets: The devices that will read it.
    """

    def __init__(self, value: Any, source: str, algorithm: str, targets: Iterable[str]) -> None:
        super().__init__(value, source)
        near = process_of(source)
        places: dict[Any, list[str]] = {near: [source]}
        for device in targets:
            if device != source:
                places.setdefault(process_of(device), []).append(device)
        width, count = min(map(len, places.values())), value.shape.num_elements() or 0
        made = routes("broadcast", algorithm, len(places), 0, count, width)
        if made:
            self._arrived |= self._carry(made, places)

    def _carry(self, made: Sequence[Route], places: Mapping[Any, Sequence[str]]) -> dict[Any, Any]:
        """The value in each other process, on the first device there."""
        ranks, parts = list(places), _cut(self.value, next(iter(places.values()))[0], made)
        found: list[list[Any]] = [[] for _ in ranks]
        for i, (one, part) in enumerate(zip(made, parts)):
            rows = tuple(places[process][i % len(places[process])] for process in ranks)
            held: Held = [_chunks(part, rows[0], one.sizes), *({} for _ in ranks[1:])]
            run(one.schedule, held, _row(rows, "broadcast"))
            for rank in range(1, len(ranks)):
                found[rank].append(_joined(held[rank], rows[rank]))
        whole = {}
        for process, vectors in zip(ranks[1:], found[1:]):
            with tf.device(places[process][0]):
                joined = vectors[0] if len(vectors) == 1 else tf.concat(vectors, 0)
                whole[process] = tf.reshape(joined, self.value.shape)
        return whole


def _row(devices: tuple[str, ...], operation: str) -> Row:
    local = (True,) * len(devices)
    return Row(devices=devices, local=local, operation=operation, axis="processes")


def _cut(value: Any, device: str, made: Sequence[Route]) -> list[Any]:
    """A tensor as one vector per route."""
    with tf.device(device):
        flat = tf.reshape(value, [-1])
        return [flat] if len(made) == 1 else tf.split(flat, [sum(one.sizes) for one in made])


def _chunks(vector: Any, device: str, sizes: Sequence[int]) -> dict[int, ChunkSlot]:
    """What a rank has, chunk by chunk."""
    with tf.device(device):
        cut = [vector] if len(sizes) == 1 else tf.split(vector, list(sizes))
    return {number: ChunkSlot([one]) for number, one in enumerate(cut)}


def _joined(chunks: Mapping[int, ChunkSlot], device: str) -> Any:
    with tf.device(device):
        values = [chunks[n].read(tf.add_n) for n in sorted(chunks)]
        return values[0] if len(values) == 1 else tf.concat(values, 0)
