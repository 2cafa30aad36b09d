"""Cutting a program of one device into what it computes between two communications.

A segment can be one function: it takes what came before, and nothing that it returns comes back to
it by way of another segment. Equal segments of equal blocks, of micro-batches and of devices are
then one function, where their nodes would be that many copies in the graph of a step.

```
level     0            0           1           1           2
       norm, Q, K, V ─► attention ─► all-reduce ─► norm, up ─► all-reduce ─► ...
       one segment                 apart         one segment  apart
```

Pure: a program is names of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

LEAST = 8
"""Nodes of a segment; a call of fewer costs more than it saves."""


def segments(
    sources: Mapping[str, Sequence[str]],
    apart: Callable[[str], bool],
    constants: Collection[str] = (),
    least: int = LEAST,
) -> list[tuple[str, ...]]:
    """Cuts a program.

    A node's level is how many nodes that stay apart lie on the longest path to it; a segment is
    what hangs together within a level. Levels never fall along an edge, and rise behind a node that
    stays apart. So no path leaves a segment and comes back.

    Args:
        sources: By name of each node, those before others first, the nodes whose results it takes
            or that it waits for. Names that are no nodes are ignored.
        apart: Whether a node is in no segment, such as a collective.
        constants: Nodes without sources of which each segment has its own; they hold none together.
        least: Nodes of a segment, at least; what hangs together in smaller numbers is left out.

    Returns:
        The nodes of each segment, those before others first, constants not among them.
    """
    kept_out = {name for name in sources if name in constants or apart(name)}
    levels = _levels(sources, constants, kept_out)
    whole = _Joined(sources)
    for name, before in sources.items():
        for source in before:
            if levels.get(source) == levels[name] and not {name, source} & kept_out:
                whole.join(source, name)
    found: dict[str, list[str]] = {}
    for name in sources:
        if name not in kept_out:
            found.setdefault(whole.root(name), []).append(name)
    return [tuple(one) for one in found.values() if len(one) >= least]


def _levels(
    sources: Mapping[str, Sequence[str]], constants: Collection[str], kept_out: set[str]
) -> dict[str, int]:
    """The level of each node; what follows from nothing apart is as late as its first reader."""
    levels: dict[str, int] = {}
    rises = kept_out.difference(constants)
    for name, before in sources.items():
        behind = (levels[one] + (one in rises) for one in before if one in levels)
        levels[name] = max(behind, default=0)
    first_reader: dict[str, int] = {}
    for name in reversed(list(sources)):
        if not levels[name] and name not in kept_out:
            levels[name] = first_reader.get(name, 0)
        for source in sources[name]:
            first_reader[source] = min(first_reader.get(source, levels[name]), levels[name])
    return levels


class _Joined:
    """Sets of nodes that grow together."""

    def __init__(self, nodes: Collection[str]) -> None:
        self._above = {name: name for name in nodes}

    def root(self, name: str) -> str:
        """The node that stands for the set in which a node is."""
        while (above := self._above[name]) != name:
            self._above[name] = name = self._above[above]
        return name

    def join(self, one: str, other: str) -> None:
        """Makes the sets of two nodes one."""
        self._above[self.root(one)] = self.root(other)
