"""Times collectives, and counts wrong values, on the devices at hand."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.comm import collectives, ordered
from kdist.comm.group import Group

import numpy as np
import tensorflow as tf

# Values are 1, 2, 3: their sums over any usual number of devices are exact in every dtype. They
# come in another order on each rank, with a long period: no piece looks like another.
_VALUES, _PERIOD = (1, 2, 3), 997


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One collective, timed.

    Attributes:
        operation: Such as "all_reduce".
        algorithm: Such as "ring".
        nbytes: Size of the full buffer, as `cost.predict` takes it.
        devices: Number of ranks p.
        seconds: Median time of a run.
        wrong: Number of elements, over all devices of the group, that differ from numpy's.
    """

    operation: str
    algorithm: str
    nbytes: int
    devices: int
    seconds: float
    wrong: int

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the full buffer per second."""
        return self.nbytes / self.seconds

    @property
    def bus_bandwidth(self) -> float | None:
        """Algorithm bandwidth times what the slowest link carries; None where none is usual.

        2(p - 1)/p for all_reduce, (p - 1)/p for reduce_scatter, all_gather and all_to_all, 1 for
        broadcast and reduce, as in nccl-tests; gather and scatter have none here.
        """
        factor = bus_factor(self.operation, self.devices)
        return None if factor is None else factor * self.algorithm_bandwidth


def bus_factor(operation: str, p: int) -> float | None:
    """By what an algorithm bandwidth becomes a bus bandwidth; None where there is no factor."""
    if operation == "all_reduce":
        return 2 * (p - 1) / p
    if operation in ("reduce_scatter", "all_gather", "all_to_all"):
        return (p - 1) / p
    return 1.0 if operation in ("broadcast", "reduce") else None


def median_seconds(call: Callable[[], Any], iterations: int) -> float:
    """Median time of a call, after one that is not counted."""
    call()
    seconds = []
    for _ in range(iterations):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


class DeviceProgram:
    """A function from variables of devices to variables of the same devices.

    Calling it runs it once and waits until it is done.

    Args:
        values: Arrays for each device.
        compute: From the tensors of each device to a tensor, or None, on each device.

    Attributes:
        targets: What the last call left on each device.
    """

    def __init__(
        self,
        values: Mapping[str, Sequence[np.ndarray]],
        compute: Callable[[list[list[tf.Tensor]]], Sequence[tf.Tensor | None]],
    ) -> None:
        self.targets: list[tf.Variable] = []
        self._sources: list[list[tf.Variable]] = []
        for device, arrays in values.items():
            with tf.device(device):
                self._sources.append([tf.Variable(array) for array in arrays])
                free = tf.zeros([0], arrays[0].dtype)
                self.targets.append(tf.Variable(free, shape=tf.TensorShape([None])))

        def program() -> None:
            given = []
            for mine, device in zip(self._sources, values):
                with tf.device(device):
                    given.append([source.read_value() for source in mine])
            for result, target, device in zip(compute(given), self.targets, values):
                if result is not None:
                    with tf.device(device):
                        target.assign(result)

        self._program = tf.function(program, autograph=False).get_concrete_function()

    def __call__(self) -> None:
        """Runs it once."""
        self._program()
        tf.test.experimental.sync_devices()  # a GPU returns before it has finished

    @property
    def graph(self) -> tf.Graph:
        """What it runs."""
        return self._program.graph


def copy_seconds(nbytes: int, iterations: int = 5) -> float:
    """Time that numpy takes to copy an array: what a pass over memory costs on this machine."""
    array = np.ones(nbytes, np.uint8)
    return median_seconds(array.copy, iterations)


def measure(
    operation: str,
    algorithm: str,
    nbytes: int,
    group: Group,
    dtype: str = "float32",
    iterations: int = 5,
) -> Measurement:
    """Times one collective in a `tf.function`, from variables to variables of the devices.

    Args:
        operation: One of `algorithms.OPERATIONS`.
        algorithm: One of `algorithms.ALGORITHMS`, "auto" or "runtime".
        nbytes: Size of the full buffer; rounded up so that it divides by the devices.
        group: The devices. Across processes, every process calls this alike.
        dtype: Of the values.
        iterations: Timed runs.

    Returns:
        The measurement.

    Raises:
        ValueError: For a size or a number of runs that is not an integer of at least 1, and as the
            operation itself.
    """
    check_positive(nbytes=nbytes, iterations=iterations)
    p, size = group.size, tf.as_dtype(dtype).size
    length = max(1, -(-nbytes // (size * p))) * p
    own = length // p if operation in ("gather", "all_gather") else length
    ranks = {position: rank for row in group.rows for rank, position in enumerate(row)}
    local = [ranks[position] for position in group.local]
    given = {
        device: [_values(own, rank, dtype)] for rank, device in zip(local, group.local_devices)
    }
    function = getattr(ordered if operation == "scan" else collectives, operation)
    program = DeviceProgram(
        given, lambda values: function([mine for (mine,) in values], group, algorithm=algorithm)
    )
    seconds = median_seconds(program, iterations)
    wrong = [
        _differing(target.numpy(), _expected(operation, own, rank, p, dtype))
        if operation not in ("reduce", "gather") or rank == 0
        else 0
        for rank, target in zip(local, program.targets)
    ]
    return Measurement(
        operation=operation,
        algorithm=algorithm,
        nbytes=length * size,
        devices=p,
        seconds=seconds,
        wrong=_total(wrong, group),
    )


def check_positive(**numbers: Any) -> None:
    """Refuses what is not an integer of at least 1."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(
                f"`{name}` of a measurement is an integer of at least 1. "
                f"Received: {name}={number!r}"
            )


def _differing(found: np.ndarray, expected: np.ndarray) -> int:
    return expected.size if found.shape != expected.shape else int(np.sum(found != expected))


def _total(counts: list[int], group: Group) -> int:
    """Over the devices of this process, or over those of all processes."""
    if not group.crosses_processes:
        return sum(counts)
    given = []
    for count, device in zip(counts, group.local_devices):
        with tf.device(device):
            given.append(tf.constant([count], tf.int64))
    return int(collectives.all_reduce(given, group)[0][0])


def _values(length: int, rank: int, dtype: str) -> np.ndarray:
    return _repeated(_order(rank), length, dtype)


def _order(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).choice(_VALUES, _PERIOD)


def _repeated(period: np.ndarray, length: int, dtype: str) -> np.ndarray:
    return np.resize(period.astype(tf.as_dtype(dtype).as_numpy_dtype), length)


def _expected(operation: str, own: int, rank: int, p: int, dtype: str) -> np.ndarray:
    if operation in ("broadcast", "scatter"):
        value = _values(own, 0, dtype)
        return value if operation == "broadcast" else np.split(value, p)[rank]
    if operation in ("gather", "all_gather"):
        return np.concatenate([_values(own, r, dtype) for r in range(p)])
    if operation == "all_to_all":
        return np.concatenate([np.split(_values(own, r, dtype), p)[rank] for r in range(p)])
    count = rank + 1 if operation == "scan" else p
    period = sum(map(_order, range(count)))
    total = _repeated(np.asarray(period), own, dtype)
    return np.split(total, p)[rank] if operation == "reduce_scatter" else total
