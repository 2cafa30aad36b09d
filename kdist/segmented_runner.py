"""Plain devices, segment by segment: for optimizer parallelism from level 2 on, and for overlap.

A segment's gradients go to their owners as soon as its backward half has made them. From level 2 on
nothing runs more than one segment ahead of that; at level 3, a segment's parameters are gathered
while the segment before it computes, and freed after each half.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kdist import _private
from kdist.batch import SplitBatch
from kdist.mesh import Topology
from kdist.placement import Index
from kdist.plain import PlainGradients, PlainRunner
from kdist.segment_halves import Run
from kdist.segmented import SegmentedProgram
from kdist.variables import Stored, assemble

import tensorflow as tf

IN_FLIGHT = 1
"""Segments whose gradients may be on their way to their owners while the next one computes."""


class SegmentedRunner(PlainRunner):
    """Runs a model's programs on one device per slice, segment by segment.

    Args:
        program: The pure functions.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
        keep_gathered: Whether gathered parameters stay from the forward to the backward half.
        free: Whether the backward pass waits for gradients to be reduced, to save memory.

    Attributes:
        fetched: How often each parameter is gathered in the training step that was traced last;
            None before.
    """

    program: SegmentedProgram

    def __init__(
        self,
        program: SegmentedProgram,
        entries: Sequence[Stored],
        topology: Topology,
        *,
        keep_gathered: bool,
        free: bool,
    ) -> None:
        super().__init__(program, entries, topology)
        self.keep_gathered = keep_gathered
        self.free = free
        self.fetched: Counter[int] | None = None
        self._forget()

    def _forget(self) -> None:
        """Starts a new graph."""
        self._runs: list[Run] = []
        self._reduced: list[tuple[tuple[int, ...], Any]] = []
        self._passes = [0] * len(self.devices)
        self._shards: dict[tuple[int, int, int], list[tuple[int, Index, Any]]] = {}
        """Parts of a variable, read for one use: (pass, fetch, variable) -> slice, index, value."""
        self._gates: dict[tuple[int, int, int], Any] = {}
        """What a fetch waits for: (slice, pass, fetch) -> tensors."""

    def _function(self, fn: Callable, jit_compile: bool) -> Callable:
        """Segments are functions; what is between them belongs to the step's graph."""
        return fn

    def gradients(self, batch: SplitBatch, scale: Any) -> list[dict[str, Any]]:
        """Loss and gradients of every slice; see `Program.loss_and_gradients`."""
        self._forget()
        results = super().gradients(batch, scale)
        self.fetched = Counter(variable for _, _, variable in self._shards)
        self._order_reads()
        return results

    def losses(self, batch: SplitBatch) -> list[dict[str, Any]]:
        """Loss and outputs of every slice, in inference mode."""
        self._forget()
        results = super().losses(batch)
        self._order_reads()
        return results

    def outputs(self, batch: SplitBatch) -> list[dict[str, Any]]:
        """See `PlainRunner.outputs`."""
        self._forget()
        results = super().outputs(batch)
        self._order_reads()
        return results

    def _inputs(self, replica: int) -> tuple[list[Any], list[Any]]:
        """Parameters that are stored whole, None for the others, and carried state."""
        _, carried = super()._inputs(replica)
        params = [None if e.placement.gathered else e.whole_at(replica) for e in self.entries]
        return params, carried

    def _needs_counts(
        self, function: Callable, inputs: tuple, batch: SplitBatch, training: bool, values: tuple
    ) -> bool:
        if len(batch.parts) == 1 or not self.program.kinds:
            return False

        def once() -> Any:
            with tf.device(self.devices[0]), self._replica(0):
                return function(*inputs, batch.parts[0], *values)["loss"]

        # Segments are traced here once, for all; a pass without them is short.
        tf.function(once, autograph=False).get_concrete_function()
        self._forget()
        return self.program.traced(training).counts_by_data

    @contextlib.contextmanager
    def _replica(self, r: int) -> Any:
        number, fetches = self._passes[r], itertools.count()
        self._passes[r] += 1

        def fetch(positions: Sequence[int], gate: Any) -> list[Any]:
            use = number, next(fetches)
            self._gates[r, *use] = gate
            with tf.control_dependencies(gate):
                return [self._gather(use, position, self.devices[r]) for position in positions]

        with self.program.replica(fetch, self.keep_gathered) as run:
            self._runs.append(run)
            yield

    def _gather(self, use: tuple[int, int], position: int, device: str) -> Any:
        """A whole parameter on a device. Each part is read once per use, and sent to all."""
        if (*use, position) not in self._shards:
            with tf.control_dependencies(None):
                self._shards[*use, position] = self._read(self.entries[position])
        parts = [(index, value) for _, index, value in self._shards[*use, position]]
        with tf.device(device):
            return tf.identity(parts[0][1]) if len(parts) == 1 else assemble(parts)

    @staticmethod
    def _read(entry: Stored) -> list[tuple[int, Index, Any]]:
        parts = []
        for shard in entry.placement.shards:
            at = shard.holders[0]
            # As the optimizer updates it: the model's call, which casts, is running.
            with tf.device(entry.device(at)), _private.as_stored():
                value = tf.convert_to_tensor(entry.locals[at].value)
            parts.append((at[0], shard.index, value))
        return parts

    def _order_reads(self) -> None:
        """A part is sent when its own slice gets to where it fetches the same variable.

        So no slice is sent parts of segments that it is far from: who needs parts of all slices
        waits for the slowest. A variable that one slice has is sent when all get there.
        """
        if tf.executing_eagerly():
            return
        for (number, fetch, _), parts in self._shards.items():
            for s, _, value in parts:
                slices = [s] if len(parts) > 1 else range(len(self.devices))
                gates = [t.op for r in slices for t in self._gates[r, number, fetch]]
                _private.run_after(value.op, gates)

    def gradient_at(self, results: Sequence[Sequence[Any]]) -> PlainGradients:
        """See `PlainRunner.gradient_at`; notes where each variable's gradients are reduced."""
        source = super().gradient_at(results)
        object.__setattr__(source, "reduced", self._note)
        return source

    def _note(self, variables: Sequence[int], gradient: Any) -> None:
        if not tf.executing_eagerly():
            tensor = gradient.values if is_rows(gradient) else gradient
            self._reduced.append((tuple(variables), tensor.op))

    def order_backward(self) -> None:
        """A backward half waits for the gradients of the last but `IN_FLIGHT` to be reduced."""
        for run in self._runs if self.free else ():
            last = {v: k for k, (positions, _) in enumerate(run.calls) for v in positions}
            ready: dict[int, list[Any]] = {}
            for variables, operation in self._reduced:
                # What is not made by a segment's backward half may come later than any of them.
                if all(v in last for v in variables):
                    ready.setdefault(max(last[v] for v in variables), []).append(operation)
            for k, (_, tensors) in enumerate(run.calls):
                waits = ready.get(k - 1 - IN_FLIGHT, [])
                calls = {t.op for t in tensors if t is not None and not is_rows(t)}
                for call in calls if waits else ():
                    # What is reduced inside a branch comes after the branch's condition anyway.
                    _private.run_after(call, [op for op in waits if op.graph is call.graph])


def is_rows(tensor: Any) -> bool:
    """Whether a gradient is rows."""
    return isinstance(tensor, tf.IndexedSlices)
