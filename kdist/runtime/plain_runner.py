"""Running programs on plain devices: each slice computes on its first device, on whole weights.

Where a slice is one device (no inner axis), this is all there is, and the whole step is one graph.
Where it has several, weights stay cut at rest, are gathered for compute, and gradients are cut
again: the path for models that DTensor cannot expand.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.graphs.instantiation import instantiated_cheaply
from kdist.optimizer.gradients import REDUCE, GradientSource
from kdist.optimizer.reduction import Reduction
from kdist.program.batch import SplitBatch
from kdist.program.loss import has_rows, shares_from_counts
from kdist.program.program import Program
from kdist.program.state import carried_for
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Coordinate, Index, UpdateUnit, covers, shape_of
from kdist.storage import sparse
from kdist.storage.variables import Stored

import tensorflow as tf

Begin = Callable[[GradientSource, Sequence[int]], Reduction]
"""Begins the reduction of the gradients that a source will have, of some trainable variables."""


@dataclasses.dataclass(frozen=True)
class Collected:
    """A forward pass without a loss, for a loss over the whole batch.

    Attributes:
        results: Per slice, or replica of a pipeline, as steps take them; see `Program.collect`.
        parts: Per call of the model on a part of the batch: `outputs`, `masks`, `added`.
        batch: The batch in these parts.
        given: Values of trainable and of carried variables, whole, for the loss.
        inputs: What the backward pass needs of it.
    """

    results: list[dict[str, Any]]
    parts: list[dict[str, Any]]
    batch: SplitBatch
    given: tuple[list[Any], list[Any]]
    inputs: Any


class PlainRunner:
    """Runs a model's programs on one device per slice.

    Args:
        program: The pure functions.
        entries: `Stored` of each trainable variable.
        topology: The mesh.
        jit_compile: Compile each program with XLA.
        eager: Run op by op, for debugging.
    """

    def __init__(
        self,
        program: Program,
        entries: Sequence[Stored],
        topology: Topology,
        *,
        jit_compile: bool = False,
        eager: bool = False,
    ) -> None:
        self.program = program
        self.entries = list(entries)
        self.topology = topology
        self.eager = eager
        self._gradients = self._function(program.loss_and_gradients, jit_compile, seeds=1)
        self._loss = self._function(program.loss, jit_compile)
        self._counts = self._function(program.counts, False)
        self._forward = self._function(program.infer, jit_compile)
        self._collect = self._function(program.collect, jit_compile)
        self._pull = self._function(program.cotangent_gradients, jit_compile, seeds=2)

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
            return tf.function(fn, autograph=False, reduce_retracing=True, jit_compile=True)
        return tf.function(
            fn,
            autograph=False,
            reduce_retracing=True,
            experimental_attributes={"_noinline": True},
        )

    def _inputs(self, replica: int) -> tuple[list[Any], list[Any]]:
        """Parameters and carried state of a replica, on its device."""
        params = [entry.whole_at(replica) for entry in self.entries]
        return params, carried_for(self.program.state, replica)

    def gradients(
        self, batch: SplitBatch, scale: Any, begin: Begin | None = None
    ) -> list[dict[str, Any]]:
        """Loss and gradients of every slice; see `Program.loss_and_gradients`.

        Args:
            batch: The batch.
            scale: What the loss is multiplied by before differentiation, None for 1.
            begin: Begins the reduction of gradients that can be summed while others are computed.
        """
        scale = tf.constant(1.0) if scale is None else tf.cast(scale, tf.float32)
        return self._run(self._gradients, batch, True, (scale,), begin)

    def losses(self, batch: SplitBatch) -> list[dict[str, Any]]:
        """Loss and outputs of every slice, in inference mode."""
        return self._run(self._loss, batch, False, (False,))

    def _run(
        self,
        function: Callable,
        batch: SplitBatch,
        training: bool,
        extra: tuple,
        begin: Begin | None = None,
    ) -> list[dict[str, Any]]:
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
        return self._on_all(function, arguments, begin)

    def _all_inputs(self) -> list[tuple[list[Any], list[Any]]]:
        """See `_inputs`, of every replica."""
        inputs = []
        for r, device in enumerate(self.devices):
            with tf.device(device):
                inputs.append(self._inputs(r))
        return inputs

    def _on_all(
        self, function: Callable, arguments: Sequence[tuple], begin: Begin | None = None
    ) -> list[Any]:
        """Calls a function of `_function` on every slice's device.

        Args:
            function: The function.
            arguments: Per slice.
            begin: See `gradients`.
        """
        results = []
        for device, given in zip(self.devices, arguments, strict=True):
            with tf.device(device), self._cheaply():
                results.append(function(*given))
        return results

    def _cheaply(self) -> contextlib.AbstractContextManager:
        """Around calls of programs."""
        return contextlib.nullcontext() if self.eager else instantiated_cheaply(self.devices)

    def _broadcast_rows(self, share: Any) -> Any:
        return tf.fill([len(self.program.kinds)], share)

    def _needs_counts(
        self, function: Callable, inputs: tuple, batch: SplitBatch, training: bool, values: tuple
    ) -> bool:
        """Whether shares depend on masks or weights: known once the program is traced."""
        if len(batch.parts) == 1 or not self.program.kinds:
            return False
        if self.eager:
            return True
        function.get_concrete_function(*inputs, batch.parts[0], *values)  # type: ignore[attr-defined]
        return self.program.traced(training).counts_by_data

    def _count(self, inputs: list, batch: SplitBatch, training: bool) -> list[Any]:
        given = zip(inputs, batch.parts, batch.counts, strict=True)
        return self._on_all(self._counts, [(*one, part, n, training) for one, part, n in given])

    def outputs(self, batch: SplitBatch) -> list[dict[str, Any]]:
        """Outputs of every slice in inference mode, and new state; see `Program.infer`."""
        given = zip(self._all_inputs(), batch.parts, strict=True)
        return self._on_all(self._forward, [(*inputs, part[0]) for inputs, part in given])

    def collect(self, batch: SplitBatch, training: bool) -> Collected:
        """Forward pass of every slice without a loss."""
        inputs = self._all_inputs()
        given = zip(inputs, batch.parts, strict=True)
        results = self._on_all(self._collect, [(*one, p[0], training) for one, p in given])
        return Collected(results, results, batch, inputs[0], inputs)

    def pull_back(
        self,
        collected: Collected,
        cotangents: Sequence[Sequence[Any]],
        added: Sequence[Sequence[Any]],
        begin: Begin | None = None,
    ) -> list[list[Any]]:
        """Gradients of every slice, given those of the parts that `collect` returned.

        Args:
            collected: What `collect` returned.
            cotangents: Per part, the gradient of each flat output (None: unused).
            added: Per part, the gradient of each `add_loss` value (None: unused).
            begin: See `gradients`.
        """
        batch, inputs = collected.batch, collected.inputs
        given = zip(inputs, batch.parts, cotangents, added, strict=True)
        arguments = [(*one, p[0], list(c), list(a)) for one, p, c, a in given]
        return self._on_all(self._pull, arguments, begin)

    def gradient_at(self, results: Sequence[Sequence[Any]]) -> PlainGradients:
        """How the update reads gradients.

        Args:
            results: Per slice, the gradients of the connected variables.
        """
        traced = self.program.trained
        found = {s: dict(zip(traced.connected, gradients)) for s, gradients in enumerate(results)}
        return PlainGradients(found, traced.rows, self.entries, self.devices)


class PlainGradients:
    """Whole gradients, one device per slice; see `kdist.optimizer.gradients.GradientSource`.

    A weight that several stages of a pipeline use has a gradient on each of them; they are summed
    like those of replicas.

    Args:
        gradients: Per slice, by trainable variable.
        rows: How variables whose gradient is rows are looked up.
        entries: `Stored` of each trainable variable.
        devices: The device of each slice.

    Attributes:
        once: Gradients that are there once for all slices, on the first one's device, by trainable
            variable: of weights that a loss over the whole batch uses.
    """

    def __init__(
        self,
        gradients: Mapping[int, Mapping[int, Any]],
        rows: Mapping[int, sparse.LookUp],
        entries: Sequence[Stored],
        devices: Sequence[str],
    ) -> None:
        self.gradients = gradients
        self.once: Mapping[int, Any] = {}
        self.look_ups = rows
        self.entries = list(entries)
        self.devices = list(devices)
        self._tables: dict[int, Any] = {}

    @property
    def rows(self) -> set[int]:
        """See `GradientSource`; both kinds of gradients have to be rows for their sum to be."""
        used = {v for one in self.gradients.values() for v in one}
        once = {v for v, gradient in self.once.items() if sparse.is_sparse(gradient)}
        return (set(self.look_ups) - set(self.once)) | (once - (used - set(self.look_ups)))

    def unit(self, variable: int, unit: UpdateUnit) -> Any:
        """See `GradientSource`."""
        if unit.rows is not None and variable in self.rows:
            return self._rows_of_table(variable, unit)
        placement = self.entries[variable].placement
        index = unit.index(placement) if unit.shard is not None else None
        total = self._total(variable, index)
        return total

    def _total(self, variable: int, index: Index | None = None) -> Any:
        """Sum over the slices of a gradient, or of its part at `index`."""
        placement = self.entries[variable].placement

        def part(gradient: Any, s: int) -> Any:
            if index is None:
                return gradient
            with tf.device(self.devices[s]):
                return part_of(gradient, index, placement.shape)

        found = {s: self.gradients.get(s, {}).get(variable) for s in placement.slices}
        parts = [part(gradient, s) for s, gradient in found.items() if gradient is not None]
        if variable not in self.once:
            return add_gradients(parts, self.look_ups.get(variable, sparse.LookUp()))
        once = part(self.once[variable], placement.slices[0])
        if not parts:
            return once
        total = add_gradients(parts, self.look_ups.get(variable, sparse.LookUp()))
        return add_gradients([total, once], sparse.LookUp())

    def _rows_of_table(self, variable: int, unit: UpdateUnit) -> Any:
        """Of a table's gradient, what falls on some rows: joined once, then cut for each owner.

        Cutting before would repeat the cut on every slice.
        """
        placement = self.entries[variable].placement
        slices = [s for s in placement.slices if variable in self.gradients.get(s, {})]
        slices = slices or [placement.slices[0]]
        with tf.device(self.devices[slices[variable % len(slices)]]):
            if variable not in self._tables:
                self._tables[variable] = self._total(variable)
            return part_of(self._tables[variable], unit.index(placement), placement.shape)

    def local(self, variable: int, at: Coordinate) -> Any:
        """See `GradientSource`."""
        placement = self.entries[variable].placement
        if at[0] not in placement.slices:
            return None
        index = placement.inner_index(at[1])
        found = [self.gradients.get(at[0], {}).get(variable)]
        if at[0] == placement.slices[0]:
            found.append(self.once.get(variable))
        parts = [
            part_of(tf.convert_to_tensor(gradient), index, placement.shape)
            for gradient in found
            if gradient is not None
        ]
        if not parts:  # a tied weight, on a stage through which no gradient flows
            return tf.zeros(shape_of(index), self.entries[variable].variable.dtype)
        return parts[0] if len(parts) == 1 else tf.add_n(parts)


def not_folded(value: Any) -> Any:
    """A tensor that graph optimization does not take for a constant.

    It would copy the replicas' program, once for each constant it is called with, and optimize
    every copy (4-layer GPT, 8 replicas: 1.2 s of the first step).
    """
    return tf.compat.v1.placeholder_with_default(value, value.shape)


def part_of(gradient: Any, index: Index, shape: Sequence[int]) -> Any:
    """The part of a whole variable's gradient at `index`."""
    if covers(index, shape):
        return gradient
    if sparse.is_sparse(gradient):
        return sparse.restrict(gradient, index, shape)
    return gradient[index]


def row_shares(batch: SplitBatch) -> list[Any]:
    """Each replica's share of the rows, float64."""
    size = tf.cast(batch.size, tf.float64)
    return [tf.math.divide_no_nan(tf.cast(count, tf.float64), size) for count in batch.counts]


def layer_weights(batch: SplitBatch, mean: bool) -> list[Any]:
    """What each replica's `add_loss` values count: its share of the rows, or 1 if it has any."""
    shares = row_shares(batch)
    return shares if mean else [has_rows(share) for share in shares]


def add_gradients(parts: Sequence[Any], look_up: sparse.LookUp) -> Any:
    """Sum of replicas' gradients; rows of embeddings stay rows (see `kdist.storage.sparse`)."""
    if all(sparse.is_sparse(p) for p in parts):
        return sparse.add(parts, look_up.by_batch, look_up.merged)
    if len(parts) == 1:
        return parts[0]
    return tf.add_n([tf.convert_to_tensor(p) for p in parts], name=REDUCE)
