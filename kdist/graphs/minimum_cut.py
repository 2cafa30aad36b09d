"""Which forward tensors to keep, if others may be computed again: the fewest bytes.

Between what cannot be computed again and what the backward pass reads, each path has to be cut by a
tensor that is kept. A cut of least capacity is found by maximum flow (Dinic 1970). The idea is that
of PyTorch's `min_cut_rematerialization_partition`. Pure Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from kdist.graphs.chunks import ProgramGraph, node_of

WITHOUT_END = 1 << 62


def fewest_kept(
    graph: ProgramGraph,
    nbytes: Mapping[str, int],
    repeatable: Collection[str],
    read: Collection[str],
) -> set[str]:
    """The nodes whose results are kept, so that all that is read can be computed from them.

    Args:
        graph: The program.
        nbytes: Of the results of each node that is read, or leads to one; others cost nothing.
        repeatable: Nodes that may be computed again.
        read: Nodes whose results the backward pass reads.
    """
    repeatable = set(repeatable)
    flow = _Flow()
    waiting, seen = list(read), set()
    for name in read:
        flow.connect((name, 1), "end", WITHOUT_END)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        flow.connect((name, 0), (name, 1), nbytes.get(name, 0))
        if name not in repeatable:
            flow.connect("start", (name, 0), WITHOUT_END)
            continue
        for source in {node_of(r) for r in graph.inputs[name] if not r.startswith("^")}:
            flow.connect((source, 1), (name, 0), WITHOUT_END)
            waiting.append(source)
    reached = flow.reached()
    return {name for name in seen if (name, 0) in reached and (name, 1) not in reached}


class _Flow:
    """A network with capacities."""

    def __init__(self) -> None:
        self.room: dict[object, dict[object, int]] = {"start": {}, "end": {}}

    def connect(self, one: object, other: object, capacity: int) -> None:
        """Adds an edge."""
        self.room.setdefault(one, {})[other] = self.room.get(one, {}).get(other, 0) + capacity
        self.room.setdefault(other, {}).setdefault(one, 0)

    def reached(self) -> set[object]:
        """What the start reaches once the flow is at its maximum."""
        while "end" in (levels := self._levels()):
            left = {node: list(edges) for node, edges in self.room.items()}
            while self._push(levels, left):
                pass
        return set(levels)

    def _levels(self) -> dict[object, int]:
        found: dict[object, int] = {"start": 0}
        waiting = deque(["start"])
        while waiting:
            node = waiting.popleft()
            for other, room in self.room[node].items():
                if room > 0 and other not in found:
                    found[other] = found[node] + 1
                    waiting.append(other)  # type: ignore[arg-type]
        return found

    def _push(self, levels: dict[object, int], left: dict[object, list[object]]) -> bool:
        """Sends what a path of rising levels takes; False if there is none."""
        path: list[object] = ["start"]
        while path and path[-1] != "end":
            node = path[-1]
            while left[node]:
                other = left[node][-1]
                if self.room[node][other] > 0 and levels.get(other) == levels[node] + 1:
                    path.append(other)
                    break
                left[node].pop()
            else:
                path.pop()
                if path:
                    left[path[-1]].pop()
        if not path:
            return False
        amount = min(self.room[a][b] for a, b in zip(path, path[1:]))
        for a, b in zip(path, path[1:]):
            self.room[a][b] -= amount
            self.room[b][a] += amount
        return True
