"""What a collective costs: a message of l bytes takes a + b·l seconds.

The model is the classic one (Hockney; Chan, Heimlich, Purkayastha, van de Geijn 2007): a is the
start-up time, b the time per byte, a device sends one message and receives one at a time. The time
of a schedule is then a times its rounds plus b times the largest message of each round. `terms`
says both numbers in closed form; tests hold them to the messages of `kdist.comm.algorithms`. Where
all devices share one process's cores and memory, `kdist.comm.host` counts work instead.

This module touches no device, so that plans for any number of them can use it.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from kdist.comm import torus
from kdist.comm.algorithms import ALGORITHMS, check


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkCost:
    """The two constants of a link.

    Attributes:
        a: Start-up time of a message, seconds.
        b: Time per byte, seconds.
        error: Median relative error of the predictions on the measurements that a and b were
            fitted to; None if they were given.

    Raises:
        ValueError: If a or b is negative or not finite.

    Example:
        >>> print(kdist.comm.LinkCost(a=20e-6, b=1e-10))
        message time 20.0 us + 0.100 ns per byte (10.00 GB/s)
    """

    a: float
    b: float
    error: float | None = None

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of what is measured."""
        return ("a", "b")

    def __post_init__(self) -> None:
        for name in self.constants:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise ValueError(
                    f"`{name}` of a link is a finite number, not negative. Measure it "
                    f"with kdist.comm.calibrate(). Received: {name}={value!r}"
                )

    def message(self, nbytes: float) -> float:
        """Seconds of one message of some bytes: a + b * nbytes."""
        return self.a + self.b * nbytes

    def seconds(self, operation: str, algorithm: str, nbytes: float, p: int) -> float:
        """Seconds of a collective; see `predict`."""
        startups, share = terms(operation, algorithm, p)
        return self.a * startups + self.b * share * nbytes

    def __str__(self) -> str:
        speed = f" ({1e-9 / self.b:.2f} GB/s)" if self.b else ""
        error = "" if self.error is None else f", median error {self.error:.0%}"
        return f"message time {self.a * 1e6:.1f} us + {self.b * 1e9:.3f} ns per byte{speed}{error}"


# Of the order of what two processes of one machine reach over loopback.
DEFAULT_LINK = LinkCost(a=1e-3, b=2e-9)


def predict(operation: str, algorithm: str, nbytes: float, p: int, link: LinkCost) -> float:
    """Seconds that an operation takes.

    Args:
        operation: One of `algorithms.OPERATIONS`.
        algorithm: One of `algorithms.ALGORITHMS`, or a torus.
        nbytes: Size of the full buffer, as in the tables of nccl-tests: the value of broadcast,
            reduce, all_reduce, scan; of gather and all_gather the joined result, of scatter what
            is cut; of reduce_scatter and all_to_all the input of each device. With l bytes per
            device in gather, all_gather and scatter, it is p·l.
        p: Number of devices.
        link: The constants; those of a `HostCost` are of work in one process, not of messages.

    Returns:
        Seconds.

    Raises:
        ValueError: For what `algorithms.schedule` refuses, or a size that is negative or not
            finite.

    Example:
        >>> link = kdist.comm.LinkCost(a=1e-5, b=1e-10)
        >>> round(kdist.comm.predict("all_reduce", "ring", 64e6, 8, link), 5)
        0.01134
    """
    number = isinstance(nbytes, int | float) and not isinstance(nbytes, bool)
    if not number or not math.isfinite(nbytes) or nbytes < 0:
        raise ValueError(
            f"A size in bytes is a finite number, not negative. Received: nbytes={nbytes!r}"
        )
    check(operation, algorithm, p)
    return link.seconds(operation, algorithm, nbytes, p)


def cheapest(operation: str, nbytes: float, p: int, link: LinkCost) -> str:
    """The algorithm with the smallest predicted time; the first of `ALGORITHMS` among equals.

    Args:
        operation: See `predict`.
        nbytes: See `predict`.
        p: Number of devices.
        link: See `predict`.

    Example:
        >>> link = kdist.comm.LinkCost(a=1e-5, b=1e-10)
        >>> [kdist.comm.cheapest("all_reduce", nbytes, 8, link) for nbytes in (1e3, 1e8)]
        ['hypercube', 'halving']
    """
    check(operation, ALGORITHMS[0], p)
    usable = [name for name in ALGORITHMS if name != "hypercube" or not p & (p - 1)]
    return min(usable, key=lambda name: predict(operation, name, nbytes, p, link))


@functools.lru_cache(maxsize=1024, typed=True)
def terms(operation: str, algorithm: str, p: int) -> tuple[int, float]:
    """The two factors of a prediction: a·startups + b·share·nbytes.

    Args:
        operation: One of `algorithms.OPERATIONS`.
        algorithm: One of `algorithms.ALGORITHMS`.
        p: Number of devices.

    Returns:
        (startups, share): rounds, and bytes that travel one after the other as a multiple of the
        full buffer.

    Raises:
        ValueError: For what `algorithms.schedule` refuses.
    """
    check(operation, algorithm, p)
    if p == 1:
        return 0, 0.0
    log = (p - 1).bit_length()  # log₂ p, rounded up
    rest = (p - 1) / p
    return {
        "broadcast": _to_or_from_one,
        "reduce": _to_or_from_one,
        "gather": _blocks_to_or_from_one,
        "scatter": _blocks_to_or_from_one,
        "all_gather": _blocks_of_all,
        "reduce_scatter": _blocks_of_all,
        "all_reduce": _all_reduce,
        "all_to_all": _all_to_all,
        "scan": _scan,
    }[operation](algorithm, p, log, rest)


def _to_or_from_one(algorithm: str, p: int, log: int, rest: float) -> tuple[int, float]:
    """Broadcast and reduce."""
    if algorithm == "direct":
        return p - 1, p - 1
    if algorithm == "ring":
        return 2 * (p - 1), 2 * rest
    if algorithm == "halving":
        return _sum((log, rest), _halving(p))
    return log, log


def _blocks_to_or_from_one(algorithm: str, p: int, log: int, rest: float) -> tuple[int, float]:
    """Gather and scatter."""
    return (p - 1 if algorithm in ("direct", "ring") else log), rest


def _blocks_of_all(algorithm: str, p: int, log: int, rest: float) -> tuple[int, float]:
    """All-gather and reduce-scatter."""
    if algorithm == "tree":
        # Gather, then broadcast of the joined blocks; reduce, then scatter.
        return 2 * log, rest + log
    if algorithm == "halving":
        return _halving(p)
    return (log if algorithm == "hypercube" else p - 1), rest


def _all_reduce(algorithm: str, p: int, log: int, rest: float) -> tuple[int, float]:
    if torus.is_torus(algorithm):
        return 2 * (sum(torus.sides(algorithm, p)) - 2), 2 * rest
    if algorithm == "direct":
        return 2 * (p - 1), 2 * (p - 1)
    if algorithm == "ring":
        return 2 * (p - 1), 2 * rest
    if algorithm == "halving":
        return _sum(_halving(p), _halving(p))
    return (2 * log, 2 * log) if algorithm == "tree" else (log, log)


def _all_to_all(algorithm: str, p: int, log: int, rest: float) -> tuple[int, float]:
    return {
        "direct": lambda: (p - 1, rest),
        "ring": lambda: (p - 1, (p - 1) / 2),
        "tree": lambda: (2 * log, 2 * (p - 1)),
        "halving": lambda: _halving(p, exchange=True),
        "hypercube": lambda: (log, log / 2),
    }[algorithm]()


def _scan(algorithm: str, p: int, log: int, rest: float) -> tuple[int, float]:
    if algorithm in ("direct", "ring"):
        return p - 1, p - 1
    if algorithm == "tree":
        up = p.bit_length() - 1  # levels with a pair that ends at or below p
        down = sum(3 * (1 << k) <= p for k in range(log))
        return up + down, up + down
    return log, log


def _halving(p: int, exchange: bool = False) -> tuple[int, float]:
    """Levels of halves that exchange; an odd range needs a second round.

    Args:
        p: Number of devices.
        exchange: Whether each block is of one source for one target (all-to-all), so that devices
            hold ever more of them; else one block per target.
    """
    startups, blocks = 0, 0
    held = [1] * p  # sources whose blocks a rank holds
    ranges = [range(p)]
    while any(len(ranks) > 1 for ranks in ranges):
        main, extra, below = 0, 0, []
        taken = list(held)
        for ranks in ranges:
            if len(ranks) == 1:
                continue
            middle = ranks.start + (len(ranks) + 1) // 2
            low, high = range(ranks.start, middle), range(middle, ranks.stop)
            for mine, other in zip(low, high):
                main = max(main, held[mine] * len(high), held[other] * len(low))
                if exchange:
                    taken[mine] += held[other]
                    taken[other] += held[mine]
            if len(low) > len(high):
                extra = max(extra, held[low[-1]] * len(high))
                if exchange:
                    taken[high[-1]] += held[low[-1]]
            below += [low, high]
        startups += 1 + (extra > 0)
        blocks += main + extra
        held, ranges = taken, below
    return startups, blocks / p


def _sum(*parts: tuple[int, float]) -> tuple[int, float]:
    return sum(part[0] for part in parts), sum(part[1] for part in parts)
