"""Message schedules of each collective by each algorithm; pure data, no device.

| algorithm | idea | source |
| --- | --- | --- |
| direct | each message goes straight from where it is to where it is wanted | |
| ring | neighbours only; a value is cut into p pieces that go round one behind the other | Patarasuk and Yuan, JPDC 2009 |
| tree | a binomial tree: who has the value passes it on, so holders double every round | Johnsson and Ho, IEEE TC 1989 |
| halving | two halves of the devices exchange what the other half needs, then each half alone; backwards it is recursive doubling | Rabenseifner, ICCS 2004; van de Geijn, JPDC 1994 |
| hypercube | in round k, devices whose numbers differ in bit k alone exchange | Johnsson and Ho, IEEE TC 1989 |

Every algorithm does every operation, for any number of devices; only a hypercube needs a power of
two. An all-reduce may also go over a torus of two dims (`kdist.comm.torus`). A round is single-port
(`kdist.comm.messages`), so that its time is that of its largest message.
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable

from kdist.comm import torus
from kdist.comm.messages import (
    PREFIX,
    RUNNING,
    Message,
    Rounds,
    Schedule,
    all_blocks,
    rooted_at,
    transposed,
    with_chunks,
)

ALGORITHMS = ("direct", "ring", "tree", "halving", "hypercube")
OPERATIONS = (
    "broadcast",
    "reduce",
    "all_reduce",
    "gather",
    "all_gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "scan",
)
ROOTED = ("broadcast", "reduce", "gather", "scatter")


@functools.lru_cache(maxsize=256, typed=True)
def schedule(operation: str, algorithm: str, size: int, root: int = 0) -> Schedule:
    """The messages of an operation.

    Args:
        operation: One of `OPERATIONS`.
        algorithm: One of `ALGORITHMS`; of all_reduce also `"torus"`, or `"torus:AxB"` with its
            sides: B rows of A devices.
        size: Number of devices p, at least 1.
        root: The rank that has (broadcast, scatter) or gets (reduce, gather) the value.

    Returns:
        The schedule; that of one device is empty.

    Raises:
        ValueError: For an unknown operation or algorithm, a size below 1, a root that does not
            exist or has no meaning, a hypercube or a torus that the size does not allow.

    Example:
        >>> for message in kdist.comm.schedule("all_reduce", "ring", 3).rounds[0]:
        ...     print(message)
        1->0 +[2]
        2->1 +[0]
        0->2 +[1]
    """
    check(operation, algorithm, size)
    known = isinstance(root, int) and not isinstance(root, bool) and 0 <= root < size
    if not known or (root and operation not in ROOTED):
        raise ValueError(
            f"The root of {operation!r} over {size} devices is a rank from 0 to {size - 1}"
            f"{'' if operation in ROOTED else ', and this operation has none'}. "
            f"Received: root={root!r}"
        )
    rounds = _BUILDERS[operation](algorithm, size) if size > 1 else ()
    if root:
        rounds = rooted_at(rounds, operation, algorithm, size, root)
    pieces = pieces_of(operation, algorithm, size)
    return Schedule(
        operation=operation,
        algorithm=algorithm,
        size=size,
        root=root,
        pieces=pieces,
        rounds=rounds,
    )


def check(operation: str, algorithm: str, size: int) -> None:
    """Refuses what no schedule exists for; see `schedule`."""
    if operation not in OPERATIONS:
        raise ValueError(
            f"An operation is one of {', '.join(OPERATIONS)}. Received: operation={operation!r}"
        )
    on_torus = torus.is_torus(algorithm) and operation == "all_reduce"
    if algorithm not in ALGORITHMS and not on_torus:
        raise ValueError(
            f"An algorithm is one of {', '.join(ALGORITHMS)}, of all_reduce also torus. "
            f"Received: algorithm={algorithm!r} for {operation}"
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            f"The number of devices is an integer of at least 1. Received: size={size!r}"
        )
    if on_torus:
        torus.sides(algorithm, size)
    if algorithm == "hypercube" and size & (size - 1):
        raise ValueError(
            "A hypercube has a power of two of devices. Use algorithm='halving' or 'tree', which "
            f"take any number, or another axis size. Received: algorithm='hypercube', size={size}"
        )


def pieces_of(operation: str, algorithm: str, size: int) -> int:
    """Into how many pieces an algorithm cuts the value of broadcast, reduce or all_reduce."""
    whole = operation in ("broadcast", "reduce", "all_reduce")
    return size if whole and algorithm.partition(":")[0] in ("ring", "halving", "torus") else 1


# Each builder takes (algorithm, p) and makes the rounds for root 0.


def _broadcast(algorithm: str, p: int) -> Rounds:
    if algorithm == "direct":
        return tuple((Message(0, target, (0,)),) for target in range(1, p))
    if algorithm == "ring":
        # Piece k reaches rank r in round k + r - 1: the chain is full of pieces.
        return tuple(
            tuple(
                Message(rank, rank + 1, (number - rank,))
                for rank in range(p - 1)
                if 0 <= number - rank < p
            )
            for number in range(2 * p - 2)
        )
    if algorithm == "halving":
        return _scatter(algorithm, p) + _all_gather(algorithm, p)
    return tuple(tuple(Message(s, t, (0,)) for s, t, _ in level) for level in _halves(p))


def _scatter(algorithm: str, p: int) -> Rounds:
    if algorithm == "direct":
        return tuple((Message(0, target, (target,)),) for target in range(1, p))
    if algorithm == "ring":
        # The farthest block first, so that all arrive in the last round.
        return tuple(
            tuple(
                Message(rank, rank + 1, (p - 1 - number + rank,))
                for rank in range(number + 1)
                if rank < p - 1 - number + rank < p
            )
            for number in range(p - 1)
        )
    return tuple(
        tuple(Message(s, t, tuple(range(t, end))) for s, t, end in level) for level in _halves(p)
    )


def _halves(p: int) -> list[list[tuple[int, int, int]]]:
    """Levels of a binomial tree over ranks 0 to p - 1: (source, target, end of target's ranks)."""
    levels, ranges = [], [(0, p)]
    while any(high - low > 1 for low, high in ranges):
        level, below = [], []
        for low, high in ranges:
            middle = low + (high - low + 1) // 2
            if middle < high:
                level.append((low, middle, high))
                below += [(low, middle), (middle, high)]
        levels.append(level)
        ranges = below
    return levels


def _reduce(algorithm: str, p: int) -> Rounds:
    if algorithm == "halving":
        return _reduce_scatter(algorithm, p) + _gather(algorithm, p)
    return transposed(_broadcast(algorithm, p), combine=True)


def _gather(algorithm: str, p: int) -> Rounds:
    return transposed(_scatter(algorithm, p), combine=False)


def _all_gather(algorithm: str, p: int) -> Rounds:
    if algorithm == "direct":
        return tuple(
            tuple(Message(rank, (rank + shift) % p, (rank,)) for rank in range(p))
            for shift in range(1, p)
        )
    if algorithm == "ring":
        return tuple(
            tuple(Message(rank, (rank + 1) % p, ((rank - number) % p,)) for rank in range(p))
            for number in range(p - 1)
        )
    if algorithm == "tree":
        return _gather("tree", p) + with_chunks(_broadcast("tree", p), tuple(range(p)))
    if algorithm == "halving":
        return transposed(_exchange_halves(p, lambda rank, ranks: tuple(ranks)), combine=False)
    return tuple(
        tuple(
            Message(rank, rank ^ bit, tuple(range(rank & -bit, (rank & -bit) + bit)))
            for rank in range(p)
        )
        for bit in _bits(p)
    )


def _reduce_scatter(algorithm: str, p: int) -> Rounds:
    if algorithm == "tree":
        return with_chunks(_reduce("tree", p), tuple(range(p))) + _scatter("tree", p)
    return transposed(_all_gather(algorithm, p), combine=True)


def _all_reduce(algorithm: str, p: int) -> Rounds:
    if torus.is_torus(algorithm):
        a, b = torus.sides(algorithm, p)
        parts = _reduce_scatter("ring", a), _all_reduce("ring", b), _all_gather("ring", a)
        return torus.rounds(*parts, a, b)
    if algorithm in ("ring", "halving"):
        return _reduce_scatter(algorithm, p) + _all_gather(algorithm, p)
    if algorithm == "hypercube":
        return tuple(
            tuple(Message(rank, rank ^ bit, (0,), True) for rank in range(p)) for bit in _bits(p)
        )
    return _reduce(algorithm, p) + _broadcast(algorithm, p)


def _all_to_all(algorithm: str, p: int) -> Rounds:
    if algorithm == "direct":
        return tuple(
            tuple(
                Message(rank, (rank + shift) % p, (rank * p + (rank + shift) % p,))
                for rank in range(p)
            )
            for shift in range(1, p)
        )
    if algorithm == "ring":
        return tuple(
            tuple(_pass_on(rank, (rank - number) % p, p, number) for rank in range(p))
            for number in range(p - 1)
        )
    if algorithm == "tree":
        return all_blocks(_gather("tree", p), p, of_source=True) + all_blocks(
            _scatter("tree", p), p, of_source=False
        )
    if algorithm == "hypercube":
        held = [{rank} for rank in range(p)]
        return tuple(_exchange_bit(held, bit, p) for bit in _bits(p))
    held = [{rank} for rank in range(p)]

    def blocks(rank: int, ranks: range) -> tuple[int, ...]:
        return tuple(s * p + d for s in sorted(held[rank]) for d in ranks)

    def received(pairs: list[tuple[int, int]]) -> None:
        before = [set(sources) for sources in held]
        for source, target in pairs:
            held[target] |= before[source]

    return _exchange_halves(p, blocks, received)


def _pass_on(rank: int, origin: int, p: int, number: int) -> Message:
    """Ring all-to-all: hands on what `origin` sent, without what has arrived."""
    farther = tuple(origin * p + (origin + way) % p for way in range(number + 1, p))
    return Message(rank, (rank + 1) % p, farther)


def _exchange_bit(held: list[set[int]], bit: int, p: int) -> tuple[Message, ...]:
    """Hypercube all-to-all: each sends what is for the other side of the bit; updates `held`."""
    messages = []
    for rank in range(p):
        # Devices that can still be reached share the lower bits with the rank already.
        there = [d for d in range(p) if d & (2 * bit - 1) == (rank ^ bit) & (2 * bit - 1)]
        chunks = tuple(s * p + d for s in sorted(held[rank]) for d in there)
        messages.append(Message(rank, rank ^ bit, chunks))
    before = [set(sources) for sources in held]
    for rank in range(p):
        held[rank] |= before[rank ^ bit]
    return tuple(messages)


def _scan(algorithm: str, p: int) -> Rounds:
    both = (RUNNING, PREFIX)

    def message(source: int, target: int, into: tuple[int, ...] = both) -> Message:
        return Message(source, target, (RUNNING,), True, into)

    if algorithm == "direct":
        # RUNNING stays the device's own value.
        return tuple(
            tuple(message(rank, rank + shift, (PREFIX,)) for rank in range(p - shift))
            for shift in range(1, p)
        )
    if algorithm == "ring":
        return tuple((message(rank, rank + 1),) for rank in range(p - 1))
    if algorithm == "halving":
        # Recursive doubling (Hillis and Steele, CACM 1986).
        return tuple(
            tuple(message(rank, rank + bit) for rank in range(p - bit)) for bit in _bits(p)
        )
    if algorithm == "tree":
        # Up and down one tree (Brent and Kung, IEEE TC 1982).
        up = [[(i - d, i) for i in range(2 * d - 1, p, 2 * d)] for d in _bits(p)]
        down = [[(i, i + d) for i in range(2 * d - 1, p - d, 2 * d)] for d in reversed(_bits(p))]
        return tuple(tuple(message(s, t) for s, t in level) for level in up + down if level)
    # A sum goes down only to ranks that will send it up again.
    return tuple(
        tuple(
            message(rank, rank ^ bit, both if rank < rank ^ bit else (RUNNING,))
            for rank in range(p)
            if rank < rank ^ bit or (rank ^ bit) | (2 * bit - 1) != p - 1
        )
        for bit in _bits(p)
    )


def _exchange_halves(
    p: int,
    chunks: Callable[[int, range], tuple[int, ...]],
    received: Callable[[list[tuple[int, int]]], None] = lambda pairs: None,
) -> Rounds:
    """Halves exchange what the other half needs, then each half does so alone.

    In an odd range the larger half has one device without a partner: it hands its part to the
    last device of the other half, in a round of its own, and gets nothing.

    Args:
        p: Number of devices.
        chunks: The chunks that a rank has for some ranks.
        received: Told the pairs (source, target) of each round after it.
    """
    rounds, ranges = [], [range(p)]
    while any(len(ranks) > 1 for ranks in ranges):
        main, extra, below = [], [], []
        for ranks in ranges:
            middle = ranks.start + (len(ranks) + 1) // 2
            low, high = range(ranks.start, middle), range(middle, ranks.stop)
            for mine, other in zip(low, high):
                main += [(mine, other, high), (other, mine, low)]
            if len(low) > len(high) > 0:
                extra.append((low[-1], high[-1], high))
            below += [half for half in (low, high) if half]
        for pairs in (main, extra):
            if pairs:
                rounds.append(tuple(Message(s, t, chunks(s, half)) for s, t, half in pairs))
                received([(s, t) for s, t, _ in pairs])
        ranges = below
    return tuple(rounds)


def _bits(p: int) -> list[int]:
    """1, 2, 4, ... below p."""
    return [1 << k for k in range((p - 1).bit_length())]


_BUILDERS: dict[str, Callable[[str, int], Rounds]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "gather": _gather,
    "all_gather": _all_gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "scan": _scan,
}
