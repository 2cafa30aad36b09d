"""Running a program chunk by chunk on every slice, in the graph of a step.

A model without stages is one stage that goes forward through its chunks and back: what it does with
weights between them is made and proved as for a pipeline (`kdist.pipeline.work`). Where memory
counts, nothing runs far ahead: parameters of a chunk are gathered when the chunk before it starts,
and a chunk starts when the gradients of the last but `IN_FLIGHT` have been reduced.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kdist.dtensor.stitched import StitchedFunction
from kdist.dtensor.stitching import Stitcher
from kdist.graphs.chunks import Chunk, node_of
from kdist.graphs.instantiation import instantiated_cheaply
from kdist.pipeline.check_work import check_work
from kdist.pipeline.instructions import (
    Await,
    Backward,
    Forward,
    Free,
    Gather,
    Instruction,
    Reduce,
    Update,
)
from kdist.pipeline.work import IN_FLIGHT, Together, WeightUse, Work, chunk_schedule, work_of

import tensorflow as tf

Fetch = Callable[[Sequence[int], Sequence[Sequence[Any]]], list[dict[int, list[Any]]]]
"""(positions of parameters, per slice what to wait for) -> per slice and position, its parts."""
Complete = Callable[[Collection[int], Collection[int], list[dict[int, list[Any]]]], Sequence[Any]]
"""(parameters, those that are updated before, per slice the results so far: their parts) ->
operations that sum their gradients.
"""


class ChunkedProgram:
    """A program in chunks.

    Args:
        stitcher: Of the program.
        chunks: What `kdist.graphs.chunks.cut` made of it.
        devices: Those of every slice; of one device, functions are the same for all slices.
        fetched: Positions of the parameters that are gathered.
        jit_compile: Compile each chunk with XLA.
        in_turn: Whether a chunk of several devices starts when the one before has ended.

    Attributes:
        fetched: Per chunk, the positions of the parameters that are gathered for it.
    """

    def __init__(
        self,
        stitcher: Stitcher,
        chunks: Sequence[Chunk],
        devices: Sequence[Sequence[str]],
        fetched: Sequence[int],
        *,
        jit_compile: bool = False,
        in_turn: bool = False,
    ) -> None:
        self.jit_compile, self.in_turn = jit_compile, in_turn
        self.stitcher, self.chunks, self.devices = stitcher, list(chunks), list(devices)
        arguments = stitcher.program.arguments
        self.names = {one.name: one.position for one in arguments if one.position is not None}
        wanted = set(fetched)
        self.fetched = [
            [self.names[r] for r in one.takes if self.names.get(r) in wanted] for one in chunks
        ]
        self._functions: dict[tuple[int, int], StitchedFunction] = {}

    @property
    def last(self) -> int:
        """Number of the last chunk."""
        return len(self.chunks) - 1

    @property
    def middle(self) -> int:
        """Number of the chunk that ends the forward pass, and may begin the backward pass."""
        return self.last // 2

    def number(self, one: Instruction) -> int | None:
        """Which chunk an instruction runs; None for what is part of another one's."""
        if isinstance(one, Forward):
            return one.chunk
        number = self.last - one.chunk
        return number if number > self.middle else None

    def function(self, number: int, s: int) -> StitchedFunction:
        """The function of a chunk on a slice."""
        one_device = len(self.devices[s]) == 1
        key = number, 0 if one_device else s
        if key not in self._functions:
            devices = [""] if one_device else self.devices[s]
            self._functions[key] = self.stitcher.stitch(
                devices, self.chunks[number], jit_compile=self.jit_compile
            )
        return self._functions[key]


def chunk_work(
    programs: Sequence[ChunkedProgram],
    gradients: Mapping[int, Collection[int]],
    together: Together,
    *,
    keep: Collection[int],
    free: bool,
    early: bool,
) -> Work:
    """What is done between the chunks of a program.

    Args:
        programs: Per slice, the program: one for all, but for sizes.
        gradients: Per parameter, the flat results that its gradient consists of.
        together: Which parameters are gathered as one message.
        keep: Parameters that, once gathered, stay for the chunks that use them again.
        free: Whether chunks wait for gradients to be summed.
        early: Whether sums wait for the updates before them.
    """
    first, middle, last = programs[0], programs[0].middle, programs[0].last
    fetched = [
        list(dict.fromkeys(i for one in programs for i in one.fetched[n]))
        for n in range(len(first.chunks))
    ]
    made = {r: n for n, chunk in reversed([*enumerate(first.chunks)]) for r in chunk.gives}
    results = first.stitcher.program.results
    ends = {v: max(made.get(results[i], 0) for i in numbers) for v, numbers in gradients.items()}
    uses = [
        WeightUse(
            {"F": fetched[chunk], "B": fetched[last - chunk] if last - chunk > middle else ()},
            tuple(v for v, n in ends.items() if last - max(n, last - middle) == chunk),
        )
        for chunk in range(middle + 1)
    ]
    work = work_of(chunk_schedule(middle + 1), uses, together, kept=keep, free=free, early=early)
    check_work(work, uses)
    return work


class ChunkRun:
    """One pass over the chunks of a program, on all slices: its work, interpreted.

    Args:
        programs: Per slice, the program: one for all, but for sizes.
        given: Per slice and position of a flat input, its parts; None for what is gathered, and
            for what `take` gets.
        work: What `chunk_work` made.
        fetch: Gathers parameters.
        before: Per slice, operations that end the pass before this one in the same step.

    Attributes:
        complete: Sums gradients; there before the first is complete.
    """

    def __init__(
        self,
        programs: Sequence[ChunkedProgram],
        given: Sequence[Sequence[Any]],
        work: Work,
        fetch: Fetch,
        before: Sequence[list[Any]] | None = None,
    ) -> None:
        self.before = list(before or ([] for _ in given))
        self.programs, self.work = list(programs), work
        self.fetch, self.complete = fetch, None  # type: tuple[Fetch, Complete | None]
        self.values: list[dict[str, list[Any]]] = [{} for _ in given]
        self.found: list[dict[int, list[Any]]] = [{} for _ in given]
        self._left = collections.deque(work)
        self.held: list[dict[int, list[Any]]] = [{} for _ in given]
        self.done: list[list[list[Any]]] = []
        """Per chunk and slice, operations that run when it has handed on what the next one takes.

        A function of several devices becomes part of the step's graph: what waits for the call
        would wait for nothing.
        """
        self._sums: dict[tuple[int, ...], Sequence[Any]] = {}
        self._waits: list[Any] = []
        self._used: list[int] = []
        self.table: dict[type, Callable[[Any], None]] = {
            Forward: self._compute,
            Backward: self._compute,
            Gather: self._gather,
            Free: self._free,
            Reduce: self._reduce,
            Await: self._await,
            Update: self._update,
        }
        self.take(given)

    def take(self, given: Sequence[Sequence[Any]]) -> None:
        """Takes inputs that have become known; see `given`."""
        for s, (program, one) in enumerate(zip(self.programs, given, strict=True)):
            new = {n: one[i] for n, i in program.names.items() if one[i] is not None}
            self.values[s].update(new)
            self.found[s].update(self._known(s))

    def run(self, until: type[Instruction] | None = None) -> list[dict[int, list[Any]]]:
        """Goes on, to the end or to the first instruction of a kind.

        Returns:
            Per slice and number of a flat result, its parts, of the results so far.
        """
        while self._left and type(self._left[0]) is not until:
            one = self._left.popleft()
            self.table[type(one)](one)
        return self.found

    def _compute(self, one: Instruction) -> None:
        number = self.programs[0].number(one)
        if number is None:
            return
        self.done.append([self._call(number, s) for s in range(len(self.values))])
        self._waits = []
        for program, values, results in zip(self.programs, self.values, self.found):
            gives = set(program.chunks[number].gives)
            numbered = enumerate(program.stitcher.program.results)
            results.update((i, values[r]) for i, r in numbered if r in gives)

    def _gather(self, one: Gather) -> None:
        """Gathers when the last chunk but one has ended."""
        gates = self.done[-1 - IN_FLIGHT] if len(self.done) > IN_FLIGHT else self.before
        for held, fresh in zip(self.held, self.fetch(one.weights, gates)):
            held.update(fresh)

    def _free(self, one: Free) -> None:
        for held in self.held:
            for weight in one.weights:
                del held[weight]

    def _reduce(self, one: Reduce) -> None:
        assert self.complete is not None
        self._sums[one.weights] = self.complete(one.weights, self._used, self.found)
        self._used = []

    def _update(self, one: Update) -> None:
        """Sums that come later wait for it; it is written when all is (`optimizer/update`)."""
        self._used += one.weights

    def _await(self, one: Await) -> None:
        self._waits += self._sums[one.weights]

    def _known(self, s: int) -> dict[int, list[Any]]:
        """Results that are inputs, or known constants."""
        program, found = self.programs[s], {}
        stitcher = program.stitcher
        for i, reference in enumerate(stitcher.program.results):
            if reference in self.values[s]:
                found[i] = self.values[s][reference]
            elif node_of(reference) in stitcher.folded:
                known = stitcher.values[node_of(reference)]
                found[i] = []
                for device, value in zip(program.devices[s], known, strict=True):
                    with tf.device(device):
                        found[i].append(tf.constant(value))
        return found

    def _call(self, number: int, s: int) -> list[Any]:
        """Runs a chunk on a slice; returns what `done` has of it."""
        program, before = self.programs[s], self.done[-1][s] if self.done else []
        if not program.chunks[number].nodes:
            return before
        function, held = program.function(number, s), self.held[s]
        values = {
            **self.values[s],
            **{name: held[i] for name, i in program.names.items() if i in held},
        }
        waits = list(self._waits)
        if function.size > 1 and number and program.in_turn:
            # Nothing is run again while what was run again before is still used.
            waits += self._copies(program.chunks[number - 1].gives, s)
        if tf.executing_eagerly():
            waits, before = [], []
        if function.size > 1 and waits:
            values.update(self._after(waits, number, s))
        if function.has_effects:
            waits += before
        inputs = [[values[r][k] for r in function.chunk.takes] for k in range(function.size)]
        one_each = [devices[0] for devices in program.devices if len(devices) == 1]
        ordered = tf.control_dependencies(waits) if waits else contextlib.nullcontext()
        with tf.device(program.devices[s][0]), ordered, instantiated_cheaply(one_each or [""]):
            operation, parts = function(inputs)
        for i, reference in enumerate(function.chunk.gives):
            self.values[s][reference] = [mine[i] for mine in parts]
        if operation is None:  # executing eagerly, in the order of these calls
            return []
        return [operation] if function.size == 1 else self._copies(self._handed_on(number, s), s)

    def _after(self, waits: Sequence[Any], number: int, s: int) -> dict[str, list[Any]]:
        """What a chunk takes from the one before, once some operations have run."""
        taken = self._handed_on(number - 1, s)
        with tf.control_dependencies(waits):
            copies = iter(self._copies(taken, s))
        return {r: [next(copies).outputs[0] for _ in self.values[s][r]] for r in taken}

    def _handed_on(self, number: int, s: int) -> list[str]:
        """References of what the chunk after takes from a chunk; of its results, if nothing."""
        chunks = self.programs[s].chunks
        after = set(chunks[number + 1].takes) if number + 1 < len(chunks) else set()
        gives = chunks[number].gives
        return [reference for reference in gives if reference in after] or list(gives[:1])

    def _copies(self, references: Sequence[str], s: int) -> list[Any]:
        """Operations that copy tensors where they are."""
        found = []
        for reference in references:
            for device, part in zip(self.programs[s].devices[s], self.values[s][reference]):
                with tf.device(device):
                    found.append(tf.identity(part).op)
        return found
