"""What is alive in a graph that runs its operations one by one, first ready, first run. Pure.

`LiveTensors.peak` bounds every order; an allocator sees one.
"""

from __future__ import annotations

from collections import deque

from kdist.graphs.live_tensors import LiveTensors, Op, Output


def peak_in_order(live: LiveTensors) -> int:
    """The most bytes at once, of all devices together."""
    size = {one.output: one.nbytes for one in live.tensors}
    readers = {one.output: len(set(one.readers)) for one in live.tensors}
    made: dict[str, list[Output]] = {}
    read: dict[str, list[Output]] = {}
    for one in live.tensors:
        made.setdefault(one.output[0], []).append(one.output)
        for name in set(one.readers):
            read.setdefault(name, []).append(one.output)
    now = peak = 0
    for name in _order(live.ops):
        now += sum(size[output] for output in made.get(name, ()))
        peak = max(peak, now)
        for output in read.get(name, ()):
            readers[output] -= 1
        done = {o for o in (*read.get(name, ()), *made.get(name, ())) if readers[o] == 0}
        now -= sum(size[output] for output in done)
    return peak


def _order(ops: dict[str, Op]) -> list[str]:
    """Names of operations, each as soon as what it needs has run."""
    needs = {n: {i for i, _ in op.inputs} | set(op.waits) for n, op in ops.items()}
    waiting = {n: len(found & ops.keys()) for n, found in needs.items()}
    after: dict[str, list[str]] = {n: [] for n in ops}
    for name, found in needs.items():
        for other in found & ops.keys():
            after[other].append(name)
    ready = deque(n for n, count in waiting.items() if count == 0)
    order = []
    while ready:
        order.append(ready.popleft())
        for name in after[order[-1]]:
            waiting[name] -= 1
            if waiting[name] == 0:
                ready.append(name)
    return order
