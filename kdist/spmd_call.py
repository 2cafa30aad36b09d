"""Calling a pure function over DTensor: trace, check, lower, call, on any slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist import _private, lowered, spmd, spmd_limits
from kdist.hooks import declared_layouts
from kdist.lowered import Collective
from kdist.mesh import Topology
from kdist.notices import without_notices
from kdist.store import ModelLayouts

import tensorflow as tf
from tensorflow.experimental import dtensor


class CannotExpand(Exception):
    """The program has an operation that DTensor cannot run; carries which one."""


class Retrace(Exception):
    """The program must be traced again, with gradients gathered before they are cut."""


class Lowered:
    """One pure function, called with DTensors on any slice.

    Args:
        function: `function(*inputs)` over structures of tensors.
        layouts: Declared activation layouts.
        topology: The mesh.
        meshes: DTensor mesh of each slice.
        alltoall: Whether re-layouts may use all-to-all.
        paths: Paths of the model's layers, to say which layer causes a collective.
    """

    def __init__(
        self,
        function: Callable,
        layouts: ModelLayouts,
        topology: Topology,
        meshes: Sequence[dtensor.Mesh],
        alltoall: bool,
        paths: Sequence[str],
    ) -> None:
        self.function = function
        self.paths = list(paths)
        self.layouts = layouts
        self.topology = topology
        self.meshes = list(meshes)
        self.alltoall = alltoall
        self.traces: dict[Any, tf.types.experimental.ConcreteFunction] = {}
        self.captures: dict[Any, list[Any]] = {}
        self.facts: dict[Any, Any] = {}
        self.recorded: list[Collective] = []
        self.gather_first = False

    def __call__(self, s: int, key: Any, inputs: Any) -> Any:
        """Calls the function on slice `s`.

        Args:
            s: The slice.
            key: Signature of the inputs: shapes, dtypes, structure.
            inputs: Structure of DTensors on the slice's mesh.

        Returns:
            Structure of DTensors; not computed yet.
        """
        try:
            return self._call(s, key, inputs)
        except Retrace:
            self.gather_first = True
            for cache in (self.traces, self.captures, self.facts):
                cache.clear()
            return self._call(s, key, inputs)

    def _call(self, s: int, key: Any, inputs: Any) -> Any:
        concrete = self.trace(s, key, inputs)
        flat = [t for t in tf.nest.flatten(inputs, expand_composites=True) if t is not None]
        captures = self._packed_captures(s, key, concrete)
        with dtensor.default_mesh(self.meshes[s]):
            try:
                if (key, s) not in self.facts:
                    return self._first_call(s, key, concrete, flat, captures)
                return _private.call_flat(concrete, flat, captures)
            except UnicodeDecodeError as error:
                if (key, s) in self.facts:  # lowered before, so this is no lowering error
                    raise
                # TensorFlow's message quotes bytes that are no text.
                raise CannotExpand("an operation (its error cannot be read)") from error
            except (tf.errors.OpError, ValueError) as error:
                reason = spmd_limits.explain(error)
                if reason is None:
                    raise
                raise CannotExpand(reason) from error

    def _first_call(self, s: int, key: Any, concrete: Any, flat: list, captures: list) -> Any:
        """Calls, lowering on the way, and reads which collectives that made."""
        with without_notices(), lowered.record() as recorder, spmd.lowering(self.meshes[s]):
            result = _private.call_flat(concrete, flat, captures)
        if s == 0:
            found = lowered.collectives(recorder, self.meshes[0], self.paths)
            if not self.alltoall:
                self._refuse_alltoall(found)
            self.recorded = self.recorded or found
        self.facts[key, s] = True
        return result

    def _refuse_alltoall(self, found: Sequence[Collective]) -> None:
        """Operations may cause all-to-alls of their own; then first without, else not at all.

        DTensor reads its switch once per process, so it cannot be told per model.
        """
        bad = [c for c in found if c.kind == "all-to-all"]
        if not bad:
            return
        if not self.gather_first:
            raise Retrace
        raise CannotExpand(
            f"operations of layer {bad[0].layer!r} without an all-to-all (their operands are cut "
            "along different dims; lay them out alike with kdist.shard, or set "
            "enable_alltoall=True)"
        )

    def trace(self, s: int, key: Any, inputs: Any) -> Any:
        """The concrete function for slice `s`; traced, and checked, on first use.

        Raises:
            CannotExpand: It has an operation that DTensor must not be tried on.
        """
        for at in ((key, None), (key, s)):
            if at in self.traces:
                return self.traces[at]
        specs = tf.nest.map_structure(tensor_spec, inputs)
        traced = tf.function(self.function, autograph=False)
        with (
            spmd.tracing(self.meshes[s], self.topology, alltoall=self.alltoall) as trace,
            declared_layouts(self.layouts),
        ):
            trace.gather_first = self.gather_first
            # Directly at first: DTensor then leaves a tensor alone that has the layout already.
            # `_refuse_alltoall` looks at what came of it.
            trace.alltoall = self.alltoall or not self.gather_first
            concrete = traced.get_concrete_function(*specs)
        self.layouts.tell_uncut(trace.uncut)
        bad = spmd_limits.unsupported_ops(concrete.graph, self.topology.rows_axis is not None)
        if bad:
            raise CannotExpand(", ".join(f"{kind} ({name})" for kind, name in bad[:3]))
        # Explicit layouts name a mesh: such a trace serves one slice only.
        self.traces[key, s if trace.used else None] = concrete
        return concrete

    def _packed_captures(self, s: int, key: Any, concrete: Any) -> list[Any]:
        if (key, s) not in self.captures:
            packed = []
            for tensor in concrete.captured_inputs:
                if tensor.dtype == tf.resource:
                    raise CannotExpand(
                        "a variable that belongs to no layer of the model "
                        f"({getattr(tensor, 'name', tensor)})"
                    )
                packed.append(spmd.replicate(tensor, self.meshes[s]))
            self.captures[key, s] = packed
        return self.captures[key, s]


def signature(data: Any) -> tuple:
    """Hashable shapes and dtypes of a structure of tensors."""
    leaves = tf.nest.flatten(data)
    return tuple(None if t is None else (tuple(t.shape), t.dtype.name) for t in leaves)


def tensor_spec(tensor: Any) -> Any:
    """Spec of a tensor; None stays None."""
    return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)
