"""Which node runs on which stage.

Objective of the automatic partition, in this order:

1. The slowest stage's cost is at most `1 + slack` times the smallest possible.
2. Among those, the fewest bytes cross boundaries, summed over all boundaries.
3. Among those, the smallest cost of the slowest stage.

"Possible" are the contiguous cuts of one topological order of the graph: the model's own, with the
nodes that fixed nodes need moved before them. The search over these cuts is exact, by dynamic
programming (as PipeDream's, Narayanan et al. 2019, but with the bytes as a second goal instead of
as time: transfers overlap with computation).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Literal

from kdist.display.tables import Column, as_text, number
from kdist.pipeline.feasible import Bounds, bounds, check_used
from kdist.pipeline.graph import Graph, GraphNode
from kdist.pipeline.instructions import as_index

import numpy as np

_Array = np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """A graph cut into virtual stages.

    Attributes:
        graph: What was cut.
        stages: Node names of each virtual stage, in the order of the graph.
        costs: Cost of each virtual stage, the sum of its nodes'.
        boundaries: Tensor names that cross from each virtual stage to the next. A tensor that is
            used several stages later is in every boundary on its way: the stages between pass it
            on, and its gradient, summed with their own if they use it too, comes back the same way.
        boundary_bytes: Bytes of each boundary, in the unit of the nodes' outputs.
        tied: Parameter keys that nodes of several virtual stages use, with these stages. Each is
            one logical weight, whose gradients are summed over the stages.

    Example:
    ```python
    from kdist.pipeline import Graph, GraphNode, partition

    first = GraphNode(name="first", cost=1, outputs={"h": 8})
    second = GraphNode(name="second", cost=2, inputs=("h",), outputs={"y": 8})
    found = partition(Graph(nodes=(first, second), outputs=("y",)), 2)
    assert found.stages == (("first",), ("second",)) and found.boundary_bytes == (8,)
    ```
    """

    graph: Graph
    stages: tuple[tuple[str, ...], ...]
    costs: tuple[float, ...]
    boundaries: tuple[tuple[str, ...], ...]
    boundary_bytes: tuple[float, ...]
    tied: Mapping[str, tuple[int, ...]]

    @property
    def stage_of(self) -> dict[str, int]:
        """The virtual stage of each node."""
        return {name: stage for stage, names in enumerate(self.stages) for name in names}

    @property
    def bottleneck(self) -> float:
        """Cost of the slowest virtual stage."""
        return max(self.costs)

    @property
    def imbalance(self) -> float:
        """Cost of the slowest virtual stage over the mean, 1 if all are equal."""
        mean = sum(self.costs) / len(self.costs)
        return self.bottleneck / mean if mean else 1.0

    def __str__(self) -> str:
        columns = [number(title) for title in ("stage", "cost", "nodes")]
        columns += [Column("from ... to", prose=True), Column("sends on", prose=True)]
        rows = []
        for stage, names in enumerate(self.stages):
            last = stage == len(self.stages) - 1
            ends = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
            sent = "" if last else ", ".join(self.boundaries[stage])
            size = "" if last else f"{self.boundary_bytes[stage]:g}"
            rows.append((str(stage), f"{self.costs[stage]:.3g}", str(len(names)), ends, sent, size))
        lines = [f"Partition: slowest stage {self.imbalance:.2f} x the mean"]
        lines.append(as_text([*columns, number("bytes")], rows, width=120))
        for key, users in self.tied.items():
            lines.append(f"  tied: {key} on stages {', '.join(map(str, users))}")
        return "\n".join(lines)


def partition(
    graph: Graph,
    stages: int,
    *,
    unassigned: Literal["balance", "follow"] | None = None,
    slack: float = 0.05,
) -> Partition:
    """Cuts a graph into virtual stages.

    Args:
        graph: The nodes, some or all of them with a fixed stage.
        stages: Number of virtual stages: p, or p * v with v chunks per stage.
        unassigned: What happens to nodes without a fixed stage. "balance": the cuts between the
            fixed nodes are chosen by the objective of this module. "follow": a node goes to the
            latest stage among the nodes that it uses; one that uses no placed node, to the
            earliest stage among the nodes that use it; to stage 0 if there is none. None: "follow"
            if the stage of any node is fixed, else "balance".
        slack: Share by which the slowest stage may exceed the smallest possible, to send less.

    Returns:
        The partition.

    Raises:
        ValueError: If no such cut exists, naming the layers at fault: a fixed stage that does not
            exist, a stage without a layer, a layer that uses the output of a later stage.

    Example:
    ```python
    from kdist.pipeline import Graph, GraphNode, partition

    nodes = [GraphNode(name="a", cost=2, outputs={"x": 8}),
             GraphNode(name="b", cost=2, inputs=["x"], outputs={"y": 8})]
    print(partition(Graph(nodes=nodes, outputs=["y"]), 2))
    ```
    """
    _check_settings(graph, stages, unassigned, slack)
    stages = operator.index(stages)
    limits = bounds(graph, stages)
    if unassigned is None:
        unassigned = "follow" if any(n.stage is not None for n in graph.nodes) else "balance"
    if unassigned == "follow":
        stage_of = _follow(graph, limits)
        check_used(graph, stages, stage_of)
    else:
        stage_of = _balance(graph, stages, limits, slack)
    return describe(graph, stages, stage_of)


def _check_settings(graph: Graph, stages: int, unassigned: object, slack: float) -> None:
    if (as_index(stages) or 0) < 1:
        raise ValueError(f"stages is an integer from 1 on. Received: stages={stages!r}")
    if unassigned not in (None, "balance", "follow"):
        raise ValueError(
            f"unassigned is 'balance', 'follow' or None. Received: unassigned={unassigned!r}"
        )
    if not slack >= 0:
        raise ValueError(f"slack is a share from 0 on. Received: slack={slack!r}")
    if stages > len(graph.nodes):
        raise ValueError(
            f"Every stage needs a layer, and the model can be cut into {len(graph.nodes)} calls of "
            f"layers: {', '.join(n.name for n in graph.nodes)}. Use fewer stages, or a model of "
            f"more layers. Received: stages={stages}"
        )


def describe(graph: Graph, stages: int, stage_of: Mapping[str, int]) -> Partition:
    """The partition that an assignment of every node to a stage makes.

    Raises:
        ValueError: If a stage is empty or a node uses the output of a later stage.
    """
    check_used(graph, stages, stage_of)
    names = tuple(
        tuple(n.name for n in graph.nodes if stage_of[n.name] == stage) for stage in range(stages)
    )
    named = graph.named
    sizes = {tensor: size for n in graph.nodes for tensor, size in n.outputs.items()}
    spans = _spans(graph, stages, stage_of)
    boundaries = tuple(
        tuple(t for t, (first, last) in spans.items() if first <= b < last)
        for b in range(stages - 1)
    )
    return Partition(
        graph=graph,
        stages=names,
        costs=tuple(math.fsum(named[name].cost for name in stage) for stage in names),
        boundaries=boundaries,
        boundary_bytes=tuple(sum(sizes[t] for t in tensors) for tensors in boundaries),
        tied=_tied(graph, stage_of),
    )


def _spans(graph: Graph, stages: int, stage_of: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """First and last stage at which each tensor is there: where it is made, where last used."""
    spans = {t: (stage_of[n.name],) * 2 for n in graph.nodes for t in n.outputs}
    uses = [(t, stage_of[n.name]) for n in graph.nodes for t in n.inputs]
    uses += [(t, stages - 1) for t in graph.outputs]
    for tensor, stage in uses:
        if tensor in spans:
            first, last = spans[tensor]
            spans[tensor] = first, max(last, stage)
    return spans


def _tied(graph: Graph, stage_of: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    users: dict[str, set[int]] = {}
    for node in graph.nodes:
        for key in node.parameters:
            users.setdefault(key, set()).add(stage_of[node.name])
    return {key: tuple(sorted(found)) for key, found in users.items() if len(found) > 1}


def _follow(graph: Graph, limits: Bounds) -> dict[str, int]:
    """See `partition`. Placed nodes only ever use nodes of their own or earlier stages."""
    placed = {name: limits.first[name] for name in limits.first if limits.after_fixed[name]}
    users: dict[str, list[str]] = {n.name: [] for n in graph.nodes}
    for name, used in graph.predecessors().items():
        for other in used:
            users[other].append(name)
    for node in reversed(graph.nodes):
        if node.name not in placed:
            placed[node.name] = min((placed[user] for user in users[node.name]), default=0)
    return placed


def _balance(graph: Graph, stages: int, limits: Bounds, slack: float) -> dict[str, int]:
    order = sorted(
        range(len(graph.nodes)),
        key=lambda i: (limits.first[graph.nodes[i].name], limits.last[graph.nodes[i].name], i),
    )
    nodes = [graph.nodes[i] for i in order]
    low, high = _windows(nodes, stages)
    total = np.concatenate([[0.0], np.cumsum([n.cost for n in nodes])])
    crossing = _crossing_bytes(graph, [n.name for n in nodes])
    best = _cuts(total, crossing, low, high, math.inf)[0]
    _, cuts = _cuts(total, crossing, low, high, best * (1 + slack))
    return {
        node.name: stage for stage, (a, b) in enumerate(zip(cuts, cuts[1:])) for node in nodes[a:b]
    }


def _windows(nodes: list[GraphNode], stages: int) -> tuple[list[int], list[int]]:
    """Smallest and largest position of each of the `stages + 1` cuts.

    Cut k is before the first node of stage k; fixed stages ascend along the order.
    """
    fixed = [node.stage for node in nodes]
    count = len(fixed)
    low, high = [0] * (stages + 1), [count] * (stages + 1)
    for k in range(1, stages):
        low[k] = max((i + 1 for i, s in enumerate(fixed) if s is not None and s < k), default=0)
        high[k] = min((i for i, s in enumerate(fixed) if s is not None and s >= k), default=count)
    high[0], low[stages] = 0, count
    for k in range(stages):
        if high[k + 1] <= low[k]:
            raise _no_layer_for(f"stage {k}", nodes, stages)
    for k in range(1, stages + 1):
        low[k] = max(low[k], low[k - 1] + 1)
    for k in reversed(range(stages)):
        high[k] = min(high[k], high[k + 1] - 1)
    for k in range(stages + 1):
        if low[k] > high[k]:
            raise _no_layer_for(f"each of the stages around {min(k, stages - 1)}", nodes, stages)
    return low, high


def _no_layer_for(stage: str, nodes: list[GraphNode], stages: int) -> ValueError:
    fixed = {node.name: node.stage for node in nodes if node.stage is not None}
    return ValueError(
        f"Every stage needs a layer, and none is left for {stage}: those that are not fixed lie "
        "before or after it. Fix a layer there by hand, fix fewer layers, or use fewer stages. "
        f"Received: stages={stages}, fixed={fixed}"
    )


def _crossing_bytes(graph: Graph, order: list[str]) -> _Array:
    """Bytes of the tensors that are made before each position of the order and used after it."""
    position = {name: i for i, name in enumerate(order)}
    change = np.zeros(len(order) + 2)
    last: dict[str, int] = {}
    for node in graph.nodes:
        for tensor in node.inputs:
            last[tensor] = max(last.get(tensor, 0), position[node.name])
    for tensor in graph.outputs:
        last[tensor] = len(order)
    for node in graph.nodes:
        for tensor, size in node.outputs.items():
            begin = position[node.name] + 1
            if tensor in last and last[tensor] >= begin:
                change[begin] += size
                change[last[tensor] + 1] -= size
    crossing: _Array = np.cumsum(change)[: len(order) + 1]
    return crossing


def _cuts(
    total: _Array, crossing: _Array, low: list[int], high: list[int], limit: float
) -> tuple[float, list[int]]:
    """The best cuts by dynamic programming over stages and positions.

    Args:
        total: Cost of the first i nodes.
        crossing: Bytes that cross a cut at position i.
        low: Smallest position of each cut.
        high: Largest position of each cut.
        limit: Largest cost of a stage. Infinite: the smallest bottleneck is looked for and bytes do
            not count. Finite: the fewest bytes, then the smallest bottleneck.

    Returns:
        The bottleneck, and the positions of all cuts.
    """
    stages, count = len(low) - 1, len(total)
    free = math.isinf(limit)
    limit *= 1 + 1e-12  # sums in another order
    worst, sent = np.full(count, np.inf), np.full(count, np.inf)
    worst[0] = sent[0] = 0.0
    choices = []
    for k in range(1, stages + 1):
        next_worst, next_sent = np.full(count, np.inf), np.full(count, np.inf)
        choice = np.zeros(count, int)
        for i in range(low[k], high[k] + 1):
            a, b = low[k - 1], min(high[k - 1], i - 1) + 1
            if a >= b:
                continue
            stage = total[i] - total[a:b]
            bottleneck = np.maximum(worst[a:b], stage)
            bytes_sent = np.where(stage <= limit, sent[a:b], np.inf)
            keys = (bottleneck,) if free else (bottleneck, bytes_sent)
            j = int(np.lexsort(keys)[0])
            choice[i] = a + j
            next_worst[i] = bottleneck[j]
            next_sent[i] = bytes_sent[j] + (crossing[i] if k < stages else 0.0)
        worst, sent = next_worst, next_sent
        choices.append(choice)
    cuts = [count - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return float(worst[count - 1]), cuts[::-1]
