"""Computing forward tensors again in the backward pass, instead of keeping them.

A program is one graph of forward and backward pass. Which forward tensors the backward pass reads
*is* the choice of what is kept. Here nodes that may run again are copied into the backward pass:

```
forward   x ─► a ─► b ─► c ─► loss         a, b may run again; x is kept
backward       x ─┐
      gradient ───┴► gate ─► a' ─► b' ─► used by the gradient's next step
```

A graph runs what is ready, and copies would be ready at once. So what they take comes through a
*gate*: it hands a kept tensor on once the gradient has arrived at the first node that uses the
copies. No cycle can arise: each gate stands right before that node, in an order in which the
program could run. The gate also keeps TensorFlow from taking copies for the originals. It waits by
edges: TensorFlow takes an operation that hands on several tensors apart, and merges the rest.

The idea of choosing what crosses a joint graph is that of PyTorch's AOTAutograd partitioner, gates
are what Chen et al. 2016 (arXiv:1604.06174) call mirrored nodes with control. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

from kdist.graphs.chunks import ProgramGraph, node_of

AGAIN = "kdist_again/"
"""Before the name of a node, the name of its copy."""
GATE = "kdist_gate/"
"""Before the name of the first node that uses copies, in names of their gates."""


@dataclasses.dataclass(frozen=True)
class Repeated:
    """A program in which some forward nodes run again.

    Attributes:
        graph: The program.
        originals: By name of a copy, the node that it repeats.
        gates: By name of a node that hands on a tensor, what it takes and waits for.
        references: By name of a node, copies included: references in place of its own ones.
    """

    graph: ProgramGraph
    originals: Mapping[str, str]
    gates: Mapping[str, tuple[str, ...]]
    references: Mapping[str, Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Passes:
    """Which nodes of a program are what.

    Attributes:
        forward: Nodes that results or effects need which do not depend on the gradient.
        seeded: Nodes that depend on what the gradient begins with.
    """

    forward: frozenset[str]
    seeded: frozenset[str]

    @classmethod
    def of(cls, graph: ProgramGraph, seeds: Collection[str]) -> Passes:
        """Tells them apart.

        Args:
            graph: The program.
            seeds: Arguments that everything of the backward pass depends on.
        """
        seeded = descendants(graph, seeds)
        before = [r for r in graph.results if node_of(r) not in seeded]
        forward = ancestors(graph, [*before, *graph.effects]) - seeded
        return cls(frozenset(forward), frozenset(seeded))


def repeat(
    graph: ProgramGraph,
    passes: Passes,
    again: Collection[str],
    seeds: Collection[str],
    fetched: Collection[str] = (),
) -> Repeated:
    """Copies forward nodes to where the backward pass uses them.

    Args:
        graph: The program.
        passes: Which nodes are what.
        again: Forward nodes that may run again; of these the ones are copied that lead to what the
            backward pass reads. All others are kept.
        seeds: See `Passes.of`.
        fetched: Arguments that are gathered anew for every chunk; they need no gate.
    """
    ordered = gradients_in_step(graph, passes)
    return _Repeating(ordered, passes, set(again), set(seeds), set(fetched)).result()


class _Repeating:
    """The work of `repeat`."""

    def __init__(
        self,
        graph: ProgramGraph,
        passes: Passes,
        again: set[str],
        seeds: set[str],
        fetched: set[str],
    ) -> None:
        self.graph, self.passes = graph, passes
        self.again = (again & passes.forward) - set(graph.effects)
        self.arriving = passes.seeded | seeds
        self.position = {name: i for i, name in enumerate(graph.inputs)}
        self.free = follows_from(graph, {*graph.constants, *fetched})
        """What needs no gate: constants, what is gathered, and what follows from these."""
        self.copied = self._copied()
        self.first = self._first_uses()
        self.inputs: dict[str, tuple[str, ...]] = {}
        self.gates: dict[str, tuple[str, ...]] = {}
        self.arrivals: set[str] = set()
        self.readers: list[str] = []
        """Nodes that read copies of the gates before."""
        self.references: dict[str, dict[str, str]] = {}

    def result(self) -> Repeated:
        """The program with copies."""
        moved: dict[int, list[str]] = {}
        for name in self.graph.inputs:
            if name in self.first:
                moved.setdefault(self.first[name], []).append(name)
        for number, name in enumerate(self.graph.inputs):
            if number in moved:
                self._add_copies(moved[number], name)
            if name in self.passes.seeded:
                self._add_rewired(name)
            elif name not in self.first or name in self.copied:
                self.inputs[name] = tuple(self.graph.inputs[name])
        made = frozenset([*self.gates, *(AGAIN + name for name in self.copied)])
        # Of what only the backward pass used, the originals are gone.
        whole = dataclasses.replace(
            self.graph, inputs=self.inputs, again=made, arrivals=frozenset(self.arrivals)
        )
        live = ancestors(whole, [*whole.results, *whole.effects])
        inputs = {name: taken for name, taken in self.inputs.items() if name in live}
        graph = dataclasses.replace(whole, inputs=inputs)
        originals = {AGAIN + name: name for name in sorted(self.copied)}
        return Repeated(graph, originals, self.gates, self.references)

    def _add_copies(self, names: Sequence[str], user: str) -> None:
        """Adds, behind gates, copies that a node uses first, and what no gradient goes into."""
        taken = {reference for name in names for reference in self._outside(name)}
        through = self._gates(sorted(taken), user)
        for name in names:
            if name not in self.copied:
                self._add_rewired(name, through)
                continue
            renamed = {
                r: AGAIN + r if node_of(r) in self.copied else through[r]
                for r in self._data(name)
                if node_of(r) not in self.free
            }
            self.references[AGAIN + name] = renamed
            self.inputs[AGAIN + name] = tuple(renamed.get(r, r) for r in self._data(name))

    def _outside(self, name: str) -> list[str]:
        """What a node that waits takes of the forward pass."""
        known = self.copied | self.free
        return [
            r
            for r in self._data(name)
            if node_of(r) not in known
            and (node_of(r) in self.passes.forward or node_of(r) not in self.graph.inputs)
        ]

    def _gates(self, taken: Sequence[str], user: str) -> dict[str, str]:
        """Gates that open when the gradient has arrived at a node: by what they hand on."""
        arrivals = dict.fromkeys(r for r in self._data(user) if node_of(r) in self.arriving)
        waits = []
        for i, reference in enumerate(arrivals if taken else ()):
            arrival = f"{GATE}{user}/arrival{i}"
            # What earlier copies were for is done by then, so that few are there at once.
            self.gates[arrival] = (reference, *(f"^{one}" for one in self.readers))
            self.arrivals.add(arrival)
            waits.append(f"^{arrival}")
        found = {}
        for i, reference in enumerate(taken):
            self.gates[f"{GATE}{user}/{i}"] = (reference, *waits)
            found[reference] = f"{GATE}{user}/{i}:output:0"
        self.readers = [] if taken else self.readers
        self.inputs.update((n, g) for n, g in self.gates.items() if n not in self.inputs)
        return found

    def _add_rewired(self, name: str, through: Mapping[str, str] | None = None) -> None:
        """Adds a node of the backward pass, which takes copies.

        Edges stay: they wait for originals, which have run by then.
        """
        renamed = {r: AGAIN + r for r in self._data(name) if node_of(r) in self.copied}
        renamed |= {r: through[r] for r in self._data(name) if r in through} if through else {}
        if renamed:
            self.references[name] = renamed
            self.readers.append(name)
        self.inputs[name] = tuple(renamed.get(r, r) for r in self.graph.inputs[name])

    def _data(self, name: str) -> list[str]:
        return [r for r in self.graph.inputs[name] if not r.startswith("^")]

    def _copied(self) -> set[str]:
        """The nodes that run again: those that lead to what the backward pass reads."""
        found: set[str] = set()
        waiting = [
            node_of(reference)
            for name in self.graph.inputs
            if name not in self.passes.forward
            for reference in self._data(name)
        ]
        while waiting:
            name = waiting.pop()
            if name in self.again and name not in found and name not in self.free:
                found.add(name)
                waiting.extend(map(node_of, self._data(name)))
        return found

    def _first_uses(self) -> dict[str, int]:
        """Of copies, and of what the backward pass makes without a gradient, the first use.

        Positions of nodes that a gradient arrives at.
        """
        first: dict[str, int] = {}
        helpers = set(self.graph.inputs) - self.passes.forward - self.passes.seeded
        for name in reversed(list(self.graph.inputs)):
            if name in self.passes.seeded:
                use = self.position[name]
            elif name in first and (name in helpers or name in self.copied):
                use = first[name]
            else:
                continue
            for reference in self._data(name):
                source = node_of(reference)
                if source in self.copied or source in helpers:
                    first[source] = min(first.get(source, use), use)
        return first if self.copied else {}


def gradients_in_step(graph: ProgramGraph, passes: Passes) -> ProgramGraph:
    """The program with its backward pass in the order in which it could run at best.

    A program may have all gradients of parameters at its end. In that order the copies that are for
    them would wait for those of other blocks, and what they are multiplied by would be held.
    """
    depth: dict[str, int] = {}
    for name, references in graph.inputs.items():
        if name in passes.seeded:
            depth[name] = 1 + max((depth.get(node_of(r), 0) for r in references), default=0)
    names = [n for n in graph.inputs if n not in depth] + sorted(depth, key=depth.__getitem__)
    return dataclasses.replace(graph, inputs={n: graph.inputs[n] for n in names})


def descendants(graph: ProgramGraph, given: Iterable[str]) -> set[str]:
    """The nodes that depend on some arguments or nodes."""
    known, found = set(given), set()
    for name, references in graph.inputs.items():
        if any(node_of(r) in known for r in references):
            known.add(name)
            found.add(name)
    return found


def ancestors(graph: ProgramGraph, references: Iterable[str]) -> set[str]:
    """The nodes that some tensors depend on, those that make them included."""
    found: set[str] = set()
    waiting = list(map(node_of, references))
    while waiting:
        name = waiting.pop()
        if name not in found and name in graph.inputs:
            found.add(name)
            waiting.extend(map(node_of, graph.inputs[name]))
    return found


def follows_from(graph: ProgramGraph, given: Iterable[str]) -> set[str]:
    """Some arguments or nodes, with the nodes that depend on these alone."""
    found = set(given)
    for name, references in graph.inputs.items():
        if references and all(node_of(r) in found for r in references):
            found.add(name)
    return found


def handed_out(
    graph: ProgramGraph, passes: Passes, blocks: Mapping[str, Hashable]
) -> Iterator[str]:
    """The nodes of blocks whose results other forward nodes take, or the program returns."""
    found = set(map(node_of, graph.results))
    for name in passes.forward:
        for source in map(node_of, graph.inputs[name]):
            if source in blocks and blocks.get(name) != blocks[source]:
                found.add(source)
    return (name for name in graph.inputs if name in found and name in blocks)
