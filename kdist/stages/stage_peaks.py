"""What one micro-batch needs at once in a stage, before its functions are made and executed.

Its functions are cut from one joint trace: the forward pass, and the backward pass in one or in
halves. The first half holds what the second will need; the second gets what it is handed, and
nothing else of what the first has made. Each repeats what it needs and is not given, behind gates
as in `kdist.runtime.recomputing.all_again`. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from kdist.graphs.chunks import Chunk, ProgramGraph, node_of
from kdist.graphs.program_peak import repeated_peak
from kdist.graphs.recompute import Passes, Repeated, ancestors, descendants, repeat

GIVEN = "kdist_given/"
"""Before the number of what the second half is given, the name of its node."""
PART = "/kdist_part"
"""After the name of a sum that lies elsewhere, the name of a device's own part of it."""


@dataclasses.dataclass(frozen=True)
class Halves:
    """A backward pass in halves.

    Attributes:
        inward: References of the gradients that the first half returns.
        weights: Of the gradients that the second returns.
        handed: Of what the first half hands to the second.
        lasting: Of what the forward pass has made that the second half needs.
        given: All that this is given, with its bytes; those of views are 0.
    """

    inward: Sequence[str]
    weights: Sequence[str]
    handed: Sequence[str]
    lasting: Sequence[str]
    given: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class StageTrace:
    """A stage's forward and backward pass in one graph.

    Attributes:
        joint: The graph; its results are those of the forward pass.
        forward: Its nodes of the forward pass.
        seeds: Arguments that come with the gradient.
        kind: Tells the type of a node.
        nbytes: Tells the bytes of a reference's tensor.
        calls: See `activation_peak`.
    """

    joint: ProgramGraph
    forward: Collection[str]
    seeds: Collection[str]
    kind: Callable[[str], str]
    nbytes: Callable[[str], int]
    calls: bool

    def reading(self, sums: Collection[str]) -> StageTrace:
        """The same on a device which reads some sums where they lie: on another one.

        It has its own part of them until then.

        Args:
            sums: Names of the nodes.
        """
        parts = {name: f"{name}{PART}" for name in sums if name in self.joint.inputs}
        inputs: dict[str, Sequence[str]] = {}
        for name, references in self.joint.inputs.items():
            if name in parts:
                inputs[parts[name]] = references
                references = (f"{parts[name]}:0",)
            inputs[name] = references
        mine = {parts[name] for name in parts if name in self.forward}

        def nbytes(reference: str) -> int:
            name, _, output = reference.rpartition(":")
            return 0 if name in parts else self.nbytes(f"{name.removesuffix(PART)}:{output}")

        return dataclasses.replace(
            self,
            joint=dataclasses.replace(self.joint, inputs=inputs),
            forward={*self.forward, *mine},
            kind=lambda name: "Add" if name in parts else self.kind(name.removesuffix(PART)),
            nbytes=nbytes,
        )

    def in_one(self, saved: Collection[str], inward: Sequence[str], weights: Sequence[str]) -> int:
        """Bytes of activations that may be there at once.

        Args:
            saved: References of what the forward pass hands to the backward pass.
            inward: Of the gradients of inputs.
            weights: Of those of parameters.
        """
        return self._peak(saved, [*inward, *weights], (), weights)

    def in_halves(self, saved: Collection[str], halves: Halves) -> int:
        """See `in_one`; a backward pass in halves."""
        first = self._peak(saved, [*halves.inward, *halves.handed], halves.lasting, ())
        return max(first, self._second(halves))

    def _second(self, halves: Halves) -> int:
        """Bytes in the second half, whatever came before it."""
        names = {reference: f"{GIVEN}{i}:0" for i, reference in enumerate(halves.given)}
        sizes = {names[reference]: nbytes for reference, nbytes in halves.given.items()}
        weights = [names.get(r, r) for r in halves.weights]
        late = [node_of(names[r]) for r in halves.handed if r in names]
        made, passes = self._backward(sizes, names, late, weights)
        sources: dict[str, Sequence[str]] = {node_of(r): () for r in sizes}
        whole = ProgramGraph({**sources, **made.graph.inputs}, weights)
        return repeated_peak(
            dataclasses.replace(made, graph=whole),
            passes,
            lambda _: _chunks(sources, [*sizes], made.graph.inputs, weights),
            lambda n: "Given" if n in sources else self.kind(n),
            lambda r: sizes[r] if r in sizes else self.nbytes(r),
            calls=self.calls,
            gradients=weights,
        )

    def _peak(
        self,
        saved: Collection[str],
        fetches: Sequence[str],
        lasting: Sequence[str],
        weights: Collection[str],
    ) -> int:
        """The peak of the forward pass and a function after it.

        Args:
            saved: References that the forward pass hands to the function.
            fetches: What this returns.
            lasting: What stays when it has ended.
            weights: Gradients of parameters among `fetches`.
        """
        made, passes = self._backward(saved, {}, (), fetches)
        results = self.joint.results
        live = ancestors(self.joint, [*results, *saved, *self.joint.effects])
        before = {n: r for n, r in self.joint.inputs.items() if n in live and n in self.forward}
        whole = ProgramGraph({**before, **made.graph.inputs}, [*results, *lasting, *fetches])
        gives = [*dict.fromkeys([*results, *saved])]
        return repeated_peak(
            dataclasses.replace(made, graph=whole),
            passes,
            lambda _: _chunks(before, gives, made.graph.inputs, fetches),
            self.kind,
            self.nbytes,
            calls=self.calls,
            gradients=weights,
        )

    def _backward(
        self,
        given: Collection[str],
        names: Mapping[str, str],
        late: Collection[str],
        fetches: Sequence[str],
    ) -> tuple[Repeated, Passes]:
        """A function of the backward pass as it will be, and which of its nodes are what.

        Args:
            given: References of what it is given.
            names: By a tensor's own reference, what it is given in place of that.
            late: Nodes that come with the gradient, beside `seeds`.
            fetches: What it returns.
        """
        late = {*self.seeds, *late}
        taken = {n: [names.get(r, r) for r in read] for n, read in self.joint.inputs.items()}
        fed = {*late, *map(node_of, given)}
        fed |= {n for n in taken if self.kind(n) == "Placeholder"}
        left = {n: read for n, read in taken.items() if n not in fed}
        constants = {n for n in left if self.kind(n) == "Const"}
        mine = ancestors(ProgramGraph(left, ()), fetches)
        graph = ProgramGraph({n: left[n] for n in left if n in mine}, fetches, constants=constants)
        seeded = frozenset(descendants(graph, late))
        passes = Passes(frozenset(graph.inputs) - seeded, seeded)
        again = passes.forward - set(map(node_of, fetches))
        return repeat(graph, passes, again, late), passes


def _chunks(
    before: Mapping[str, Sequence[str]],
    gives: Sequence[str],
    after: Mapping[str, Sequence[str]],
    fetches: Sequence[str],
) -> list[Chunk]:
    """What was there before, which gives something, and what comes after; each of them a call."""
    read = (r for references in after.values() for r in references if r[0] != "^")
    takes = tuple(dict.fromkeys(r for r in read if node_of(r) not in after))
    return [
        Chunk((), tuple(before), tuple(gives)),
        Chunk(takes, tuple(after), tuple(r for r in fetches if node_of(r) in after)),
    ]
