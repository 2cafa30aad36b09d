"""Cutting a traced program into chunks that run one after the other.

A program is one graph: forward pass, loss and backward pass as the model's own call made them. A
chunk is what is computed between two communications: parameters are gathered for it, and the
gradients that it completes are reduced after it. Forward chunks follow the parameters in the order
in which they are used first; backward chunks follow them in reverse. The last forward chunk and the
first backward chunk are one, or apart, where something comes between them.

```
parameters   w0 w1 | w2 w3 | w4         the chunk of each, here 3
labels        0       1       2   1 and 0 again in the backward pass: 3, 4
```

Everything here is pure: a graph is names of nodes with the references that go into them. The idea
of cutting a joint graph of forward and backward is that of PyTorch's AOTAutograd partitioner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

PARTS = 16
"""Chunks that the parameters are cut into, about, where the largest of them allow."""

MOST_BYTES = 32 << 20
"""Of a chunk's parameters, of which a device holds two or three at once."""


@dataclasses.dataclass(frozen=True)
class ProgramGraph:
    """A program, as far as cutting it is concerned.

    Attributes:
        inputs: By name of each node, inputs first: the references that go into it ("node:output:0",
            the name of an argument, "^node" for an edge).
        results: References of what the program returns.
        effects: Nodes that have to run though no result needs them.
        constants: Small constants, of which every chunk has its own.
        again: Nodes of the backward pass that repeat forward ones; see `kdist.graphs.recompute`.
        arrivals: Those of them that others wait for; each chunk that does has its own.
    """

    inputs: Mapping[str, Sequence[str]]
    results: Sequence[str]
    effects: Collection[str] = ()
    constants: Collection[str] = ()
    again: Collection[str] = ()
    arrivals: Collection[str] = ()


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a program that runs as one function.

    Attributes:
        takes: References of what it is given: arguments of the program, results of earlier chunks.
        nodes: Names of its nodes, inputs first.
        gives: References of what it returns.
    """

    takes: tuple[str, ...]
    nodes: tuple[str, ...]
    gives: tuple[str, ...]


def node_of(reference: str) -> str:
    """Name of the node that makes a tensor, or that an edge waits for."""
    return reference.lstrip("^").split(":")[0]


def parameter_chunks(order: Iterable[int], nbytes: Sequence[int], parts: int = PARTS) -> list[int]:
    """Which chunk each parameter belongs to.

    Args:
        order: Positions of the parameters, in the order in which they are used first.
        nbytes: Bytes of each.
        parts: Chunks to aim at, more of a large model; a parameter of more than a part's bytes is
            a chunk of its own.

    Returns:
        Per parameter, the number of its chunk.
    """
    limit = min(-(-sum(nbytes) // parts), MOST_BYTES)
    found, number, size, largest = [0] * len(nbytes), 0, 0, 0
    for position in order:
        mine = nbytes[position]
        # An eighth more, so that a bias stays with its kernel.
        if size and 8 * (size + mine) > 9 * max(limit, largest):
            number, size, largest = number + 1, 0, 0
        found[position] = number
        size, largest = size + mine, max(largest, mine)
    return found


def whole_blocks(
    order: Iterable[int], chunk_of: Sequence[int], blocks: Sequence[int | None]
) -> list[int]:
    """Which chunk each parameter belongs to, if a block's are in one.

    What runs again in the backward pass then needs its parameters once.

    Args:
        order: See `parameter_chunks`.
        chunk_of: What `parameter_chunks` returned.
        blocks: Per parameter, the block that it belongs to, if any.
    """
    found, number, before, inside = list(chunk_of), -1, -1, None
    for position in order:
        mine = blocks[position]
        if mine is None or mine != inside:
            if chunk_of[position] != before or mine is not None:
                number += 1
            before, inside = chunk_of[position], mine
        found[position] = number
    return found


def cut(
    graph: ProgramGraph,
    chunk_of: Mapping[str, int],
    fetched: Collection[str] = (),
    seeds: Collection[str] = (),
    whole_forward: bool = False,
    apart: bool = False,
) -> list[Chunk]:
    """Cuts a program.

    What follows from parameters and constants alone, some of them fetched (casts, reshapes, a
    kernel with what adapts it added), is part of every chunk that uses it, with what it follows
    from. So nothing gathered outlives a chunk, nor anything of that size.

    Args:
        graph: The program.
        chunk_of: Of the arguments that are parameters, the chunk of each.
        fetched: Those of them that are gathered anew for every chunk.
        seeds: Arguments that everything of the backward pass depends on: what the loss is
            multiplied by, or gradients of the outputs.
        whole_forward: Whether the forward pass stays in one chunk.
        apart: Whether no chunk is of both passes: the seeds are known only after the forward one.

    Returns:
        Chunks, in the order in which they run, odd in number, or even where passes are apart; some
        may be empty.
    """
    labels = _Labels(graph, chunk_of, fetched, seeds, apart)
    return _chunks(graph, labels.final(whole_forward), labels.middle + labels.turn + 1)


class _Labels:
    """Which chunk each node runs in: as early as its inputs allow, unless that wastes memory."""

    def __init__(
        self,
        graph: ProgramGraph,
        chunk_of: Mapping[str, int],
        fetched: Collection[str],
        seeds: Collection[str],
        apart: bool,
    ) -> None:
        self.graph = graph
        self.first = dict(chunk_of)
        self.last = dict(chunk_of)
        self.middle = max(chunk_of.values(), default=0)
        self.turn = self.middle + apart
        """Number of the chunk that begins the backward pass."""
        self.sources = {n: list(map(node_of, refs)) for n, refs in graph.inputs.items()}
        only = self._closure(set(chunk_of))
        self.uses, wanted = self._parameters_behind(only), set(fetched)
        gathered = [name for name in only if self.uses[name] & wanted]
        copied = self._closure(wanted) | (self._ancestors(gathered) & only)
        self.copied = copied - set(graph.effects)
        self.seeded = self._descendants(set(seeds))
        before = [r for r in graph.results if node_of(r) not in self.seeded]
        self.forward = self._ancestors([*before, *graph.effects]) - self.seeded
        self.labels: dict[str, int] = {}

    def final(self, whole_forward: bool) -> dict[str, int]:
        """The label of every node that is not copied into the chunks that use it."""
        for name in self.sources:
            if name not in self.copied and name in self.forward:
                self._label_forward(name)
        for name in self.sources:
            if name not in self.copied and name not in self.forward:
                self._label_backward(name)
        self._defer()
        self._label_copied_results()
        if whole_forward:
            # What runs before the backward pass is one with its beginning.
            self.labels = {n: max(label, self.middle) for n, label in self.labels.items()}
        return {n: label for n, label in self.labels.items() if n not in self.graph.arrivals}

    def _label_forward(self, name: str) -> None:
        used = self.uses[name]
        label = max(self._behind(name), *(self.first[p] for p in used), 0)
        self.labels[name] = label
        for p in used:
            self.last[p] = max(self.last[p], min(label, self.middle))

    def _label_backward(self, name: str) -> None:
        back = [self.middle + self.turn - self.last[p] for p in self.uses[name]]
        self.labels[name] = max(self._behind(name), self.turn, *back, 0)

    def _behind(self, name: str) -> int:
        return max((self.labels.get(source, 0) for source in self.sources[name]), default=0)

    def _defer(self) -> None:
        """Moves what no parameter is needed for, and what only helps the backward pass.

        That includes what runs again. Dropout's masks depend on a seed alone; ready at once, they
        would wait for their use.
        """
        with_parameters = self._descendants(set(self.first))
        kept = {node_of(r) for r in (*self.graph.results, *self.graph.effects)}
        users: dict[str, int] = {}
        for name in reversed(list(self.sources)):
            if name in self.labels:
                helper = name not in self.forward and name not in self.seeded
                helper = helper or name in self.graph.again
                free = name not in self.seeded and name not in with_parameters
                if (helper or free) and name not in kept and name in users:
                    self.labels[name] = users[name]
            elif name not in users:
                continue
            # What is copied runs where it is used, the first time too.
            label = self.labels.get(name, users.get(name, 0))
            for source in self.sources[name]:
                users[source] = min(users.get(source, label), label)

    def _label_copied_results(self) -> None:
        """A result that follows from parameters alone comes with the last of them."""
        for name in map(node_of, self.graph.results):
            if name in self.copied:
                self.labels[name] = max((self.first[p] for p in self.uses[name]), default=0)

    def _closure(self, given: set[str]) -> set[str]:
        """The nodes that follow from some arguments and small constants alone."""
        known = given | set(self.graph.constants)
        found = set(self.graph.constants)
        for name, sources in self.sources.items():
            if sources and all(source in known for source in sources):
                known.add(name)
                found.add(name)
        return found

    def _parameters_behind(self, only: set[str]) -> dict[str, set[str]]:
        """Per node, the parameters that go into it, directly or through what follows from them."""
        behind: dict[str, set[str]] = {}
        found = {}
        for name, sources in self.sources.items():
            used = {source for source in sources if source in self.first}
            for source in sources:
                used |= behind.get(source, set())
            found[name] = used
            if name in only:
                behind[name] = used
        return found

    def _descendants(self, given: set[str]) -> set[str]:
        found: set[str] = set()
        for name, sources in self.sources.items():
            if any(source in given or source in found for source in sources):
                found.add(name)
        return found

    def _ancestors(self, references: Iterable[str]) -> set[str]:
        found: set[str] = set()
        waiting = list(map(node_of, references))
        while waiting:
            name = waiting.pop()
            if name not in found and name in self.sources:
                found.add(name)
                waiting.extend(self.sources[name])
        return found


def _chunks(graph: ProgramGraph, where: Mapping[str, int], count: int) -> list[Chunk]:
    """The chunks, given the number of each node's."""
    position = {name: i for i, name in enumerate(graph.inputs)}
    nodes: list[set[str]] = [set() for _ in range(count)]
    for name, number in where.items():
        nodes[number].add(name)
    takes: list[dict[str, None]] = [{} for _ in range(count)]
    for mine in nodes:
        waiting = list(mine)
        while waiting:
            for reference in graph.inputs[waiting.pop()]:
                source = node_of(reference)
                if source in mine or source in where or source not in position:
                    continue
                mine.add(source)  # a copy
                waiting.append(source)
    for number, mine in enumerate(nodes):
        for name in sorted(mine, key=position.__getitem__):
            for reference in graph.inputs[name]:
                if node_of(reference) not in mine and not reference.startswith("^"):
                    takes[number][reference] = None
    gives: list[dict[str, None]] = [{} for _ in range(count)]
    wanted = [r for taken in takes for r in taken if node_of(r) in where]
    for reference in (*graph.results, *wanted):
        if node_of(reference) in where:
            gives[where[node_of(reference)]][reference] = None
    return [
        Chunk(tuple(t), tuple(sorted(mine, key=position.__getitem__)), tuple(g))
        for t, mine, g in zip(takes, nodes, gives)
    ]
