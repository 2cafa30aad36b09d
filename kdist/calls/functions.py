"""The forward and backward function of a layer's call, traced once for all replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kdist._compat import keras_models, keras_seeds, keras_trainer
from kdist.calls.arguments import CallArguments
from kdist.layers.padding import is_composite
from kdist.program.blocks import named
from kdist.program.logits import logits_of
from kdist.program.program import Program
from kdist.program.traced import TraceFacts
from kdist.program.vjp import CapturesVariables, PureFunction, differentiable
from kdist.runtime.stage_backend import StageBackend
from kdist.stages.leaves import leaves, rebuild, specs
from kdist.stages.lowered import UNKNOWN, Known
from kdist.stages.repeating import RepeatingVjp

import keras
import tensorflow as tf
from keras import ops


class NoRowsError(Exception):
    """Not all that a layer takes and gives is cut by rows, or shared; layers inside it may be.

    It gives ragged or sparse tensors, or reads a tensor of the step of which a gradient is due.
    """


@dataclasses.dataclass(frozen=True)
class CallInput:
    """What a call takes on one replica.

    Attributes:
        rows: Its rows of the tensors that have rows.
        shared: The other tensors.
        masks: Its rows of their masks and logits; None where there are none.
        state: Values of the state that the layer uses.
        sources: Positions of the flat tensors that get a gradient.
    """

    rows: list[Any]
    shared: list[Any]
    masks: list[Any]
    state: list[Any] = dataclasses.field(default_factory=list)
    sources: tuple[int, ...] = ()

    def flat(self) -> list[Any]:
        """All tensors, those that may get a gradient first, state last."""
        return leaves(self._parts)

    def filled(self, flat: Sequence[Any]) -> CallInput:
        """The same with other tensors."""
        rows, shared, masks, state = rebuild(self._parts, flat)
        return CallInput(rows, shared, masks, state, self.sources)

    def differentiated(self, where: Callable[[Any], bool]) -> CallInput:
        """The same with gradients of the tensors of a kind."""
        tensors = enumerate(leaves([self.rows, self.shared, self.masks]))
        sources = [i for i, t in tensors if differentiable(t) and where(t)]
        return dataclasses.replace(self, sources=tuple(sources))

    @property
    def _parts(self) -> list[list[Any]]:
        return [self.rows, self.shared, self.masks, self.state]


@dataclasses.dataclass(frozen=True)
class CallOutput:
    """What a call gives on one replica.

    Attributes:
        outputs: What the layer returns.
        logits: Those of some flat outputs, by position; see `kdist.program.logits`.
        added: What its layers gave to `add_loss`.
        masks: The Keras mask, or None, of each flat output.
        updated: New values of the state that it wrote.
    """

    outputs: Any
    logits: dict[int, Any]
    added: list[Any]
    masks: list[Any]
    updated: list[Any]

    def flat(self) -> list[Any]:
        """All tensors; the first `count` may take a cotangent."""
        return leaves(self._parts)

    def filled(self, flat: Sequence[Any]) -> CallOutput:
        """The same with other tensors."""
        return CallOutput(*rebuild(self._parts, flat))

    @property
    def _parts(self) -> list[Any]:
        return [self.outputs, self.logits, self.added, self.masks, self.updated]

    @property
    def count(self) -> int:
        """How many tensors the layer returned or added, logits of what it returned too."""
        return len(leaves([self.outputs, self.logits, self.added]))


class CalledProgram(Program):
    """A model's program that calls one of its layers.

    Args:
        program: The model's.
        call: The layer's `call`.
        arguments: What it is called with; a program's input has rows and masks, and may have the
            other tensors.
    """

    def __init__(self, program: Program, call: Callable, arguments: CallArguments) -> None:
        super().__init__(program.model, program.add_loss_mean)
        self.state, self.unseeded = program.state, program.unseeded
        self._called, self._arguments = call, arguments

    def _call(self, x: Any, training: bool) -> Any:
        rows, masks, *others = x
        unknown = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in self._arguments.shared]
        args, kwargs = self._arguments.filled(rows, masks, *(others or [unknown]))
        with named(None), keras_seeds.drawing_from(self.unseeded):
            return self._called(*args, **kwargs)


class CallVjp(RepeatingVjp):
    """Forward and backward of a layer's call; state gets no gradient, nor do masks take one.

    Args:
        function: See `Vjp`.
        params: See `Vjp`.
        inputs: See `Vjp`.
        wrap: See `Vjp`.
        sources: Which of the inputs get a gradient, by position.
        targets: Tells, once the function has run, how many outputs may take one.
        **how: See `RepeatingVjp`.

    Attributes:
        reached: Per parameter, then per input, the outputs whose cotangents its gradient follows
            from; all of them for zeros that TensorFlow has written, whatever these are.
    """

    def __init__(
        self,
        function: PureFunction,
        params: Sequence[tf.TensorSpec],
        inputs: Sequence[tf.TensorSpec],
        wrap: Callable[..., Callable],
        *,
        sources: Sequence[int],
        targets: Callable[[], int],
        **how: Any,
    ) -> None:
        self._gets_gradient, self._first_outputs = sources, targets
        super().__init__(function, params, inputs, wrap, **how)

    def _sources(self, params: list[Any], inputs: list[Any]) -> list[Any]:
        return super()._sources(params, [inputs[i] for i in self._gets_gradient])

    def _targets(self, outputs: list[Any]) -> list[int]:
        return super()._targets(outputs[: self._first_outputs()])

    def _find_fetches(self) -> None:
        super()._find_fetches()
        behind = _sources_behind(self._joint_trace.graph, self._given)
        fetches, every = iter(self._fetches), frozenset(self._cotangents)
        self.reached: list[frozenset[int]] = []
        for kind in self._kinds:
            count = 0 if kind is None else 1 if kind == "dense" else 2
            found = [behind[next(fetches).op.name] for _ in range(count)]
            numbers = {self._cotangents[n] for one in found for n in one}
            self.reached.append(frozenset(numbers) or every)

    def _cut_backward(self, feeds: Sequence[Any]) -> None:
        if self._fetches:
            super()._cut_backward(feeds)
        else:
            self._call_backward: Any = lambda *arguments: []


class CallFunctions:
    """A layer's call as two functions, on one kind of slice.

    Args:
        program: The model's: knows its variables.
        backend: What runs functions: `OneDevice` or `InnerAxes`.
        layer: The layer.
        call: Its `call`.
        arguments: What it is called with.
        given: Of one replica, tensors or their specs; its state's values are made here.
        spec: What programs take as a variable.
        known: What an earlier lowering of the call has shown.

    Attributes:
        trainable: Positions of the trainable variables that it uses.
        carried: The other state that it uses.
        example: What the trace made.
        adders: The layer that gave each value of `CallOutput.added`.
        row_adders: Those whose values have an entry for each row, which Keras adds up.
        updated: Positions in `ModelState.written` of the state that it writes.
        held: Tensors of the step that may have a gradient, and that it reads beside its arguments.
        repeats: Whether something runs again in the backward pass.

    Raises:
        ValueError: It reads variables that are not its own.
    """

    def __init__(
        self,
        program: Program,
        backend: StageBackend,
        layer: keras.Layer,
        call: Callable,
        arguments: CallArguments,
        given: CallInput,
        spec: Callable[[keras.Variable], tf.TensorSpec],
        known: Known = UNKNOWN,
    ) -> None:
        self.program, self.backend = program, backend
        self._parts: list[Any] = []
        self._call, self._arguments = call, arguments
        self._inside = keras_models.flat_layers(layer)
        self.params, self.carried = used_by(layer, program)
        variables = [program.state.params[i] for i in self.params]
        state = [spec(v) for v in self.carried]
        self._given = dataclasses.replace(given, state=state)
        self.example: CallOutput
        self.adders: list[keras.Layer | None] = []
        self.row_adders: Collection[keras.Layer | None] = ()
        self.updated: list[int] = []
        flat = specs(self._given.flat())
        first_of_state = len(flat) - len(state)
        with backend.tracing():
            try:
                self.vjp = CallVjp(
                    self._compute,
                    [spec(v) for v in variables],
                    flat,
                    self._part,
                    sources=given.sources,
                    targets=lambda: self.example.count,
                    backend=backend,
                    positions=self.params,
                    trained=len(program.state.trainable),
                    of_batch=lambda j: j < first_of_state,
                    blocks=program.blocks,
                    held=1,
                    known=known,
                )
            except CapturesVariables:
                raise ValueError(
                    "A layer that a train_step calls uses its own variables alone. Make other "
                    "layers attributes of it, and a tf.Variable a weight (self.add_weight). "
                    f"Received: layer {layer.path or layer.name!r}"
                ) from None
            self.held = [t for t in self.vjp.from_outside() if differentiable(t)]
            # Of no budget: what calls keep until the step's tapes use it is not theirs to say.
            again = self.vjp.candidates().certain if program.blocks else ()
            self.repeats = bool(again) and self.vjp.repeats(again)
            self.vjp.cut(again)

    def _part(self, concrete: Any, late: Sequence[int] = ()) -> Callable[..., list[Any]]:
        if not concrete.outputs:
            return lambda *arguments: []
        self._parts.append(self.backend.part(concrete, late if self.program.blocks else ()))
        call: Callable[..., list[Any]] = self._parts[-1].call
        return call

    def repeated_communication(self) -> frozenset[int]:
        """See `RepeatingVjp.repeated_communication`."""
        forward, *backward = self._parts
        return self.vjp.repeated_communication(forward, backward)

    def _compute(self, params: list[Any], flat: list[Any]) -> list[Any]:
        given, state = self._given.filled(flat), self.program.state
        variables = self.variables
        trained = sum(i < len(state.trainable) for i in self.params)
        before = dict(zip(map(id, variables), [*params, *given.state]))
        taken = [(v, self.backend.taken(v, before[id(v)])) for v in variables]
        scope = self.program.scope_of(taken, variables[:trained])
        args, kwargs = self._arguments.filled(given.rows, given.masks, given.shared)
        with scope, named(self.program.blocks):
            outputs = self._call(*args, **kwargs)
        if any(is_composite(one) for one in keras.tree.flatten(outputs)):
            raise NoRowsError
        values, traced = keras_trainer.add_loss_values(scope), TraceFacts()
        self.adders = [keras_trainer.adder_of(self._inside, value) for value in values]
        updated = self.program.collect_updates(scope, traced)
        self.updated = traced.updated
        written = [id(state.written[i]) for i in self.updated]
        self.example = CallOutput(
            keras.tree.map_structure(tf.convert_to_tensor, outputs),
            logits_of(outputs),
            [ops.sum(value) for value in values],
            self.program.masks_of(outputs),
            [self.backend.like(now, before[key]) for key, now in zip(written, updated)],
        )
        return self.example.flat()

    @property
    def variables(self) -> list[keras.Variable]:
        """All that it uses, the trainable ones first."""
        return [*(self.program.state.params[i] for i in self.params), *self.carried]

    def connected(self) -> list[int]:
        """The trainable variables that get a gradient."""
        return self.vjp.connected()


def _sources_behind(graph: Any, sources: Sequence[Any]) -> dict[str, frozenset[int]]:
    """Per operation of a graph, numbers of the sources that it follows from."""
    own = {t.op.name: frozenset([n]) for n, t in enumerate(sources)}
    found: dict[str, frozenset[int]] = {}
    none: frozenset[int] = frozenset()
    for op in graph.get_operations():
        before = {found.get(t.op.name, none) for t in op.inputs} - {none}
        mine = before.pop() if len(before) == 1 else none.union(*before)
        found[op.name] = own.get(op.name, mine)
    return found


def used_by(layer: keras.Layer, program: Program) -> tuple[list[int], list[keras.Variable]]:
    """Positions in `ModelState.params` of those that a layer uses, and its other state."""
    mine = {id(v) for v in layer.variables}
    for one in keras_models.flat_layers(layer):
        mine |= {id(v) for metric in getattr(one, "metrics", []) for v in metric.variables}
    mine.add(id(program.unseeded.state))
    state = program.state
    params = [i for i, v in enumerate(state.params) if id(v) in mine]
    return params, [v for v in state.carried if id(v) in mine]
