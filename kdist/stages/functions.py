"""The compiled functions of a virtual stage, traced once for all replicas and micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kdist._compat.function_graphs import is_variable
from kdist.dtensor.sharded import each
from kdist.pipeline.work import WeightUse
from kdist.program.pruning import run_effects
from kdist.program.vjp import CapturesVariables
from kdist.stages.body import Backend, StageBody, StageInput, StageOutput
from kdist.stages.halves import StageVjp
from kdist.stages.leaves import leaves, specs
from kdist.stages.lowered import UNKNOWN, Known
from kdist.storage.sparse import LookUp

import tensorflow as tf

T = TypeVar("T")
NO_TURNS: Mapping[str, int] = {}
"""Of a function of which it is not known what it sums."""


@dataclasses.dataclass(frozen=True)
class Unused:
    """What stages make and a loss over the whole batch does not follow from.

    Attributes:
        added: Numbers of what layers gave to `add_loss`, counted over all stages.
        outputs: Of the model's flat outputs, and the logits of some after them.
    """

    added: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Pass:
    """What a step computes.

    Attributes:
        training: Training or inference.
        differentiate: Whether gradients are wanted.
        split: Whether the schedule splits the backward.
        whole: Whether the loss is one over the whole batch, computed outside the stages.
        outputs: Whether a step that differentiates reads what the model returns, for metrics.
        unused: What a loss over the whole batch leaves without a gradient.
    """

    training: bool
    differentiate: bool = False
    split: bool = False
    whole: bool = False
    outputs: bool = True
    unused: Unused = Unused()


@dataclasses.dataclass
class Saved:
    """What a virtual stage keeps from a forward to its backward.

    Attributes:
        params: Values of its parameters.
        freed: Which of them are not kept, but taken as they are gathered then.
        tensors: Intermediates.
        sent: What it sent on.
        cotangents: Gradient of each flat output, once it is there.
        kept: What the first half of a backward hands to the second.
    """

    params: list[Any]
    tensors: list[Any]
    sent: list[Any]
    cotangents: list[Any] = dataclasses.field(default_factory=list)
    kept: list[Any] = dataclasses.field(default_factory=list)
    freed: frozenset[int] = frozenset()


class StageFunctions:
    """Forward and backward of one virtual stage, for inputs of one signature.

    Args:
        body: What it computes.
        example: Inputs to trace with.
        wanted: The pass.
        backend: What runs it.
        rows: Replica and micro-batch that look up as many rows of fetched tables; None for any.
        known: What lowering has shown of the virtual stage.
        left_out: Positions of outputs that get no gradient; see `without_gradient`.

    Attributes:
        example_output: Outputs as the trace made them: names, masks, dtypes, shapes.
        parts: What its backend made of each function.
        vjp: Forward and backward, if gradients are wanted.

    Raises:
        ValueError: A layer reads variables that are not its own.
    """

    def __init__(
        self,
        body: StageBody,
        example: StageInput,
        wanted: Pass,
        backend: Backend,
        rows: tuple[int, int] | None = None,
        known: Known = UNKNOWN,
        left_out: Collection[int] = (),
    ) -> None:
        self.body, self._example, self.wanted, self._backend = body, example, wanted, backend
        self.parts: list[Any] = []
        self._known, self._turns = known, NO_TURNS
        program = body.program
        variables = [program.state.params[i] for i in body.params]
        params = [program.spec(v, rows, body.virtual) for v in variables]
        inputs = specs(example.flat())
        try:
            if wanted.differentiate:
                self.vjp = StageVjp(
                    self._compute,
                    params,
                    inputs,
                    self._part,
                    body=body,
                    boundary=len([t for t in example.boundary.values() if t is not None]),
                    state=example.state_range,
                    targets=lambda: self._targets,
                    unread=lambda: self._unread,
                    split=wanted.split,
                    known=known,
                    left_out=left_out,
                )
            else:
                self._forward = self._part(self._traced(params, inputs))
        except CapturesVariables:
            raise ValueError(
                "A layer of a pipeline uses its own variables alone; this one reads variables of "
                "layers that it does not own, or Keras's seed for all. Make the other layer an "
                "attribute of it, or call that layer in the model's graph; make a tf.Variable a "
                "weight (self.add_weight); read a variable of no layer in an overridden "
                "compute_loss, not in a compiled loss; give functions of keras.random a seed of "
                "the layer's own (seed=self.seed_generator, a keras.random.SeedGenerator). "
                f"Received: layers {', '.join(body.names)}"
            ) from None

    def cut(self, again: Collection[str]) -> None:
        """Makes the functions of the trace.

        Args:
            again: Names of the forward operations that run again in the backward pass.
        """
        if self.wanted.differentiate:
            self._turns = self._known.turns(self.vjp.numbers)
            self.vjp.cut(again)

    def _part(self, concrete: Any, late: Sequence[int] = ()) -> Callable[..., list[Any]]:
        again = late if self.body.program.blocks else ()
        self.parts.append(self._backend.part(concrete, again, self._turns))
        return self.parts[-1].call

    def _traced(self, params: Sequence[Any], inputs: Sequence[Any]) -> Any:
        count = len(params)

        def forward(*flat: Any) -> list[Any]:
            found = self._compute(list(flat[:count]), list(flat[count:]))
            run_effects(tf.compat.v1.get_default_graph())
            return [tf.identity(t) for t in found]

        traced = tf.compat.v1.wrap_function(forward, [*params, *inputs])
        if any(is_variable(t) for t, _ in traced.graph.captures):
            raise CapturesVariables
        return traced

    def _compute(self, params: list[Any], flat: list[Any]) -> list[Any]:
        given = self._example.filled(flat)
        whole = self.wanted.whole
        result = self.body.run(params, given, self.wanted.training, whole)
        self._targets = len(result.targets(whole))
        read = whole or self.wanted.outputs
        self._unread = range(0) if read else result.places_of_outputs
        self.example_output = result
        return result.flat()

    def without_gradient(self, after: StageFunctions | None, added_before: int) -> list[int]:
        """Positions of the outputs that take a cotangent and get none.

        Args:
            after: The next virtual stage.
            added_before: How many values layers of the stages before gave to `add_loss`.
        """
        result, unused = self.example_output, self.wanted.unused
        found = [] if after is None else after.vjp.inputs_without_gradient
        first = len(leaves(list(result.boundary.values())))
        found += [first + i - added_before for i in unused.added if i >= added_before]
        first += len(result.added)
        found = [i for i in found if i < first]
        if self.wanted.whole and self.body.last:
            found += [first + i for i in unused.outputs]
        return [i for i in found if self.vjp.takes_cotangent(i)]

    @property
    def has_loss(self) -> bool:
        """Whether the stage has a part of the loss."""
        return self.example_output.loss is not None

    def forward(self, s: int, params: list[Any], given: StageInput) -> tuple[StageOutput, Saved]:
        """Runs the forward function on slice `s`."""
        flat = given.flat()
        if self.wanted.differentiate:
            outputs, saved = self.vjp.forward(params, flat, s)
        else:
            outputs, saved = list(self._forward(s, *params, *flat)), []
        result = self.example_output.filled(outputs)
        return result, Saved(params, saved, result.targets(self.wanted.whole))

    def set_cotangents(
        self, s: int, saved: Saved, boundary: Sequence[Any], others: Sequence[Any]
    ) -> None:
        """Gives a backward the gradients of what the forward made.

        Args:
            s: The slice.
            saved: From the forward.
            boundary: Of what it sent on.
            others: Of the loss, if it has a part of it; of a loss over the whole batch, of what
                layers added and of the model's outputs.
        """
        found = [*boundary, *others]
        devices = self._backend.devices(s)
        saved.cotangents = [
            each(tf.zeros_like, devices, t) if d is None and self.vjp.takes_cotangent(i) else d
            for i, (t, d) in enumerate(zip(saved.sent, found, strict=True))
        ]

    def needs(self, half: str) -> set[int]:
        """Which parameters a backward looks at; see `StageVjp.needs`."""
        return {self.body.params[i] for i in self.vjp.needs(half)}

    def weight_use(self, gathered: Collection[int], penalized: Sequence[int]) -> WeightUse:
        """What the virtual stage has to do with weights.

        Args:
            gathered: The parameters that are gathered before use.
            penalized: Those whose penalty it computes.
        """
        mine = [i for i in self.body.params if i in gathered]
        looks: dict[str, Sequence[int]] = {"F": mine, "P": [i for i in penalized if i in gathered]}
        if not self.wanted.differentiate:
            return WeightUse(looks, (), tuple(penalized))
        for letter, half in (("B", "backward"), ("I", "input"), ("W", "weight")):
            needed = self.needs(half)
            looks[letter] = [i for i in reversed(mine) if i in needed]
        return WeightUse(looks, tuple(self.connected()), tuple(penalized))

    def backward(self, s: int, saved: Saved) -> tuple[list[Any], list[Any]]:
        """Gradients of the parameters, and of the tensors from the stage before."""
        found, inward = self.vjp.backward(saved.params, saved.tensors, saved.cotangents, s)
        return found, inward[: self.vjp.boundary]

    def backward_input(self, s: int, saved: Saved) -> list[Any]:
        """Gradients of the tensors from the stage before."""
        inward, saved.kept = self.vjp.backward_input(
            saved.params, saved.tensors, saved.cotangents, s
        )
        return inward[: self.vjp.boundary]

    def backward_weight(self, s: int, saved: Saved) -> list[Any]:
        """Gradients of the parameters."""
        return self.vjp.backward_weight(
            saved.params, saved.tensors, saved.cotangents, saved.kept, s
        )

    def repeated_communication(self) -> frozenset[int]:
        """See `RepeatingVjp.repeated_communication`."""
        if not self.wanted.differentiate:
            return frozenset()
        return self.vjp.repeated_communication(self.parts[0], self.parts[1:])

    def sizes(self) -> dict[int, tuple[int, ...]]:
        """By number of an operation, the bytes that a device has of its results, once lowered."""
        if not self.wanted.differentiate:
            return {}
        return self._numbered(part.result_bytes() for part in self.parts)

    def sums(self) -> dict[int, Sequence[Sequence[int]]]:
        """See `Known.sums`; once lowered."""
        if not self.wanted.differentiate or not self._backend.shares_memory:
            return {}
        return self._numbered(part.sums() for part in self.parts)

    def _numbered(self, by_name: Iterable[Mapping[str, T]]) -> dict[int, T]:
        """By number of an operation what is known of it by name, of the first that know it."""
        found: dict[str, T] = {}
        for one in by_name:
            found = {**one, **found}
        numbers = self.vjp.numbers
        return {numbers[name]: known for name, known in found.items() if name in numbers}

    def connected(self) -> list[int]:
        """The trainable variables that get a gradient."""
        return self.vjp.connected()

    def look_ups(self) -> dict[int, LookUp]:
        """See `LaidVjp.look_ups`."""
        return self.vjp.look_ups(self.body.staged.stage_of(self.body.virtual))
