"""What one micro-batch needs at once in a stage, before its functions are made and executed.

Its functions are cut from one joint trace: the forward pass, and the backward pass in one or in
halves. The first half holds what the second will need; the second gets what it is handed, and
nothing else of what the first has made. Each repeats what it needs. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from kdist.graphs.chunks import Chunk, Graph, node_of
from kdist.graphs.program_peak import repeated_peak
from kdist.graphs.recompute import Passes, ancestors, repeat

HANDED = "kdist_handed/"
"""Before the number of what the second half is handed, the name of its node."""


@dataclasses.dataclass(frozen=True)
class Halves:
    """A backward pass in halves.

    Attributes:
        outputs: References of what the forward pass returns.
        inward: Of the gradients that the first half returns.
        handed: Of what it hands to the second, with its bytes; those of views are 0.
        weights: Of the gradients that the second returns.
        lasting: Of what the forward pass has made that the second half needs.
    """

    outputs: Sequence[str]
    inward: Sequence[str]
    handed: Mapping[str, int]
    weights: Sequence[str]
    lasting: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A stage's forward and backward pass in one graph.

    Attributes:
        joint: The graph.
        seeds: See `repeat`.
        kind: Tells the type of a node.
        nbytes: Tells the bytes of a reference's tensor.
        calls: See `activation_peak`.
    """

    joint: Graph
    seeds: Collection[str]
    kind: Callable[[str], str]
    nbytes: Callable[[str], int]
    calls: bool

    def in_one(self, again: Collection[str], weights: Collection[str]) -> int:
        """Bytes of activations that may be there at once.

        Args:
            again: Forward nodes that may run again.
            weights: References of the gradients of parameters.
        """
        return self._peak(self.joint, self.seeds, again, weights, {})

    def in_halves(self, again: Collection[str], halves: Halves) -> int:
        """See `in_one`; a backward pass in halves."""
        names = {reference: f"{HANDED}{i}:0" for i, reference in enumerate(halves.handed)}
        handed = {names[reference]: nbytes for reference, nbytes in halves.handed.items()}
        first = [*halves.outputs, *halves.lasting, *halves.inward, *halves.handed]
        weights = [names.get(r, r) for r in halves.weights]
        taken = {n: [names.get(r, r) for r in read] for n, read in self.joint.inputs.items()}
        second = dataclasses.replace(
            self.joint, inputs=taken, results=[*halves.outputs, *halves.lasting, *weights]
        )
        return max(
            self._peak(dataclasses.replace(self.joint, results=first), self.seeds, again, (), {}),
            self._peak(second, {*self.seeds, *map(node_of, handed)}, again, weights, handed),
        )

    def _peak(
        self,
        graph: Graph,
        seeds: Collection[str],
        again: Collection[str],
        weights: Collection[str],
        handed: Mapping[str, int],
    ) -> int:
        """The peak of the forward pass and a function after it, which is handed something."""
        live = ancestors(graph, [*graph.results, *graph.effects])
        inputs = {n: r for n, r in graph.inputs.items() if n in live}
        graph = dataclasses.replace(graph, inputs=inputs)
        passes = Passes.of(graph, seeds)
        made = repeat(graph, passes, again, seeds)
        sources: dict[str, Sequence[str]] = {node_of(r): () for r in handed}
        whole = dataclasses.replace(made.graph, inputs={**sources, **made.graph.inputs})
        return repeated_peak(
            dataclasses.replace(made, graph=whole),
            passes,
            lambda one: _chunks(one, passes, sources),
            lambda n: "Handed" if n in sources else self.kind(n),
            lambda r: handed[r] if r in handed else self.nbytes(r),
            calls=self.calls,
            gradients=weights,
        )


def _chunks(graph: Graph, passes: Passes, handed: Collection[str]) -> list[Chunk]:
    """The forward pass, what is handed on, and what comes after, each of them a call."""
    forward = tuple(n for n in graph.inputs if n in passes.forward)
    after = tuple(n for n in graph.inputs if n not in passes.forward and n not in handed)
    known = passes.forward.union(handed)
    read = [r for n in after for r in graph.inputs[n] if node_of(r) in known and r[0] != "^"]
    gives = dict.fromkeys([*graph.results, *read])
    return [
        Chunk((), forward, tuple(r for r in gives if node_of(r) in passes.forward)),
        Chunk((), tuple(handed), tuple(r for r in gives if node_of(r) in handed)),
        Chunk(
            tuple(dict.fromkeys(read)),
            after,
            tuple(r for r in graph.results if node_of(r) in passes.seeded),
        ),
    ]
