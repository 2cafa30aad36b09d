"""How a runner cuts its programs into chunks, and runs them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from kdist.config.recompute_blocks import Blocks
from kdist.dtensor.lowered_program import LoweredProgram
from kdist.dtensor.stitching import Stitcher
from kdist.graphs.chunks import PARTS, Chunk, ProgramGraph, cut, parameter_chunks, whole_blocks
from kdist.optimizer.gather import Gatherer, Places, placed
from kdist.pipeline.work import Work
from kdist.runtime.chunk_run import ChunkedProgram, ChunkRun, chunk_work
from kdist.runtime.recomputing import run_again
from kdist.sharding.mesh import Topology
from kdist.storage.variables import Stored

import tensorflow as tf

Keys = Callable[[], Sequence[Hashable | None]]
"""Gives the key of each parameter's bucket, None where it travels alone."""


KEPT = 64
"""Programs in chunks that are kept: of several functions, for several shapes of a batch."""


@dataclasses.dataclass(frozen=True)
class Chunking:
    """Why programs are cut into chunks.

    Attributes:
        forward: Whether the forward pass is cut too: gathered parameters are freed then, and it
            may begin while the values of later layers are on their way.
        free: Whether the backward pass waits for gradients to be reduced, to save memory.
        early: Whether sums wait for the updates before them, to save memory.
        keep: Positions of gathered parameters that stay from the forward to the backward pass.
        blocks: Layers that run again in the backward pass.
        gathers: Whether chunks gather parameters; otherwise each slice has read all of them.
        parts: Chunks to aim at; see `parameter_chunks`.
    """

    forward: bool
    free: bool
    early: bool = False
    keep: frozenset[int] = frozenset()
    blocks: Blocks = Blocks()
    gathers: bool = True
    parts: int = PARTS


AROUND_LOSS = Chunking(forward=False, free=False, gathers=False, parts=1)
"""Where nothing else asks for chunks, a loss over the whole batch comes between the passes."""


class Chunks:
    """The programs of one model in chunks.

    Args:
        chunking: How they are cut.
        entries: `Stored` of each of `ModelState.params`.
        topology: The mesh.
        devices: Where each slice computes; see `Gatherer`.
        keys: Which parameters share a bucket.
        jit_compile: Compile each chunk with XLA.
        places: Per slice and device of the programs, which coordinate of the mesh that is; the same
            by default.

    Attributes:
        works: What is done in the passes of the training step that was traced last; None before.
    """

    def __init__(
        self,
        chunking: Chunking,
        entries: Sequence[Stored],
        topology: Topology,
        devices: Sequence[Sequence[str]],
        keys: Keys,
        *,
        jit_compile: bool = False,
        places: Places | None = None,
    ) -> None:
        self.chunking, self.jit_compile = chunking, jit_compile
        self.places = places
        self.entries, self.devices = list(entries), list(devices)
        gathered = {i for i, one in enumerate(entries) if one.placement.gathered}
        self.gathered = gathered if chunking.gathers else set()
        self.works: list[Work] | None = None
        self.topology, self.keys = topology, keys
        self._programs: dict[Hashable, ChunkedProgram] = {}
        self._ended: tuple[Any, list[list[Any]], list[Work]] | None = None
        """The graph in which a pass was written last, per slice what ends that pass, and what is
        done in that graph so far."""
        self.chunk_of: dict[int, int] = {}

    def program(
        self,
        key: Hashable,
        concrete: Any,
        make: Callable[[], tuple[LoweredProgram, Stitcher]],
        seeds: Collection[int],
        *,
        apart: bool = False,
    ) -> ChunkedProgram:
        """A program in chunks, made on first use.

        Args:
            key: What tells it from others.
            concrete: The traced function; its first inputs are the parameters.
            make: Makes the program of one device, and what copies it.
            seeds: Positions of the flat inputs on which the backward pass depends.
            apart: Whether these are known only after the forward pass.
        """
        if key not in self._programs:
            program, stitcher = make()
            nbytes = [entry.placement.nbytes for entry in self.entries]
            order = first_uses(concrete, len(self.entries))
            chunk_of = parameter_chunks(order, nbytes, self.chunking.parts)
            if known := self.chunking.blocks.of:
                numbers = [known.get(id(entry.variable)) for entry in self.entries]
                chunk_of = whole_blocks(order, chunk_of, numbers)
            names = {one.position: one.name for one in program.arguments}
            gathered = {names[i] for i in self.gathered if i in names}
            begins = {names[i] for i in seeds if i in names}
            by_name = {names[i]: number for i, number in enumerate(chunk_of) if i in names}
            whole = not self.chunking.forward

            def chunks_of(graph: ProgramGraph) -> list[Chunk]:
                return cut(graph, by_name, gathered, begins, whole_forward=whole, apart=apart)

            if (blocks := self.chunking.blocks) and begins:
                calls = len(self.devices[0]) == 1
                run_again(stitcher, blocks, begins, gathered, chunks_of, calls=calls)
            chunks = chunks_of(stitcher.graph)
            self.chunk_of = dict(enumerate(chunk_of))
            self._programs[key] = ChunkedProgram(
                stitcher,
                chunks,
                self.devices,
                sorted(self.gathered),
                jit_compile=self.jit_compile,
                in_turn=bool(stitcher.again) or self.chunking.blocks.budget is not None,
            )
            for old in [*self._programs][:-KEPT]:
                del self._programs[old]
        return self._programs[key]

    @property
    def again(self) -> collections.Counter[tuple[str, bool]]:
        """How often nodes run again, by name, and whether in the backward pass.

        What follows from parameters alone does so in each chunk that uses it.
        """
        found = collections.Counter[tuple[str, bool]]()
        for one in self._programs.values():
            originals, known = one.stitcher.originals, set[str]()
            copies = collections.Counter[tuple[str, bool]]()
            for number, chunk in enumerate(one.chunks):
                for node in chunk.nodes:
                    if (name := originals.get(node, node)) in known:
                        copies[name, number > one.middle or node in originals] += 1
                    known.add(name)
            found |= copies
        return found

    def run(
        self,
        programs: Sequence[ChunkedProgram],
        given: Sequence[Sequence[Any]],
        completion: Completion | None = None,
    ) -> list[dict[int, list[Any]]]:
        """Runs a program on all slices; see `ChunkRun`."""
        run = self.begin(programs, given, {} if completion is None else completion.numbers)
        return self.end(run, completion)

    def begin(
        self,
        programs: Sequence[ChunkedProgram],
        given: Sequence[Sequence[Any]],
        numbers: Mapping[int, Collection[int]],
    ) -> ChunkRun:
        """A pass of which nothing has run yet.

        Args:
            programs: Per slice.
            given: See `ChunkRun`.
            numbers: See `Completion`; of what will be summed.
        """
        stored = self.devices
        if self.places is not None:
            stored = [one.devices for one in self.topology.slices]
        gather = Gatherer(self.entries, self.topology, stored, self.keys())
        work = chunk_work(
            programs,
            numbers,
            gather.groups,
            keep=self.chunking.keep,
            free=self.chunking.free,
            early=self.chunking.early,
        )
        fetch = gather if self.places is None else placed(gather, self.places)
        before = None if self._before is None else self._before[0]
        return ChunkRun(programs, given, work, fetch, before)

    def end(
        self, run: ChunkRun, completion: Completion | None = None
    ) -> list[dict[int, list[Any]]]:
        """Runs what is left of a pass; returns what `ChunkRun.run` does."""
        works = [*(() if self._before is None else self._before[1]), run.work]
        if completion is not None:
            self.works, run.complete = works, completion
        found = run.run()
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            self._ended = weakref.ref(graph), run.done[-1], works
        return found

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Meanwhile, passes are of a graph that never runs, and no other comes after them."""
        ended, self._ended = self._ended, None
        try:
            yield
        finally:
            self._ended = ended

    @property
    def _before(self) -> tuple[list[list[Any]], list[Work]] | None:
        """Of the pass that was written last into the graph of now, what ends it, and the works."""
        if self._ended is None or self._ended[0]() is not tf.compat.v1.get_default_graph():
            return None
        return self._ended[1:]


class Completion:
    """Hands complete gradients to the update.

    Args:
        numbers: Per trainable variable with a gradient, the flat results that this consists of.
        fill: Called with a variable and the results so far once its gradient is complete.
        reduce: Sums gradients: called with the variables that are complete, and those that are
            updated before; returns operations.
    """

    def __init__(
        self,
        numbers: Mapping[int, Collection[int]],
        fill: Callable[[int, list[dict[int, list[Any]]]], None],
        reduce: Callable[[Collection[int], Collection[int]], Sequence[Any]],
    ) -> None:
        self.numbers, self.fill, self.reduce = dict(numbers), fill, reduce
        self.complete: set[int] = set()

    def __call__(
        self,
        variables: Collection[int],
        used: Collection[int],
        found: list[dict[int, list[Any]]],
    ) -> Sequence[Any]:
        """See `kdist.runtime.chunk_run.Complete`."""
        for variable in variables:
            self.fill(variable, found)
        self.complete |= set(variables)
        return self.reduce(self.complete, used)


def first_uses(concrete: Any, count: int) -> list[int]:
    """The first `count` flat inputs of a function, in the order in which they are used first.

    Casts and other copies of a parameter do not count as its use.
    """
    known: dict[str, set[int]] = {t.op.name: {i} for i, t in enumerate(concrete.inputs[:count])}
    order: dict[int, None] = {}
    for operation in concrete.graph.get_operations():
        sources = [t.op.name for t in operation.inputs]
        if operation.name in known:
            continue
        found = set().union(*(known.get(name, set()) for name in sources))
        if all(name in known for name in sources) and operation.type != "Placeholder":
            known[operation.name] = found
        else:
            order.update(dict.fromkeys(sorted(found)))
    return list(dict.fromkeys([*order, *range(count)]))
