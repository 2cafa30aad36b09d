"""Which stages a node can be on, and what makes an assignment impossible."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kdist.pipeline.graph import Graph


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The stages that fixed nodes leave to every node.

    Attributes:
        first: Earliest stage of each node: the latest fixed one among itself and all that it needs.
        last: Latest stage of each node: the earliest fixed one among itself and all that need it.
        after_fixed: Whether a node is fixed or needs a fixed one, directly or not.
    """

    first: Mapping[str, int]
    last: Mapping[str, int]
    after_fixed: Mapping[str, bool]


def bounds(graph: Graph, stages: int) -> Bounds:
    """The stages left to every node.

    Raises:
        ValueError: If a fixed stage does not exist, or a node would have to run on an earlier stage
            than one that it needs; the message names both and the way between them.
    """
    used = graph.predecessors()
    first: dict[str, int] = {}
    why: dict[str, str | None] = {}
    after: dict[str, bool] = {}
    for node in graph.nodes:
        if node.stage is not None and not 0 <= node.stage < stages:
            raise ValueError(
                f"Stages are 0 to {stages - 1}. Received: stage {node.stage} for layer "
                f"{node.name!r}"
            )
        latest = max(used[node.name], key=lambda name: first[name], default=None)
        before = 0 if latest is None else first[latest]
        if node.stage is not None and node.stage < before:
            assert latest is not None
            raise _uses_a_later_stage(node.name, node.stage, latest, first, why)
        why[node.name] = latest if node.stage is None else None
        first[node.name] = before if node.stage is None else node.stage
        after[node.name] = node.stage is not None or any(after[name] for name in used[node.name])
    last = {node.name: stages - 1 for node in graph.nodes}
    for node in reversed(graph.nodes):
        if node.stage is not None:
            last[node.name] = node.stage
        for name in used[node.name]:
            last[name] = min(last[name], last[node.name])
    return Bounds(first, last, after)


def _uses_a_later_stage(
    name: str,
    stage: int,
    source: str,
    first: Mapping[str, int],
    why: Mapping[str, str | None],
) -> ValueError:
    """The error that names a fixed node, the fixed node of a later stage, and the way between."""
    later = first[source]
    path = [name, source]
    while (step := why[path[-1]]) is not None and first[step] == later:
        path.append(step)
    path.reverse()
    through = f" through {', '.join(map(repr, path[1:-1]))}" if len(path) > 2 else ""
    call = " (a later call of a layer can have a stage of its own)" if "#" in name else ""
    return ValueError(
        f"Layer {name!r} on stage {stage} uses the output of layer {path[0]!r} on the later stage "
        f"{later}{through}. Data only goes on to later stages: put {name!r} on stage {later} or "
        f"later, or {path[0]!r} on stage {stage} or earlier{call}. Received: {path[0]!r}: {later}, "
        f"{name!r}: {stage}"
    )


def check_used(graph: Graph, stages: int, stage_of: Mapping[str, int]) -> None:
    """Holds a complete assignment to the rules.

    Raises:
        ValueError: If a stage is empty, or a node uses the output of a later stage.
    """
    for name, used in graph.predecessors().items():
        for other in used:
            if stage_of[other] > stage_of[name]:
                raise ValueError(
                    f"Layer {name!r} on stage {stage_of[name]} uses the output of layer {other!r} "
                    f"on the later stage {stage_of[other]}. Data only goes on to later stages: "
                    f"move one of them. Received: {other!r}: {stage_of[other]}, "
                    f"{name!r}: {stage_of[name]}"
                )
    empty = sorted(set(range(stages)) - set(stage_of.values()))
    if empty:
        placed = [
            f"{stage}: {', '.join(n.name for n in graph.nodes if stage_of[n.name] == stage)}"
            for stage in range(stages)
            if stage not in empty
        ]
        raise ValueError(
            f"Every stage needs a layer; stage {', '.join(map(str, empty))} has none. Fix a layer "
            "there, use fewer stages, or let the free layers be balanced (unassigned='balance'). "
            f"Received: stages={stages}, {'; '.join(placed)}"
        )
