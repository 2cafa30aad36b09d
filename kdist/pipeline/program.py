"""A model's pure functions for a pipeline: one set per virtual stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist import _private_models
from kdist.pipeline.body import StageBody, StageInput
from kdist.pipeline.functions import Pass, StageFunctions
from kdist.pipeline.leaves import leaves, rebuild, signature, specs
from kdist.pipeline.mask_order import check_mask_order
from kdist.pipeline.stages import StagedModel
from kdist.program import Program
from kdist.sparse import LookUp
from kdist.vjp import pruned

import keras
import tensorflow as tf


class PipelineProgram(Program):
    """The pure functions of a model that is cut into stages.

    Args:
        model: A built Keras model.
        add_loss_mean: See `Program`.
        staged: The cut.
        wrap: Makes a callable of a concrete function.
        whole_loss: See `kdist.loss_terms.whole_loss`.

    Raises:
        ValueError: The model does what a pipeline cannot.
    """

    def __init__(
        self,
        model: keras.Model,
        add_loss_mean: bool,
        staged: StagedModel,
        wrap: Callable[[Any], Callable],
        whole_loss: str = "",
    ) -> None:
        super().__init__(model, add_loss_mean)
        refuse(model, whole_loss)
        self.staged = staged
        self.wrap = wrap
        count = staged.schedule.virtual_stages
        self.bodies = [StageBody(self, staged, virtual) for virtual in range(count)]
        self._functions: dict[Any, list[StageFunctions]] = {}
        self._counting: dict[Any, CountFunction] = {}

    def functions(self, wanted: Pass, part: Any, terms: int | None) -> list[StageFunctions]:
        """The functions of every virtual stage, for micro-batches like `part`.

        Args:
            wanted: The pass.
            part: (x, y, sample_weight) of a micro-batch.
            terms: Number of compiled losses; None where no loss is wanted.
        """
        key = (wanted, terms, *batch_key(part))
        if key not in self._functions:

            def make(body: StageBody, given: StageInput) -> StageFunctions:
                return StageFunctions(body, given, wanted, self.wrap)

            self._functions[key] = self.trace(wanted, part, terms, self.bodies, make)
        return self._functions[key]

    def trace(
        self,
        wanted: Pass,
        part: Any,
        terms: int | None,
        bodies: Sequence[StageBody],
        make: Callable[[StageBody, StageInput], StageFunctions],
    ) -> list[StageFunctions]:
        """Traces every virtual stage, each with what the one before sends; see `functions`.

        Args:
            wanted: The pass.
            part: (x, y, sample_weight) of a micro-batch.
            terms: Number of compiled losses; None where no loss is wanted.
            bodies: What each virtual stage computes.
            make: Traces one.
        """
        traced = self.traced(wanted.training)
        found: list[StageFunctions] = []
        boundary: dict[str, Any] = {}
        masks: dict[str, Any] = {}
        x, y, sample_weight = part
        for body in bodies:
            loss = None
            if terms is not None and body.last:
                loss = (y, sample_weight, tf.TensorSpec([terms], tf.float64))
            share = None if terms is None else tf.TensorSpec([], tf.float64)
            given = self.stage_input(body, boundary, masks, self._state_specs(body), x, loss, share)
            found.append(make(body, given))
            output = found[-1].example_output
            boundary, masks = output.boundary, output.masks
        unmasked = {name: tensors for body in bodies for name, tensors in body.unmasked.items()}
        check_mask_order(self.staged.described.graph, self.staged.partition.stages, unmasked)
        if terms is not None and not any(one.has_loss for one in found) and not self._penalties():
            raise self.no_loss()
        written = {v for one in found for v in one.example_output.state}
        traced.updated = [i for i, v in enumerate(self.state.written) if id(v) in written]
        if wanted.differentiate:
            self._note_gradients(found)
        return found

    def _state_specs(self, body: StageBody) -> dict[int, Any]:
        return {id(v): tf.TensorSpec(v.shape, v.dtype) for v in body.carried}

    def _note_gradients(self, functions: Sequence[StageFunctions]) -> None:
        """Which variables get a gradient, and of which it is rows on every stage that makes one."""
        dense: set[int] = set(self._penalties())
        rows: dict[int, LookUp] = {}
        for one in functions:
            look_ups = one.look_ups()
            dense |= set(one.connected()) - set(look_ups)
            for i, look_up in look_ups.items():
                # Several stages' rows are put one after the other.
                rows[i] = LookUp() if i in rows else look_up
        self.trained.connected = sorted(dense | set(rows))
        self.trained.rows = {i: look_up for i, look_up in rows.items() if i not in dense}

    def _penalties(self) -> list[int]:
        """Trainable variables with a weight penalty."""
        return [i for i, v in enumerate(self.state.trainable) if v.regularizer is not None]

    def penalties_on(self, stage: int) -> list[int]:
        """Those whose penalty a stage computes: the first one that uses the variable."""
        users = self.staged.users()
        found = []
        for i in self._penalties():
            first = users.get(id(self.state.trainable[i]), (0,))[0]
            if self.staged.stage_of(first) == stage:
                found.append(i)
        return found

    def inputs_by_name(self, x: Any) -> dict[str, Any]:
        """The model's inputs as its graph names them."""
        flat = _private_models.flat_inputs(self.staged.functional, x)
        return dict(zip(self.staged.described.inputs, flat))

    def stage_input(
        self,
        body: StageBody,
        boundary: dict[str, Any],
        masks: dict[str, Any],
        state: dict[int, Any],
        x: dict[str, Any],
        loss: Any,
        share: Any,
    ) -> StageInput:
        """Puts together what a virtual stage is given.

        Args:
            body: The virtual stage.
            boundary: What the stage before sent.
            masks: Its masks.
            state: Values of the state that the stage uses.
            x: The model's inputs by name.
            loss: For the last virtual stage; see `StageInput`.
            share: Share of the rows.
        """
        inputs = {name: x[name] for name in self.staged.inputs_of(body.virtual)}
        return StageInput(boundary, masks, state, inputs, loss if body.last else None, share)

    def count_function(self, part: Any, training: bool) -> CountFunction:
        """What computes how much a micro-batch counts; see `Program.counts`."""
        key = (training, *batch_key(part))
        if key not in self._counting:
            self._counting[key] = CountFunction(self, part, training)
        return self._counting[key]


class CountFunction:
    """Counts what Keras divides each compiled loss by, from as few tensors as that takes.

    Masks mostly follow from the model's inputs; the rest of the forward pass is cut off, and
    parameters that are not looked at stay where they are.

    Args:
        program: The program.
        part: (x, y, sample_weight) of a micro-batch; x as the model takes it.
        training: Training or inference.
    """

    def __init__(self, program: Program, part: Any, training: bool) -> None:
        state = program.state
        sizes = len(state.trainable), len(state.carried)
        given = leaves(part)

        def count(*flat: Any) -> Any:
            params, carried = flat[: sizes[0]], flat[sizes[0] : sum(sizes)]
            data = rebuild(part, flat[sum(sizes) : -1])
            return program.counts(list(params), list(carried), data, flat[-1], training)

        variables = [*state.trainable, *state.carried]
        wanted = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
        wanted += [*specs(given), tf.TensorSpec([], tf.int32)]
        whole = tf.compat.v1.wrap_function(count, wanted)
        needed = _ancestors(whole.outputs)
        self.used = [i for i, t in enumerate(whole.inputs[: len(wanted)]) if t.op.name in needed]
        self._call = pruned(whole, [whole.inputs[i] for i in self.used], whole.outputs)
        self.variables = sum(sizes)

    def __call__(self, variable: Callable[[int], Any], part: Any, rows: Any) -> Any:
        """Counts, float64 (terms,).

        Args:
            variable: Gives the value of a variable, trainable ones first, then carried.
            part: The micro-batch.
            rows: Rows of it that count.
        """
        data = [*leaves(part), rows]
        values = [
            variable(i) if i < self.variables else data[i - self.variables] for i in self.used
        ]
        return self._call(*values)[0]


def _ancestors(tensors: Sequence[Any]) -> set[str]:
    found: set[str] = set()
    waiting = [t.op for t in tensors]
    while waiting:
        operation = waiting.pop()
        if operation.name not in found:
            found.add(operation.name)
            waiting.extend(t.op for t in operation.inputs)
    return found


def batch_key(part: Sequence[Any]) -> tuple:
    """Tells apart what needs a trace of its own: structure, shapes, dtypes of a micro-batch."""
    return tuple(_key(one) for one in part)


def _key(part: Any) -> tuple:
    return (repr(keras.tree.map_structure(lambda t: t is None, part)), signature(leaves(part)))


def refuse(model: keras.Model, whole_loss: str) -> None:
    """Refuses what a pipeline cannot do.

    Args:
        model: The model.
        whole_loss: Why its loss has to be computed over the whole batch, "" if it need not be.

    Raises:
        ValueError: The loss is not one of micro-batches, or `run_eagerly` is set, or the model has
            an activity regularizer.
    """
    if whole_loss:
        raise ValueError(
            "A pipeline computes the loss per micro-batch, on the last stage. Compile with losses "
            "of one value per row that are averaged or summed, call `add_loss` in a layer, or use "
            "a mesh without `pipe`, where such a loss is computed over the whole batch. "
            f"Received: {whole_loss}, in a model of type {type(model).__name__}"
        )
    if model.run_eagerly:
        raise ValueError(
            "A pipeline's stages are compiled functions. Debug with run_eagerly=True on the plain "
            "model, or on a mesh without `pipe`. Received: run_eagerly=True"
        )
    if getattr(model, "activity_regularizer", None) is not None:
        raise ValueError(
            "An activity regularizer on a whole model is not part of any stage. Put it on the "
            f"layers. Received: activity_regularizer={model.activity_regularizer!r}"
        )
