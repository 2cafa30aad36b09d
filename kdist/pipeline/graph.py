"""A model as a graph of nodes with costs: what the partition works on. Pure data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from kdist.pipeline.instructions import as_index


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphNode:
    """One call of one layer or operation.

    Attributes:
        name: Unique name. A layer's first call has the layer's name; the later ones end in
            "#1", "#2", ...
        cost: Time estimate or measurement of forward and backward, in any unit.
        inputs: Names of the tensors that it uses.
        outputs: Names of the tensors that it makes, with their bytes (per example, or any unit that
            all nodes share).
        parameters: Keys of the variables that it uses. Nodes with a key in common share weights.
        stage: The virtual stage that the user fixed, or None.

    Raises:
        ValueError: For a cost or bytes below 0, or a stage that is no integer.

    Example:
    ```python
    from kdist.pipeline import GraphNode

    GraphNode(name="dense", cost=2.0, inputs=("x",), outputs={"y": 256}, parameters=("kernel",))
    ```
    """

    name: str
    cost: float = 0.0
    inputs: tuple[str, ...] = ()
    outputs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    stage: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", dict(self.outputs))
        object.__setattr__(self, "parameters", tuple(self.parameters))
        if not self.cost >= 0:
            raise ValueError(
                f"The cost of a node is from 0 on. Received: cost={self.cost!r} of {self.name!r}"
            )
        if any(not size >= 0 for size in self.outputs.values()):
            raise ValueError(
                f"Bytes of outputs are from 0 on. Received: outputs={self.outputs!r} of "
                f"{self.name!r}"
            )
        stage = None if self.stage is None else as_index(self.stage)
        if stage is None and self.stage is not None:
            raise ValueError(
                f"The stage of a node is an integer or None. Received: stage={self.stage!r} of "
                f"{self.name!r}"
            )
        object.__setattr__(self, "stage", stage)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes in topological order, and what goes in and out.

    Attributes:
        nodes: Every node after the nodes that make its inputs.
        inputs: Names of the model's inputs. They come with the batch, so every stage that uses one
            is given it: they cross no boundary.
        outputs: Names of the tensors that the model returns. The loss is computed on the last
            stage, so they travel there.

    Raises:
        ValueError: If two nodes or tensors have one name, an input is made by no node, or the nodes
            are not in topological order; if they cannot be because of a cycle, its nodes are named.

    Example:
    ```python
    from kdist.pipeline import Graph, GraphNode

    first = GraphNode(name="first", cost=1, inputs=("x",), outputs={"h": 8})
    second = GraphNode(name="second", cost=2, inputs=("h",), outputs={"y": 8})
    graph = Graph(nodes=(first, second), inputs=("x",), outputs=("y",))
    assert graph.predecessors() == {"first": (), "second": ("first",)}
    ```
    """

    nodes: tuple[GraphNode, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "inputs", "outputs"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_unique("node", [node.name for node in self.nodes])
        _check_unique(
            "tensor", [*self.inputs, *(name for node in self.nodes for name in node.outputs)]
        )
        known = set(self.inputs) | set(self.makers)
        for user, names in [*((n.name, n.inputs) for n in self.nodes), ("the model", self.outputs)]:
            for name in names:
                if name not in known:
                    raise ValueError(
                        "A tensor is an input of the model or the output of a node. "
                        f"Received: {name!r}, used by {user!r}"
                    )
        self._check_order()

    def _check_order(self) -> None:
        made = set(self.inputs)
        for node in self.nodes:
            late = [name for name in node.inputs if name not in made]
            if late:
                maker = self.makers[late[0]]
                cycle = self._path(node.name, maker)
                if cycle:
                    raise ValueError(
                        "The graph has a cycle: no layer of it can be computed first. Break it. "
                        f"Received: {' -> '.join([*cycle, node.name])}"
                    )
                raise ValueError(
                    f"Nodes are in topological order: put {maker!r} before {node.name!r}, which "
                    f"uses its {late[0]!r}. Received: nodes={[n.name for n in self.nodes]}"
                )
            made |= set(node.outputs)

    def _path(self, start: str, goal: str) -> list[str]:
        """Names of the nodes on a way from one node to another, or nothing."""
        before = {start: ""}
        waiting = [start]
        while waiting:
            name = waiting.pop()
            if name == goal:
                path = [name]
                while before[path[-1]]:
                    path.append(before[path[-1]])
                return path[::-1]
            made = self.named[name].outputs
            for other in self.nodes:
                if other.name not in before and any(t in made for t in other.inputs):
                    before[other.name] = name
                    waiting.append(other.name)
        return []

    @property
    def named(self) -> dict[str, GraphNode]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    @property
    def makers(self) -> dict[str, str]:
        """The node that makes each tensor; inputs of the model are left out."""
        return {name: node.name for node in self.nodes for name in node.outputs}

    def predecessors(self) -> dict[str, tuple[str, ...]]:
        """For each node, the nodes whose outputs it uses."""
        makers = self.makers
        return {
            node.name: tuple(dict.fromkeys(makers[t] for t in node.inputs if t in makers))
            for node in self.nodes
        }

    def with_costs(self, costs: Mapping[str, float]) -> Graph:
        """The same graph with measured costs.

        Args:
            costs: Node name to cost, for every node, in one unit.

        Raises:
            ValueError: If a node is missing, or a name is not of a node.
        """
        unknown = set(costs) - set(self.named)
        missing = set(self.named) - set(costs)
        if unknown or missing:
            raise ValueError(
                "Measured costs name every node of the graph, in one unit of time. Received: "
                f"costs without {sorted(missing)}, with unknown {sorted(unknown)}"
            )
        nodes = tuple(dataclasses.replace(n, cost=costs[n.name]) for n in self.nodes)
        return dataclasses.replace(self, nodes=nodes)

    def assign(self, stages: Mapping[str, int]) -> Graph:
        """The same graph with stages fixed by hand.

        Args:
            stages: Node name, or regex that matches whole node names, to virtual stage. A layer's
                name is the name of its first call only; later calls ("head#1") are free unless they
                are named too.

        Raises:
            ValueError: If a pattern is no regex, matches no node, or two patterns want different
                stages for one node.
        """
        wanted: dict[str, tuple[str, int]] = {}
        for pattern, stage in stages.items():
            matched = [n.name for n in self.nodes if _matches(pattern, n.name)]
            if not matched:
                raise ValueError(
                    "Each pattern of stages matches the whole name of a layer's call. The calls "
                    f"are {', '.join(n.name for n in self.nodes)}. Received: {pattern!r}: {stage!r}"
                )
            for name in matched:
                other, before = wanted.setdefault(name, (pattern, stage))
                if before != stage:
                    raise ValueError(
                        f"Two patterns put {name!r} on different stages. Keep one. Received: "
                        f"{other!r}: {before}, {pattern!r}: {stage}"
                    )
        nodes = tuple(
            dataclasses.replace(n, stage=wanted[n.name][1]) if n.name in wanted else n
            for n in self.nodes
        )
        return dataclasses.replace(self, nodes=nodes)


def _matches(pattern: str, name: str) -> bool:
    if pattern == name:
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except (re.error, TypeError) as error:
        raise ValueError(
            f"A pattern of stages is a node's name or a regular expression: {error}. "
            f"Received: {pattern!r}"
        ) from error


def _check_unique(what: str, names: list[Any]) -> None:
    twice = (
        sorted({name for name in names if names.count(name) > 1})
        if len(set(names)) < len(names)
        else []
    )
    if twice:
        raise ValueError(f"Every {what} has a name of its own. Received: {twice} more than once")
