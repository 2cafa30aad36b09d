"""The functions of every virtual stage, on one kind of slice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from kdist.dtensor import sizes
from kdist.dtensor.call import MAX_SHAPES
from kdist.dtensor.retraced import Retrace
from kdist.dtensor.signatures import apart_from_rows
from kdist.program.again import nodes_again, refuse_short
from kdist.stages.body import Backend, StageBody, StageInput
from kdist.stages.functions import Pass, StageFunctions
from kdist.stages.halves import DevicePeak
from kdist.stages.lowered import UNKNOWN, Known
from kdist.stages.mask_order import check_mask_order
from kdist.stages.pipeline_program import PipelineProgram, batch_key
from kdist.storage.sparse import LookUp

import tensorflow as tf


class StagePrograms:
    """Traces the virtual stages, and keeps their functions.

    Args:
        program: The model's program.
        backend: What runs the functions: `OneDevice` or `InnerAxes`.
    """

    def __init__(self, program: PipelineProgram, backend: Backend) -> None:
        self.program, self.backend = program, backend
        self.staged = program.staged
        count = self.staged.schedule.virtual_stages
        self.bodies = [StageBody(program, self.staged, n, backend) for n in range(count)]
        self._traced: dict[Any, list[StageFunctions]] = {}
        self._known: dict[Any, Known] = {}
        """By key of what was traced, and virtual stage."""

    def functions(
        self, wanted: Pass, part: Any, terms: int | None, rows: tuple[int, int] | None = None
    ) -> list[StageFunctions]:
        """The functions of every virtual stage, for micro-batches like `part`.

        Args:
            wanted: The pass.
            part: (x, y, sample_weight) of a micro-batch.
            terms: Number of compiled losses; None where no loss is wanted.
            rows: See `StageFunctions`.

        Raises:
            CannotExpand: DTensor cannot run one of them.
        """
        key = (wanted, terms, sizes.active(), *batch_key(part))
        if new := key not in self._traced:
            self._traced[key] = self._trace(key, part, rows)
            for old in [*self._traced][: -2 * MAX_SHAPES]:
                del self._traced[old]
        found = self._traced[key]
        if new:
            self._note(found, wanted)
        self.program.traced(wanted.training).as_of(found[0])
        return found

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """Forgets what was traced where it has to be traced in another way.

        Raises:
            Retrace: It has to be, in a new graph: what is written already would run, if layers in
                it print, assert or call Python.
        """
        try:
            yield
        except Retrace as reason:
            if reason.gather_first:
                self.backend.gather_first = True
                self._known.clear()
            self._traced.clear()
            raise

    def settle(self) -> None:
        """Looks at what a pass was lowered to: what communicates, and sizes, are known by now.

        Raises:
            Retrace: Operations run again that communicate, and should not, or what runs again is
                to be chosen by sizes; traced once more, it is as it should be.
            ValueError: It does not show which operation communicates.
        """
        before = dict(self._known)
        for key, functions in self._traced.items():
            for one in functions:
                place = key, one.body.virtual
                known = self._known.get(place, UNKNOWN)
                communicate = known.communicate | one.repeated_communication()
                sizes, sums = known.sizes, known.sums
                if sizes is None and self._by_sizes(key):
                    sizes, sums = one.sizes(), one.sums()
                self._known[place] = Known(communicate, sizes, sums)
        if any(one != before.get(place, UNKNOWN) for place, one in self._known.items()):
            raise Retrace(gather_first=False)

    def _by_sizes(self, key: Any) -> bool:
        """Whether what a device has of each tensor matters, and lowering alone shows it."""
        wanted, _, family, *_ = key
        blocks = self.program.blocks
        budget = blocks is not None and blocks.budget is not None
        whole = wanted.differentiate and not family
        return budget and whole and not self.backend.draws_alike

    def trained_parts(self) -> list[Any]:
        """What runs the functions of a training step, of the first micro-batch."""
        for functions in self._traced.values():
            if functions[0].wanted.differentiate:
                return [part for one in functions for part in one.parts]
        return []

    def trained_by_rows(self) -> dict[int, list[Any]]:
        """The same for micro-batches that are like the first but for their rows, by these."""
        found: dict[int, list[Any]] = {}
        first = None
        for (wanted, _, _, *batch), functions in self._traced.items():
            if wanted.differentiate:
                rows, rest = apart_from_rows([one for _, leaves in batch for one in leaves])
                first = first or (wanted, rest)
                if rows is not None and (wanted, rest) == first:
                    found.setdefault(rows, [part for one in functions for part in one.parts])
        return found

    def _trace(self, key: Any, part: Any, rows: tuple[int, int] | None) -> list[StageFunctions]:
        """Traces every virtual stage, each with what the one before sends."""
        wanted, terms, *_ = key
        found: list[StageFunctions] = []
        traced_from: list[StageInput] = []
        boundary: dict[str, Any] = {}
        masks: dict[str, Any] = {}
        x, y, sample_weight = part
        shares = share = None
        if terms is not None:
            shares = tf.TensorSpec([terms], tf.float64)
            share = tf.TensorSpec([], tf.float64)
        for body in self.bodies:
            state = {id(v): self.program.spec(v, rows, body.virtual) for v in body.carried}
            loss = None if terms is None else (y, sample_weight, shares)
            given = body.given(boundary, masks, state, x, loss, share)
            traced_from.append(given)
            found.append(self._stage(key, body, given, rows))
            output = found[-1].example_output
            boundary, masks = output.boundary, output.masks
        if wanted.differentiate:
            self._leave_out(
                found, lambda n, out: self._stage(key, self.bodies[n], traced_from[n], rows, out)
            )
        again = self._repeated(found)
        with self.backend.tracing():
            for one, names in zip(found, again):
                one.cut(names)
        self._check(found, terms)
        return found

    def _stage(
        self,
        key: Any,
        body: StageBody,
        given: StageInput,
        rows: tuple[int, int] | None,
        left_out: Collection[int] = (),
    ) -> StageFunctions:
        """The functions of a virtual stage; see there."""
        known = self._known.get((key, body.virtual), UNKNOWN)
        with self.backend.tracing():
            made: StageFunctions = self.backend.functions(
                body, given, key[0], self.backend, rows, known, left_out
            )
        return made

    @staticmethod
    def _leave_out(
        found: list[StageFunctions], again: Callable[[int, Collection[int]], StageFunctions]
    ) -> None:
        """Traces virtual stages again of which some outputs get no gradient, from the last one on.

        One device has none of a weight that leads to these alone, and leaves it as it is; zeros
        would have an optimizer decay it.
        """
        added = [len(one.example_output.added) for one in found]
        for n in reversed(range(len(found))):
            after = found[n + 1] if n + 1 < len(found) else None
            if left_out := found[n].without_gradient(after, sum(added[:n])):
                found[n] = again(n, left_out)

    def _repeated(self, found: Sequence[StageFunctions]) -> list[Collection[str]]:
        """The operations of each virtual stage that run again in the backward pass.

        The chunks of a stage share a device, and what a budget says of it.
        """
        blocks, schedule = self.program.blocks, self.staged.schedule
        again: list[Collection[str]] = [()] * len(found)
        if not blocks or not found[0].wanted.differentiate:
            return again
        for stage in range(schedule.num_stages):
            mine = [one.vjp for one in found[stage :: schedule.num_stages]]
            peak = DevicePeak(mine, schedule, stage)
            candidates = [one.candidates() for one in mine]
            again[stage :: schedule.num_stages] = nodes_again(
                candidates, blocks, peak, f"stage {stage}"
            )
        refuse_short(blocks)
        return again

    def _check(self, found: Sequence[StageFunctions], terms: int | None) -> None:
        unmasked = {name: tensors for b in self.bodies for name, tensors in b.unmasked.items()}
        check_mask_order(self.staged.described.graph, self.staged.partition.stages, unmasked)
        lossless = not any(one.has_loss for one in found) and not self.program.penalized
        if terms is not None and lossless:
            raise self.program.no_loss()

    def _note(self, found: Sequence[StageFunctions], wanted: Pass) -> None:
        """Which state is written; which variables get a gradient, and of which it is rows.

        It is rows if it is on every stage that makes one.
        """
        program = self.program
        written = {v for one in found for v in one.example_output.state}
        traced = program.traced(wanted.training)
        traced.updated = [i for i, v in enumerate(program.state.written) if id(v) in written]
        traced.adders = [layer for one in found for layer in one.body.adders]
        if not wanted.differentiate:
            return
        dense: set[int] = set() if wanted.whole else set(program.penalized)
        rows: dict[int, LookUp] = {}
        for one in found:
            look_ups = one.look_ups()
            dense |= set(one.connected()) - set(look_ups)
            for i, look_up in look_ups.items():
                rows[i] = rows[i].beside(look_up) if i in rows else look_up
        program.trained.connected = sorted(dense | set(rows))
        for i in dense & set(program.tables.look_ups):
            rows[i] = program.tables.look_ups[i]
        dense -= set(program.tables.look_ups)
        program.trained.rows = {i: look_up for i, look_up in rows.items() if i not in dense}
