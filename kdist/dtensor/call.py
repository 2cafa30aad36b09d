"""Calling a pure function over the inner axes: trace, check, lower, and call on any slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._compat.function_graphs import is_variable
from kdist.display import progress
from kdist.display.warn import warn
from kdist.dtensor import limits, relayout, sizes
from kdist.dtensor.body import Body
from kdist.dtensor.collectives import CannotStitch
from kdist.dtensor.expansion import expand
from kdist.dtensor.hoisting import hoist
from kdist.dtensor.islands import CannotCut
from kdist.dtensor.layer_hooks import declared_layouts
from kdist.dtensor.lifting import lift
from kdist.dtensor.lowered import Collective
from kdist.dtensor.lowered_program import Function, Island, LoweredProgram
from kdist.dtensor.lowering import lower
from kdist.dtensor.model_layouts import ModelLayouts
from kdist.dtensor.partial_sums import Summed, marked
from kdist.dtensor.retraced import CannotExpand, Retrace
from kdist.dtensor.sharded import Sharded, replicate
from kdist.dtensor.signatures import apart_from_rows, structure, tensor_spec
from kdist.dtensor.stitched import StitchedFunction
from kdist.dtensor.stitching import Stitcher
from kdist.dtensor.texts import CannotSplit, TextsInFront, in_front
from kdist.dtensor.window_parts import of_parts
from kdist.dtensor.windows import convolves

import tensorflow as tf
from tensorflow.experimental import dtensor

MAX_SHAPES = 8
"""Shapes of a batch whose own programs are kept."""
ALL = 1 - 1e-9
GRADIENT_OF_RELAYOUT = "RelayoutLike"


class Lowered:
    """One pure function, called in a graph with parts of tensors, on any slice.

    What DTensor cannot expand of it are islands in it (`kdist.dtensor.islands`).

    Args:
        function: `function(*inputs)` over structures of tensors.
        layouts: Declared activation layouts, and the mesh as programs see it.
        mesh: The DTensor mesh of every slice.
        alltoall: Whether re-layouts may use all-to-all.
        paths: Paths of the model's layers, to say which layer causes a collective.
        jit_compile: See `Stitcher.stitch`.
        outlined: See `Stitcher`.

    Attributes:
        awaited: See `Stitcher.stitch`.
        recorded: Collectives of the first program.
        by_rows: Of programs for batches that are like the first but for their rows, by these.
        islands: Of the first program with any.
    """

    def __init__(
        self,
        function: Callable,
        layouts: ModelLayouts,
        mesh: dtensor.Mesh,
        alltoall: bool,
        paths: Sequence[str],
        *,
        jit_compile: bool = False,
        outlined: bool = True,
    ) -> None:
        self.function, self.outlined = function, outlined
        self.jit_compile, self.awaited = jit_compile, False
        self.paths = list(paths)
        self.layouts = layouts
        self.topology = layouts.compute
        self.mesh = mesh
        self.alltoall = alltoall
        self.traces: dict[Any, tf.types.experimental.ConcreteFunction] = {}
        self.recorded: tuple[Collective, ...] = ()
        self.by_rows: dict[int, tuple[Collective, ...]] = {}
        self._noted: Any = None
        self.islands: tuple[Island, ...] = ()
        self.gather_first = False
        self.stitchers: dict[Any, Stitcher] = {}
        self._calls: dict[Any, StitchedFunction] = {}

    def __call__(self, s: int, key: Any, inputs: Any) -> Any:
        """Calls the function on slice `s`.

        Args:
            s: The slice.
            key: Signature of the inputs: shapes, dtypes, structure.
            inputs: Structure of `Sharded` tensors.

        Returns:
            Structure of `Sharded` tensors.

        Raises:
            CannotExpand: It has an operation that DTensor cannot run.
        """
        key, given = self.lower(key, inputs)
        program = self.stitchers[key].program
        if (key, s) not in self._calls:
            self._calls[key, s] = self.stitchers[key].stitch(
                self.topology.slices[s].devices,
                jit_compile=self.jit_compile,
                awaited=self.awaited,
            )
        sizes.found(bounded=program.bounded)
        positions = [one.position for one in program.arguments if one.position is not None]
        taken = [[given[p].parts[k] for p in positions] for k in range(self.mesh.size)]
        _, parts = self._calls[key, s](taken)
        return packed(program, dict(enumerate(zip(*parts, strict=True))))

    def lower(self, key: Any, inputs: Any) -> tuple[Any, list[Sharded]]:
        """Lowers the function for such inputs, on first use.

        Returns:
            Under which key, and the flat inputs with what the function captured.
        """
        try:
            return self._lower(key, inputs)
        except Retrace:
            self.gather_first = True
            self.traces.clear()
            self.stitchers.clear()
            self._calls.clear()
            return self._lower(key, inputs)

    def lower_all(
        self, keys: Sequence[Any], inputs: Sequence[Any]
    ) -> list[tuple[Any, list[Sharded]]]:
        """See `lower`, for all slices, so that all are lowered alike."""
        before = self.gather_first
        found = [self.lower(key, one) for key, one in zip(keys, inputs, strict=True)]
        return found if self.gather_first == before else self.lower_all(keys, inputs)

    def _lower(self, key: Any, inputs: Any) -> tuple[Any, list[Sharded]]:
        concrete = self.trace(key, inputs)
        given = [t for t in tf.nest.flatten(inputs) if t is not None]
        given += [self._captured(t) for t in concrete.captured_inputs]
        texts = self._texts(concrete)
        if texts is not None:
            given = texts.computed(given, self.mesh, self.topology)
        layouts = [t.layout for t in given]
        active = sizes.active()
        key = (key, structure(inputs), active, *(layout.to_string() for layout in layouts))
        if key not in self.stitchers:
            if texts is None:
                program = self._expand(concrete, given)
            else:
                program = texts.numbered(self._expand(texts.rest, texts.taken(given)))
            self._refuse_alltoall(program.collectives)
            self._refuse_all_island(program.islands)
            self.layouts.tell_islands(program.islands)
            self.stitchers[key] = self._stitcher(program, marked(concrete))
            recorded = self.stitchers[key].recorded
            self.recorded = self.recorded or recorded
            self._note(key[0], recorded)
            self.islands = self.islands or program.islands
        return key, given

    def _note(self, key: Any, recorded: tuple[Collective, ...]) -> None:
        """Keeps what was recorded for data of a signature; other keys tell no rows."""
        if not all(isinstance(one, tuple | None) for one in key or (0,)):
            return
        rows, rest = apart_from_rows(key)
        if rows is not None and self._noted in (None, rest):
            self._noted = rest
            self.by_rows.setdefault(rows, recorded)

    @staticmethod
    def _texts(concrete: Any) -> TextsInFront | None:
        try:
            return in_front(concrete)
        except CannotSplit as error:
            if sizes.active() is not None:
                raise sizes.CannotLift("layers of texts have a program for each size") from error
            raise CannotExpand(str(error)) from error

    def _expand(self, concrete: Any, given: Sequence[Sharded]) -> LoweredProgram:
        if tf.variant in [t.dtype for t in (*concrete.inputs, *concrete.outputs)]:
            raise CannotExpand("a loop that keeps a list of tensors for its gradient")
        progress.at("cutting a program over the mesh, by DTensor")
        try:
            with relayout.lowering(self.mesh):
                return self._lowered(concrete, given)
        except CannotCut as error:
            raise CannotExpand(str(error)) from error
        except CannotStitch as error:
            raise _refused(str(error)) from error
        except UnicodeDecodeError as error:
            # TensorFlow's message quotes bytes that are no text.
            raise _refused("an operation (its error cannot be read)") from error
        except (tf.errors.OpError, ValueError) as error:
            reason = limits.explain(error)
            if reason is None:
                raise
            if GRADIENT_OF_RELAYOUT in reason and not self.gather_first:
                self._tell_no_alltoall()
                raise Retrace from error
            raise _refused(reason) from error

    def _tell_no_alltoall(self) -> None:
        """DTensor's own gradient of a re-layout is one too, and may contradict those around it."""
        if self.alltoall:
            self.layouts.moves_gathered = True
            warn(
                "enable_alltoall=True: DTensor cannot differentiate re-layouts of this model one "
                "after the other where all-to-alls do them. They are gathered and cut instead: "
                "results are the same, and more bytes travel. Lay neighbouring layers out alike "
                "to have all-to-alls."
            )

    def _lowered(self, concrete: Any, given: Sequence[Sharded]) -> LoweredProgram:
        """The program; if sizes are unknown, one that is made of those of a few examples."""
        layouts, examples = [t.layout for t in given], [t.examples for t in given]
        channels = bool(self.layouts.convolutions_in_parts())
        if not any(examples):
            # At first all-to-alls may stay, for `_refuse_alltoall` to see.
            alltoall = self.alltoall or not self.gather_first
            return expand(
                concrete,
                self.mesh,
                layouts,
                self.paths,
                alltoall=alltoall,
                along_sequence=bool(self.layouts.sequence),
                channels=channels,
            )
        body = Body(concrete)
        if channels and (found := [n for n in body.nodes.values() if convolves(n.op)]):
            raise sizes.CannotLift(f"channels of a convolution are cut: {found[0].name}")
        if islands := limits.unsupported(body):
            raise sizes.CannotLift(f"islands are of one size: {next(iter(islands.values()))}")
        hoisted = hoist(concrete, examples)
        ranks = [one.spec.shape.rank for one in hoisted.made]
        layouts += [dtensor.Layout.replicated(self.mesh, rank) for rank in ranks]
        programs = [
            lower(Function.of(hoisted.concrete, shapes, values), self.mesh, layouts, self.paths)
            for shapes, values in zip(hoisted.shapes, hoisted.values, strict=True)
        ]
        traced = Body(hoisted.concrete)
        if parts := [why for one in programs for why in of_parts(traced, one).values()]:
            raise sizes.CannotLift(parts[0])
        if body.said and not all(one.knows_sizes for one in programs):
            raise sizes.CannotLift("a size that values decide, and set_shape says")
        return lift(programs, hoisted, layouts)

    def _stitcher(self, program: LoweredProgram, results: Sequence[int]) -> Stitcher:
        axis, summed = self.topology.rows_axis, None
        if axis is not None:
            layouts = [one.sharding_specs for one in program.layouts]
            numbers = [i for i in results if axis not in layouts[i]]
            summed = Summed(axis, numbers) if numbers else None
        try:
            return Stitcher(program, summed, outlined=self.outlined)
        except CannotStitch as reason:
            raise _refused(str(reason)) from reason

    def _refuse_alltoall(self, found: Sequence[Collective]) -> None:
        """Operations may cause all-to-alls of their own; then first without, else not at all.

        DTensor reads its switch once per process, so it cannot be told per model.
        """
        bad = [c for c in found if c.kind == "all-to-all"]
        if self.alltoall or not bad:
            return
        if not self.gather_first:
            raise Retrace
        what = f"operations of layer {bad[0].layer!r}" if bad[0].layer else f"{bad[0].node!r}"
        raise CannotExpand(
            f"{what} without an all-to-all (their operands are cut "
            "along different dims; lay them out alike with kdist.shard, or set "
            "enable_alltoall=True)"
        )

    def _refuse_all_island(self, islands: Sequence[Island]) -> None:
        """Where nothing is left to divide, one device of a slice is as good as all."""
        if islands and sum(one.share for one in islands) > ALL:
            raise CannotExpand(f"{islands[0].reason}, which every matrix product is part of")

    def trace(self, key: Any, inputs: Any) -> Any:
        """The concrete function; traced on first use."""
        key = (key, structure(inputs), sizes.active())
        if key in self.traces:
            return self.traces[key]
        specs = tf.nest.map_structure(tensor_spec, inputs)
        traced = tf.function(self.function, autograph=False)
        with (
            relayout.tracing(self.mesh, self.topology, alltoall=self.alltoall) as trace,
            declared_layouts(self.layouts),
        ):
            progress.at("tracing layers")
            trace.gather_first = self.gather_first
            # Directly at first: DTensor then leaves a tensor alone that has the layout already.
            # `_refuse_alltoall` looks at what came of it.
            trace.alltoall = not self.gather_first
            concrete = traced.get_concrete_function(*specs)
        self.layouts.learn(trace)
        self.traces[key] = concrete
        self._forget_oldest()
        return concrete

    def _forget_oldest(self) -> None:
        """Keeps as many programs as steps are kept for single shapes, with two sizes of parts."""
        for traced in [*self.traces][: -2 * MAX_SHAPES]:
            del self.traces[traced]
            for lowered in [one for one in self.stitchers if one[:3] == traced]:
                del self.stitchers[lowered]
                for call in [one for one in self._calls if one[0] == lowered]:
                    del self._calls[call]

    def _captured(self, tensor: Any) -> Sharded:
        if is_variable(tensor):
            raise CannotExpand(
                "a variable that belongs to no layer of the model (make it a weight, by "
                "add_weight; what a compiled loss reads, read in an overridden compute_loss)"
            )
        return replicate(tensor, self.mesh)


def _refused(reason: str) -> Exception:
    """What is raised when a program cannot be made: those of one size have islands in addition."""
    return CannotExpand(reason) if sizes.active() is None else sizes.CannotLift(reason)


def packed(
    program: LoweredProgram, results: Mapping[int, Sequence[Any]], structure: Any = None
) -> Any:
    """What a program returns, or a part of that structure, from the parts of its flat results."""

    def result(position: int | None) -> Sharded | None:
        if position is None:
            return None
        layout, examples = program.layouts[position], program.examples
        example = None if examples is None else examples[position]
        return Sharded(tuple(results[position]), layout, example)

    return tf.nest.map_structure(result, program.structure if structure is None else structure)
