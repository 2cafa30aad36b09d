"""What a program needs at once on one device, before it is copied and executed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from kdist.graphs.chunks import Chunk, ProgramGraph, node_of
from kdist.graphs.live_tensors import EACH, LiveTensors, Op, Output
from kdist.graphs.recompute import Passes, Repeated

DEVICE = "one"


def repeated_peak(
    made: Repeated,
    passes: Passes,
    chunks: Callable[[ProgramGraph], Sequence[Chunk]],
    kind: Callable[[str], str],
    nbytes: Callable[[str], int],
    *,
    calls: bool,
    ordering: Collection[str] = (),
    gradients: Collection[str] | None = None,
) -> int:
    """Bytes of activations that may be there at once in a program of which nodes run again.

    Args:
        made: The program.
        passes: Which nodes were what, before any ran again.
        chunks: Cuts it into chunks.
        kind: Tells the type of a node, of those before any ran again.
        nbytes: Tells the bytes of a reference's tensor, of those.
        calls: See `activation_peak`.
        ordering: Nodes whose edges only order, and are not executed.
        gradients: Results that are gradients of parameters; by default all of the backward pass.
    """

    def original(name: str) -> str:
        return made.originals.get(name, name)

    def nbytes_of(reference: str) -> int:
        name = node_of(reference)
        # A gate's result is a view.
        return 0 if name in made.gates else nbytes(original(name) + reference[len(name) :])

    taken: dict[str, Sequence[str]] = {
        name: [r for r in references if not (r[0] == "^" and node_of(r) in ordering)]
        for name, references in {**made.graph.inputs, **made.gates}.items()
    }

    def kind_of(name: str) -> str:
        return "Identity" if name in made.gates else kind(original(name))

    results = made.graph.results
    owned = [r for r in results if node_of(r) in passes.seeded]
    owned = [r for r in owned if gradients is None or r in gradients]
    return activation_peak(
        chunks(made.graph),
        taken,
        [r for r in results if r not in owned],
        owned,
        kind_of,
        nbytes_of,
        calls=calls,
    )


def activation_peak(
    chunks: Sequence[Chunk],
    inputs: Mapping[str, Sequence[str]],
    results: Sequence[str],
    gradients: Sequence[str],
    kind: Callable[[str], str],
    nbytes: Callable[[str], int],
    *,
    calls: bool,
) -> int:
    """Bytes of activations that may be there at once, as `LiveTensors` bounds them.

    Args:
        chunks: The program, chunk by chunk, with what runs again and its gates.
        inputs: Per node, the references that go into it.
        results: References of what the program returns, but for gradients of parameters.
        gradients: References of those; they are no activations.
        kind: Tells the type of a node.
        nbytes: Tells the bytes of a reference's tensor.
        calls: Whether a chunk is a call, which starts when all is there that it takes, and holds
            that until it ends. Otherwise it passes on what the chunk after takes of it, together.
    """
    peak = _Peak(inputs, kind, nbytes)
    for number, chunk in enumerate(chunks):
        if chunk.nodes:
            peak.add(number, chunk, calls)
    return peak.bytes(results, gradients)


class _Peak:
    """Operations of a program, as `LiveTensors` takes them."""

    def __init__(
        self,
        inputs: Mapping[str, Sequence[str]],
        kind: Callable[[str], str],
        nbytes: Callable[[str], int],
    ) -> None:
        self.inputs, self.kind, self.nbytes = inputs, kind, nbytes
        self.ops: list[Op] = []
        self.given: dict[str, Output] = {}
        """By reference, where later chunks take it from."""
        self.before: dict[str, None] = {}
        """What the chunk before gave."""
        self.taken: list[Output] = []
        """What the chunk at hand was given."""

    def add(self, number: int, chunk: Chunk, calls: bool) -> None:
        """Adds a chunk."""
        names = {n: f"{n}@{number}" for n in chunk.nodes}
        places: dict[str, dict[str, int]] = {n: {} for n in chunk.nodes}
        taken = [r for n in chunk.nodes for r in self.inputs[n] if not r.startswith("^")]
        for reference in (*taken, *chunk.gives):
            if (mine := places.get(node_of(reference))) is not None:
                mine.setdefault(reference, len(mine))
        waits, known = self._begin(number, chunk, calls)

        def where(reference: str) -> Output:
            name = node_of(reference)
            if name in places:
                return names[name], places[name][reference]
            return known.get(reference) or self.given.get(reference, (name, 0))

        for name in chunk.nodes:
            data = tuple(where(r) for r in self.inputs[name] if not r.startswith("^"))
            edges = tuple(
                names[r[1:]] for r in self.inputs[name] if r.startswith("^") and r[1:] in names
            )
            sizes, kind = tuple(map(self.nbytes, places[name])), self.kind(name)
            if kind == EACH:  # of its outputs those that something reads have a place
                numbers = [int(r.rpartition(":")[2]) for r in places[name]]
                there = max(numbers, default=0) < len(data)
                data, kind = (tuple(data[n] for n in numbers), EACH) if there else (data, "")
            self._op(names[name], kind, data, (*edges, *waits), sizes)
        self._end(number, chunk, calls, [where(r) for r in chunk.gives], tuple(names.values()))

    def _begin(
        self, number: int, chunk: Chunk, calls: bool
    ) -> tuple[tuple[str, ...], dict[str, Output]]:
        """What a chunk's nodes wait for, and where they find what the chunk takes."""
        taken = [r for r in chunk.takes if r in self.given and (calls or r in self.before)]
        begin = f"begin@{number}"
        edges = () if calls else tuple({self.given[r][0] for r in self.before})
        self._op(begin, EACH, tuple(self.given[r] for r in taken), edges, (0,) * len(taken))
        self.taken = [(begin, i) for i in range(len(taken))]
        return (begin,) if calls else (), {r: (begin, i) for i, r in enumerate(taken)}

    def _end(
        self,
        number: int,
        chunk: Chunk,
        calls: bool,
        gives: Sequence[Output],
        nodes: tuple[str, ...],
    ) -> None:
        """What a chunk gives; a call ends with all its nodes, and holds what it took till then."""
        self.before = dict.fromkeys(chunk.gives)
        if not calls:
            self.given.update(zip(chunk.gives, gives))
            return
        end = f"end@{number}"
        self._op(end, EACH, (*gives, *self.taken), nodes, (0,) * len(gives))
        self.given.update((r, (end, i)) for i, r in enumerate(chunk.gives))

    def bytes(self, results: Sequence[str], gradients: Sequence[str]) -> int:
        """The peak."""
        # Metrics read what the program returns, whenever they run.
        read = tuple(self.given[r] for r in results if r in self.given)
        self._op("results", "results", read, (), ())
        owned = self._owners([self.given[r] for r in gradients if r in self.given])
        return LiveTensors(self.ops, owned, ()).peak(DEVICE, ("other",)).nbytes

    def _owners(self, outputs: Sequence[Output]) -> list[Output]:
        """Where some outputs were made before they were passed on."""
        by_name = {one.name: one for one in self.ops}
        found = []
        for name, i in outputs:
            while name in by_name and by_name[name].kind == EACH:
                name, i = by_name[name].inputs[i]
            found.append((name, i))
        return found

    def _op(
        self,
        name: str,
        kind: str,
        inputs: tuple[Output, ...],
        waits: tuple[str, ...],
        sizes: tuple[int, ...],
    ) -> None:
        self.ops.append(Op(name, kind, DEVICE, inputs, waits, sizes))
