"""Stages of several devices each; `kdist.runtime.one_device` has the same for one.

Stages are traced with declared layouts, and each function that is cut from the trace is lowered.
The collectives of a stage stay inside its slice; between stages each device sends its part to its
peer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist.config.without_effect import WithoutEffect
from kdist.dtensor import relayout, sizes
from kdist.dtensor.call import Lowered
from kdist.dtensor.collectives import BY_ONE, COLLECTIVES
from kdist.dtensor.flops import graph_flops
from kdist.dtensor.inputs import SliceInputs
from kdist.dtensor.islands import crosses, is_handed_on
from kdist.dtensor.layer_hooks import declared_layouts
from kdist.dtensor.lowered_program import Island, LoweredProgram
from kdist.dtensor.model_layouts import ModelLayouts
from kdist.dtensor.partial_sums import summand
from kdist.dtensor.program_layouts import laid_out, like, loss_view, whole_in_program, whole_readers
from kdist.dtensor.sharded import Sharded, replicate
from kdist.dtensor.stitching import Stitcher
from kdist.graphs.chunks import node_of
from kdist.graphs.layer_names import operation_of
from kdist.optimizer.slice_gradients import SliceGradients
from kdist.program.model_state import ModelState
from kdist.runtime.recomputing import ProgramSizes, all_again
from kdist.stages.functions import NO_TURNS, StageFunctions
from kdist.stages.penalties import penalty_function
from kdist.storage.sparse import LookUp
from kdist.storage.variables import Stored

import keras
from tensorflow.experimental import dtensor


class InnerAxes:
    """Runs a stage's functions on all devices of a slice.

    Args:
        state: The model's variables.
        entries: `Stored` of each of `ModelState.params`.
        layouts: The model's resolved layouts, on the mesh as programs see it and as weights are
            stored on it.
        alltoall: Whether re-layouts may use all-to-all.
        model: The model.
        jit_compile: See `Stitcher.stitch`.
        outlined: See `Stitcher`.

    Attributes:
        exact: See `OneDevice`.
        functions: See `OneDevice`.
        draws_alike: Each function is lowered by itself, and random numbers depend on the layout.
        gather_first: Whether gradients are gathered before they are cut; see `relayout.SliceTrace`.
    """

    exact, draws_alike, functions = True, False, StageFunctions

    def __init__(
        self,
        state: ModelState,
        entries: Sequence[Stored],
        layouts: ModelLayouts,
        alltoall: bool,
        model: keras.Model,
        *,
        jit_compile: bool,
        outlined: bool,
    ) -> None:
        self.state, self.entries, self.topology = state, list(entries), layouts.compute
        self.layouts, self.alltoall, self.gather_first = layouts, alltoall, False
        self.mesh = relayout.make_mesh(self.topology)
        self._inputs = SliceInputs(
            state, entries, self.topology, self.mesh, layouts.topology, layouts.tell_uncut
        )
        self.in_storage = self.places = self._inputs.places
        self.storage = layouts.topology
        self._whole = whole_readers(layouts)
        layers = [layer for layer in layouts.model_layers if layer is not model]
        paths = [layer.path or layer.name for layer in layers]
        self._lowering: dict[str, Any] = {
            "layouts": layouts,
            "mesh": self.mesh,
            "alltoall": alltoall,
            "paths": paths,
            "jit_compile": jit_compile,
            "outlined": outlined,
        }
        self._penalties: dict[tuple[int, ...], Lowered] = {}

    @property
    def storage_devices(self) -> list[tuple[str, ...]]:
        """See `OneDevice.storage_devices`."""
        return [one.devices for one in self.storage.slices]

    def devices(self, s: int) -> Sequence[str]:
        """See `OneDevice.devices`."""
        return self.topology.slices[s].devices

    @property
    def idle(self) -> Sequence[WithoutEffect]:
        """See `OneDevice.idle`; of what was traced."""
        return self.layouts.idle

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """See `OneDevice.tracing`."""
        with (
            relayout.tracing(self.mesh, self.topology, alltoall=self.alltoall) as trace,
            declared_layouts(self.layouts),
        ):
            trace.gather_first = self.gather_first
            trace.alltoall = not self.gather_first
            yield
        self.layouts.learn(trace)

    def taken(self, variable: keras.Variable, value: Any) -> Any:
        """See `kdist.stages.body.Backend`; whole where operations cannot take parts."""
        return whole_in_program(value) if id(variable) in self._whole else value

    def like(self, value: Any, other: Any) -> Any:
        """See `kdist.stages.body.Backend`."""
        return like(value, other)

    def seen(self, outputs: Any) -> Any:
        """See `kdist.stages.body.Backend`."""
        view = loss_view()
        return outputs if view is None else view(outputs)

    def hands_on(self, tensor: Any) -> bool:
        """See `kdist.stages.body.Backend`; lists of tensors stay in the function that made them.

        Sizes that the trace of a family of shapes does not know are known from examples.
        """
        passes = crosses if sizes.active() is None else is_handed_on
        return all(map(passes, tensor.op.outputs))

    def laid_out(self, gradient: Any, param: Any, position: int, by_batch: bool = False) -> Any:
        """See `kdist.stages.body.Backend`; as the parameter is."""
        placement, storage = self.entries[position].placement, self._inputs.storage
        return laid_out(gradient, param, placement, storage, by_batch)

    def part(
        self, concrete: Any, late: Sequence[int] = (), turns: Mapping[str, int] = NO_TURNS
    ) -> LoweredPart:
        """See `OneDevice.part`."""
        return LoweredPart(concrete, self.gather_first, late, turns, **self._lowering)

    @property
    def shares_memory(self) -> bool:
        """See `OneDevice.shares_memory`."""
        return self.storage.shares_memory

    def read(self, variable: keras.Variable, s: int) -> Sharded:
        """See `OneDevice.read`."""
        return self._inputs.value(variable, s)

    def everywhere(self, tensor: Any, like: Sharded) -> Sharded:
        """See `OneDevice.everywhere`."""
        layout = dtensor.Layout.replicated(self.mesh, tensor.shape.rank)
        return Sharded((tensor,) * self.mesh.size, layout, like.examples)

    def described(self, position: int) -> Sharded:
        """See `OneDevice.described`; a gradient is laid out like its parameter."""
        return self._inputs.described(self.entries[position])

    def gathered(self, position: int, parts: Sequence[Any]) -> Sharded:
        """See `OneDevice.gathered`."""
        return dataclasses.replace(
            self._inputs.described(self.entries[position]), parts=tuple(parts)
        )

    def data(self, data: Any) -> Any:
        """See `OneDevice.data`; cut over the axis that cuts the batch, if one does."""
        return data if self.topology.rows_axis is None else self._inputs.data(data)

    def rows_at(self, position: int, k: int) -> slice | None:
        """See `OneDevice.rows_at`."""
        return self.entries[position].placement.inner_index(self._inputs.places[0][k][1])[0]

    def penalties(
        self, s: int, positions: Sequence[int], params: Sequence[Sharded], scale: Any
    ) -> tuple[list[Sharded], list[Sharded]]:
        """See `OneDevice.penalties`."""
        key = tuple(positions)
        if key not in self._penalties:
            variables = [self.state.trainable[p] for p in positions]
            function = penalty_function(
                variables, keras.config.floatx(), lambda g, p: summand(self.like(g, p))
            )
            self._penalties[key] = Lowered(function, **self._lowering)
        values, found = self._penalties[key](s, key, (list(params), replicate(scale, self.mesh)))
        return list(values), list(found)

    def source(
        self, gradients: Mapping[int, Mapping[int, list[Any]]], rows: Mapping[int, LookUp]
    ) -> SliceGradients:
        """See `OneDevice.source`."""
        places = self.storage.places_in(self.topology)
        return SliceGradients(gradients, rows, self.entries, self.storage_devices, places)

    def gathered_paths(self) -> list[str]:
        """Weights that are made whole before use because an operation cannot take parts."""
        weights: list[keras.Variable] = [*self.state.params, *self.state.carried]
        return [v.path for v in weights if id(v) in self._whole]


class LoweredPart(Lowered):
    """A concrete function of a stage, as a program on the slices of its replicas.

    Args:
        concrete: The function.
        gather_first: See `InnerAxes`.
        late: See `OneDevice.part`.
        turns: See `OneDevice.part`.
        **how: Of `Lowered`.
    """

    def __init__(
        self,
        concrete: Any,
        gather_first: bool,
        late: Sequence[int],
        turns: Mapping[str, int],
        **how: Any,
    ) -> None:
        super().__init__(concrete, **how)
        self.concrete = concrete
        self.late, self.turns = late, turns
        self.gather_first, self.awaited = gather_first, True

    def call(self, s: int, *inputs: Any) -> list[Sharded]:
        """Calls it on slice `s`; a plain tensor is the same on every device."""
        if not self.concrete.outputs:  # the backward of a stage without weights; not for DTensor
            return []
        given = [t if isinstance(t, Sharded) else replicate(t, self.mesh) for t in inputs]
        return list(self(s, None, given))

    def trace(self, key: Any, inputs: Any) -> Any:
        """See `Lowered.trace`: the function is one."""
        return self.concrete

    def lower(self, key: Any, inputs: Any) -> tuple[Any, list[Sharded]]:
        """See `Lowered.lower`; the whole pipeline is traced again, if anything is.

        Raises:
            Retrace: It has to be.
        """
        return self._lower(key, inputs)

    def _stitcher(self, program: LoweredProgram, results: Sequence[int]) -> Stitcher:
        found = super()._stitcher(program, results)
        if self.late:
            all_again(found, self.late)
        for node in found.live if self.turns else ():
            operation = operation_of(found.originals.get(node, node), self.turns)
            if found.nodes[node].op in COLLECTIVES and operation in self.turns:
                found.turns[node] = self.turns[operation]
        return found

    def _refuse_all_island(self, islands: Sequence[Island]) -> None:
        """Refuses nothing: what is left to divide may be in other parts."""

    def communicating(self) -> set[str]:
        """The traced operations that communicate, once lowered; nodes of which none is known."""
        return set().union(*map(self._communicating, self.stitchers.values()))

    def _communicating(self, stitcher: Stitcher) -> set[str]:
        traced = {op.name for op in self.concrete.graph.get_operations()}
        nodes = [n for n in stitcher.live if stitcher.nodes[n].op in COLLECTIVES]
        return {operation_of(stitcher.originals.get(n, n), traced) for n in nodes}

    def result_bytes(self) -> dict[str, tuple[int, ...]]:
        """By traced operation, the bytes that a device has of its results, once lowered."""
        found: dict[str, tuple[int, ...]] = {}
        for stitcher in self.stitchers.values():
            sizes = ProgramSizes(stitcher)
            found |= {n: sizes.of_results(last) for n, last in self._last_nodes(stitcher).items()}
        return found

    def sums(self) -> dict[str, list[list[int]]]:
        """By traced operation whose result one device computes for all of a group, the groups."""
        found: dict[str, list[list[int]]] = {}
        for stitcher in self.stitchers.values():
            for name, last in self._last_nodes(stitcher).items():
                if stitcher.nodes[last].op in BY_ONE:
                    found[name] = stitcher.groups(stitcher.nodes[last])
        return found

    def _last_nodes(self, stitcher: Stitcher) -> dict[str, str]:
        """By traced operation the node whose results it has, where that is clear."""
        operations = {op.name for op in self.concrete.graph.get_operations()}
        nodes: dict[str, list[str]] = {}
        inputs, found = stitcher.graph.inputs, {}
        for node in stitcher.live:
            name = operation_of(stitcher.originals.get(node, node), operations)
            nodes.setdefault(name, []).append(node)
        for name in nodes.keys() & operations:
            # What DTensor added for an operation comes after it, or before it.
            mine = set(nodes[name])
            read = {node_of(r) for n in mine for r in inputs[n]}
            last = [n for n in nodes[name] if n not in read]
            if len(last) == 1:
                found[name] = last[0]
        return found

    def flops(self) -> float:
        """Of its matrix products."""
        return graph_flops(self.concrete.graph)


def islands_of(parts: Sequence[LoweredPart]) -> list[Island]:
    """What of some functions runs on whole operands; shares are of all of them."""
    total = sum(part.flops() for part in parts)
    found = [island for part in parts for island in part.islands]
    return [dataclasses.replace(i, share=i.flops / (total or 1.0)) for i in found]
