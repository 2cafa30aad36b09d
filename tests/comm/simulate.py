"""Carries a schedule out on sets: which rank's values each chunk of each device is the sum of."""

from __future__ import annotations

from collections import Counter

from kdist.comm.messages import PREFIX, RUNNING, Schedule

State = list[dict[int, Counter]]


def start(schedule: Schedule, exclusive: bool = False) -> State:
    """What the devices hold before: a chunk is a multiset of (rank, chunk) it was summed from."""
    p, operation = schedule.size, schedule.operation
    held: list[list[int]] = []
    for rank in range(p):
        if operation in ("broadcast", "scatter"):
            chunks = schedule.pieces if operation == "broadcast" else p
            held.append(list(range(chunks)) if rank == schedule.root else [])
        elif operation in ("gather", "all_gather"):
            held.append([rank])
        elif operation == "all_to_all":
            held.append([rank * p + d for d in range(p)])
        elif operation == "reduce_scatter":
            held.append(list(range(p)))
        elif operation == "scan":
            held.append([RUNNING] if exclusive else [RUNNING, PREFIX])
        else:
            held.append(list(range(schedule.pieces)))
    return [{c: Counter([(rank, c)]) for c in chunks} for rank, chunks in enumerate(held)]


def run(schedule: Schedule, exclusive: bool = False) -> State:
    """What they hold after; fails if a message carries what its source does not have."""
    state = start(schedule, exclusive)
    for messages in schedule.rounds:
        sent = [[Counter(state[m.source][c]) for c in m.chunks] for m in messages]
        for message, values in zip(messages, sent):
            mine = state[message.target]
            for chunk, value in zip(message.chunks, values):
                for into in message.into or (chunk,):
                    old = mine.get(into, Counter()) if message.combine else Counter()
                    mine[into] = old + value
    return state


def expected(schedule: Schedule, rank: int, exclusive: bool = False) -> dict[int, Counter]:
    """What a rank must hold after, by the meaning of the operation."""
    p, operation, root = schedule.size, schedule.operation, schedule.root
    pieces = range(schedule.pieces)
    everyone = {c: Counter((r, c) for r in range(p)) for c in range(max(p, schedule.pieces))}
    if operation == "broadcast":
        return {c: Counter([(root, c)]) for c in pieces}
    if operation == "scatter":
        return {rank: Counter([(root, rank)])}
    if operation == "all_reduce" or (operation == "reduce" and rank == root):
        return {c: everyone[c] for c in pieces}
    if operation == "all_gather" or (operation == "gather" and rank == root):
        return {c: Counter([(c, c)]) for c in range(p)}
    if operation == "reduce_scatter":
        return {rank: everyone[rank]}
    if operation == "all_to_all":
        return {s * p + rank: Counter([(s, s * p + rank)]) for s in range(p)}
    if operation == "scan":
        terms = Counter((r, RUNNING) for r in range(rank))
        own = Counter() if exclusive else Counter([(rank, PREFIX)])
        return {PREFIX: terms + own} if terms + own else {}
    return {}
