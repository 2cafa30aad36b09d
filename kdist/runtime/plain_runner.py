"""Running programs on plain devices: each slice computes on its first device, on whole weights.

Where a slice is one device (no inner axis), this is all there is, and the whole step is one graph.
Where it has several, weights stay cut at rest, are gathered for compute, and gradients are cut
again: the path for models that DTensor cannot expand.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._compat import function_graphs
from kdist.graphs.instantiation import instantiated_cheaply
from kdist.optimizer.slice_gradients import SliceGradients
from kdist.program.batch import SplitBatch, for_each_term
from kdist.program.loss import shares_from_counts
from kdist.program.program import Program
from kdist.program.python_tapes import refuse_python_tapes
from kdist.program.recorded import made_by, recorded
from kdist.program.state import carried_for
from kdist.program.step_result import SliceResult
from kdist.runtime.or_without_xla import OrWithoutXla
from kdist.runtime.runner_contract import Begin, Collected, Coming, loss_factor, row_shares
from kdist.sharding.mesh import Topology
from kdist.storage.variables import Stored

import tensorflow as tf


class PlainRunner:
    """Runs a model's programs on one device per slice.

    Args:
        program: The pure functions.
        entries: `Stored` of each of `ModelState.params`.
        topology: The mesh.
        jit_compile: Compile each program with XLA.
        lacking: Of XLA that nobody asked for: told what it lacks, if a program goes without it.
        eager: Run op by op, for debugging.
    """

    def __init__(
        self,
        program: Program,
        entries: Sequence[Stored],
        topology: Topology,
        *,
        jit_compile: bool = False,
        lacking: Callable[[str], None] | None = None,
        eager: bool = False,
    ) -> None:
        self.program = program
        self.lacking = lacking
        self.entries = list(entries)
        self.topology = topology
        self.eager = eager
        gradients = self._checked(program.loss_and_gradients)
        self._gradients = self._function(gradients, jit_compile, seeds=1)
        self._loss = self._function(program.loss, jit_compile)
        self._counts = self._function(program.counts, False)
        self._counts_traced: Callable | None = None
        if eager:  # a graph all the same: what layers do besides, they do in the pass that follows
            counts = function_graphs.one_device_function(program.counts, reduce_retracing=True)
            self._counts = self._counts_traced = counts
        self._forward = self._function(program.infer, jit_compile)
        self._collect = self._function(program.collect, jit_compile)

    @property
    def by_tape(self) -> bool:
        """Whether a tape records forward passes, so that any gradient may come back."""
        return self.eager

    @property
    def devices(self) -> list[str]:
        """The device on which each slice computes."""
        return [one.devices[0] for one in self.topology.slices]

    def _function(self, fn: Callable, jit_compile: bool, seeds: int = 0) -> Callable:
        """One trace for all replicas, kept as one node each in the step's graph.

        Without inlining, first steps do not grow with the replicas: grappler and the placer see
        the program once.

        Args:
            fn: A pure function.
            jit_compile: Compile it with XLA.
            seeds: How many of its last arguments everything in its backward pass depends on.
        """
        if self.eager:
            return fn
        if jit_compile:
            xla = tf.function(fn, autograph=False, reduce_retracing=True, jit_compile=True)
            if self.lacking is None:
                return xla
            return OrWithoutXla(xla, lambda: self._function(fn, False, seeds), self.lacking)
        return function_graphs.one_device_function(fn, reduce_retracing=True)

    def _checked(self, differentiated: Callable) -> Callable:
        """A function that differentiates; several replicas call one trace of it."""
        if len(self.topology.slices) == 1:
            return differentiated

        @functools.wraps(differentiated)
        def checked(*given: Any, **named: Any) -> Any:
            result = differentiated(*given, **named)
            refuse_python_tapes()
            return result

        return checked

    def _inputs(self, replica: int) -> tuple[list[Any], list[Any]]:
        """Parameters and carried state of a replica, on its device."""
        params = [entry.whole_at(replica) for entry in self.entries]
        return params, carried_for(self.program.state, replica)

    def gradients(
        self, batch: SplitBatch, scale: Any, begin: Begin | None = None
    ) -> list[SliceResult]:
        """Loss and gradients of every slice; see `Program.loss_and_gradients`.

        Args:
            batch: The batch.
            scale: What the loss is multiplied by before differentiation, None for 1.
            begin: Begins the reduction of gradients that can be summed while others are computed.
        """
        return self._run(self._gradients, batch, True, (loss_factor(scale),), begin)

    def losses(self, batch: SplitBatch) -> list[SliceResult]:
        """Loss and outputs of every slice, in inference mode."""
        return self._run(self._loss, batch, False, (False,))

    def _run(
        self,
        function: Callable,
        batch: SplitBatch,
        training: bool,
        extra: tuple,
        begin: Begin | None = None,
    ) -> list[SliceResult]:
        self.program.tables.fetch(batch, training)
        inputs = self._all_inputs()
        rows = row_shares(batch)
        firsts = [tf.constant(float(r == 0), tf.float64) for r in range(len(inputs))]
        shares = [self._broadcast_rows(share) for share in rows]
        values = (shares[0], rows[0], firsts[0], *extra)
        if self._needs_counts(function, inputs[0], batch, training, values):
            shares = shares_from_counts(self._count(inputs, batch, training))
        arguments = []
        for r, device in enumerate(self.devices):
            with tf.device(device):
                given = [not_folded(t) for t in (shares[r], rows[r], firsts[r])]
            arguments.append((*inputs[r], batch.parts[r], *given, *extra))
        results = self._on_all(function, arguments, training, begin)
        return [SliceResult(**found) for found in results]

    def _all_inputs(self) -> list[tuple[list[Any], list[Any]]]:
        """See `_inputs`, of every replica."""
        inputs = []
        for r, device in enumerate(self.devices):
            with tf.device(device):
                inputs.append(self._inputs(r))
        return inputs

    def _on_all(
        self,
        function: Callable,
        arguments: Sequence[tuple],
        training: bool,
        begin: Begin | None = None,
    ) -> list[Any]:
        """Calls a function of `_function` on every slice's device.

        Args:
            function: The function.
            arguments: Per slice.
            training: Whether in training.
            begin: See `gradients`.
        """
        results = []
        for device, given in zip(self.devices, arguments, strict=True):
            with tf.device(device), self._cheaply():
                self._as_of(function, given, training)
                results.append(function(*given))
        return results

    def _as_of(self, function: Any, given: tuple, training: bool) -> None:
        """Goes back to what the trace for such arguments has taught; it is made if need be."""
        if not self.eager or function is self._counts_traced:
            self.program.traced(training).as_of(function.get_concrete_function(*given))

    def _cheaply(self) -> contextlib.AbstractContextManager:
        """Around calls of programs."""
        return contextlib.nullcontext() if self.eager else instantiated_cheaply(self.devices)

    def _broadcast_rows(self, share: Any) -> Any:
        return for_each_term(share, len(self.program.kinds))

    def _needs_counts(
        self, function: Callable, inputs: tuple, batch: SplitBatch, training: bool, values: tuple
    ) -> bool:
        """Whether shares depend on masks or weights: known once the program is traced."""
        if len(batch.parts) == 1 or not self.program.kinds:
            return False
        if not self.eager:
            self._as_of(function, (*inputs, batch.parts[0], *values), training)
        elif not self._traces_counts(inputs, batch, training):
            return True
        return self.program.traced(training).counts_by_data

    def _traces_counts(self, inputs: tuple, batch: SplitBatch, training: bool) -> bool:
        """Traces the pass that counts, where the others run op by op, and says whether it can be.

        Otherwise (a layer's Python looks at values) it runs op by op too: each layer twice then.
        """
        given = (*inputs, batch.parts[0], batch.counts[0], training)
        try:
            if self._counts_traced is not None:
                self._as_of(self._counts_traced, given, training)
        except Exception:  # whatever a layer's Python raises that gets no values
            self._counts, self._counts_traced = self.program.counts, None
        return self._counts_traced is not None

    def _count(self, inputs: list, batch: SplitBatch, training: bool) -> list[Any]:
        given = zip(inputs, batch.parts, batch.counts, strict=True)
        arguments = [(*one, part, n, training) for one, part, n in given]
        return self._on_all(self._counts, arguments, training)

    def outputs(self, batch: SplitBatch) -> list[SliceResult]:
        """Outputs of every slice in inference mode, and new state; see `Program.infer`."""
        self.program.tables.fetch(batch, training=False)
        given = zip(self._all_inputs(), batch.parts, strict=True)
        arguments = [(*inputs, part[0]) for inputs, part in given]
        results = self._on_all(self._forward, arguments, training=False)
        return [SliceResult(**found) for found in results]

    def collect(self, batch: SplitBatch, training: bool) -> Collected:
        """Forward pass of every slice without a loss."""
        self.program.tables.fetch(batch, training)
        inputs = self._all_inputs()
        given = zip(inputs, batch.parts, strict=True)
        arguments = [(*one, p[0], training) for one, p in given]
        found = self._on_all(self._collect, arguments, training)
        results = [SliceResult(**one) for one in found]
        return Collected(results, results, batch, inputs[0])

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Around a graph that never runs."""
        return contextlib.nullcontext()

    @staticmethod
    def coming(
        collected: Collected,
        cotangents: Sequence[Sequence[Any]],
        added: Sequence[Sequence[Any]],
    ) -> Coming:
        """What `pull_back` will get, as a loss of `collect`'s outputs shows it."""
        return Coming.of([made_by(vars(part)) for part in collected.parts], cotangents, added)

    def record(self, batch: SplitBatch, coming: Coming | None) -> Collected:
        """The same in training, for `pull_back` to follow; op by op here, where tapes record it.

        Args:
            batch: The batch.
            coming: What that will get; None where tapes record.
        """
        self.program.tables.fetch(batch, training=True)
        inputs, results, back = self._all_inputs(), [], []
        for device, given, part in zip(self.devices, inputs, batch.parts, strict=True):
            with tf.device(device):
                found, pull = recorded(self.program, *given, part[0])
            results.append(SliceResult(**found))
            back.append(pull)
        return Collected(results, results, batch, inputs[0], back)

    def pull_back(
        self,
        collected: Collected,
        cotangents: Sequence[Sequence[Any]],
        added: Sequence[Sequence[Any]],
        begin: Begin | None = None,
    ) -> list[list[Any]]:
        """Gradients of every slice, given those of the parts that `record` returned.

        Args:
            collected: What `record` returned.
            cotangents: Per part, the gradient of each flat output (None: unused).
            added: Per part, the gradient of each `add_loss` value (None: unused).
            begin: See `gradients`.
        """
        found = []
        every = zip(self.devices, collected.back, cotangents, added, strict=True)
        for device, pull, *given in every:
            with tf.device(device):
                found.append(pull(*given))
        return found

    def gradient_at(
        self, results: Sequence[Sequence[Any]], once: Mapping[int, Any]
    ) -> SliceGradients:
        """How the update reads gradients.

        Args:
            results: Per slice, the gradients of the connected variables.
            once: Those that are there once for all slices; see `SliceGradients`.
        """
        connected = self.program.trained.connected
        found = {s: {v: [g] for v, g in zip(connected, one)} for s, one in enumerate(results)}
        return self._source(found).joined(once)

    def _source(self, gradients: Mapping[int, Mapping[int, Sequence[Any]]]) -> SliceGradients:
        rows, devices = self.program.trained.rows, [[device] for device in self.devices]
        return SliceGradients(gradients, rows, self.entries, devices)


def not_folded(value: Any) -> Any:
    """A tensor that graph optimization does not take for a constant.

    It would copy the replicas' program, once for each constant it is called with, and optimize
    every copy (4-layer GPT, 8 replicas: 1.2 s of the first step).
    """
    return tf.compat.v1.placeholder_with_default(value, value.shape)
