"""Programs that run segment by segment: the model's own call, with its graph interpreted in runs.

Each run of nodes is a forward and a backward function, traced once for all replicas. Parameters may
be fetched for one segment at a time, before its forward half and again before its backward half.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdist import _private, _private_models
from kdist.program import ForwardScope, Program
from kdist.segment import Segment, cut, info_of
from kdist.vjp import CapturesVariables, Vjp

import keras
import tensorflow as tf

Fetch = Callable[[Sequence[int], Any], list[Any]]
"""(positions of trainable variables, what to wait for) -> their values, on the device in scope."""


@dataclasses.dataclass
class Run:
    """One pass of one replica over the model.

    Attributes:
        fetch: Gets parameters that are not given as values; None if all are.
        tape: Records the pass; None for inference.
        uses: Fetched parameters: position, value.
        starts: What each segment so far waits for: its inputs.
        calls: Backward calls, last segment first: (trainable positions, what they returned).
        behind: Cotangents of the segment whose backward half came last.
        keep: Keep fetched parameters from the forward to the backward half.
    """

    fetch: Fetch | None = None
    tape: tf.GradientTape | None = None
    uses: list[tuple[int, Any]] = dataclasses.field(default_factory=list)
    starts: list[Any] = dataclasses.field(default_factory=list)
    calls: list[tuple[tuple[int, ...], Any]] = dataclasses.field(default_factory=list)
    behind: Any = None
    keep: bool = False

    def get(self, positions: Sequence[int], gate: Any) -> list[Any]:
        """Fetches parameters for the forward pass."""
        assert self.fetch is not None
        values = self.fetch(positions, gate)
        if self.tape is not None:
            self.tape.watch(values)
            self.uses.extend(zip(positions, values))
        return values


class FetchingScope(ForwardScope):
    """A scope that fetches a parameter when it is first read outside of segments."""

    def __init__(self, mapping: Any, trainable: Sequence[keras.Variable], run: Run) -> None:
        super().__init__(mapping, trainable)
        self._positions = {id(v): i for i, v in enumerate(trainable)}
        self._run = run

    def get_current_value(self, variable: keras.Variable) -> Any:
        """See `keras.StatelessScope`."""
        value = super().get_current_value(variable)
        position = self._positions.get(id(variable))
        if value is None and position is not None and self._run.fetch is not None:
            (value,) = self._run.get([position], [])
            self.state_mapping[id(variable)] = self.given[id(variable)] = value
        return value


class SegmentedProgram(Program):
    """The pure functions of a Functional or Sequential model, run in segments.

    Args:
        model: See `Program`.
        add_loss_mean: See `Program`.
        limit: Bytes of parameters of a segment.
        wrap: Makes a callable of a concrete function.

    Attributes:
        inline: Segments whose nodes run one by one, with the reason.
    """

    def __init__(
        self, model: keras.Model, add_loss_mean: bool, limit: int, wrap: Callable[[Any], Callable]
    ) -> None:
        super().__init__(model, add_loss_mean)
        self.limit = limit
        self.wrap = wrap
        self.run = Run()
        self._position = {id(v): i for i, v in enumerate(self.state.trainable)}
        self._segments: dict[int, list[Segment]] = {}
        self._halves: dict[Any, SegmentHalves] = {}
        self.inline: dict[str, str] = {}
        self._inside = False

    @contextlib.contextmanager
    def replica(self, fetch: Fetch | None, keep: bool = False) -> Iterator[Run]:
        """Meanwhile, passes are those of one replica, on the device in scope."""
        self.run = Run(fetch, keep=keep)
        try:
            yield self.run
        finally:
            self.run = Run()

    def segments(self, functional: Any) -> list[Segment]:
        """How the graph of a `Functional` is cut."""
        if id(functional) not in self._segments:
            nodes = [info_of(node) for node in _private_models.nodes_in_order(functional)]
            outputs = [id(t) for t in functional.outputs]
            self._segments[id(functional)] = cut(nodes, outputs, self.limit)
        return self._segments[id(functional)]

    def _watch(self, tape: tf.GradientTape, params: Sequence[Any]) -> None:
        tape.watch([p for p in params if p is not None])
        self.run.tape = tape

    def _differentiate(self, tape: tf.GradientTape, target: Any, params: Sequence[Any]) -> Any:
        sources = [(i, p) for i, p in enumerate(params) if p is not None] + self.run.uses
        found = tape.gradient(target, [p for _, p in sources])
        parts: list[list[Any]] = [[] for _ in params]
        for (i, _), gradient in zip(sources, found):
            if gradient is not None:
                parts[i].append(gradient)
        return [joined(gradients) for gradients in parts]

    def _scope(self, params: Sequence[Any], carried: Sequence[Any]) -> ForwardScope:
        given = [(v, p) for v, p in zip(self.state.trainable, params) if p is not None]
        mapping = [*given, *zip(self.state.carried, carried)]
        self._outer = FetchingScope(mapping, self.state.trainable, self.run)
        return self._outer

    def _call(self, x: Any, training: bool) -> Any:
        self._training = training
        with contextlib.ExitStack() as stack:
            for functional in cuttable(self.model):
                stack.enter_context(_private_models.interpreted(functional, self._interpret))
            return super()._call(x, training)

    def _interpret(self, functional: Any, inputs: list[Any], operation_fn: Callable) -> Any:
        """What replaces the graph walk of a `Functional`."""
        table = {id(t): x for t, x in zip(functional.inputs, inputs)}
        nodes = _private_models.nodes_in_order(functional)
        if self._inside:
            walk(nodes, table, operation_fn)
            return _private_models.pack_outputs(
                functional, [table[id(t)] for t in functional.outputs]
            )
        for segment in self.segments(functional):
            mine = nodes[segment.start : segment.stop]
            if segment.alone or not self._call_segment(functional, segment, table, operation_fn):
                walk(mine, table, operation_fn)
        return _private_models.pack_outputs(functional, [table[id(t)] for t in functional.outputs])

    def _call_segment(
        self, functional: Any, segment: Segment, table: dict[int, Any], operation_fn: Callable
    ) -> bool:
        """Runs a segment as functions; False if its nodes have to be run one by one."""
        nodes = _private_models.nodes_in_order(functional)[segment.start : segment.stop]
        name = nodes[0].operation.name
        if name in self.inline:
            return False
        trainable, others = self._variables(nodes)
        inputs = SegmentInputs.of(
            segment, table, [self._outer.get_current_value(v) for v in others]
        )
        differentiate = self.run.tape is not None
        key = (id(functional), segment.start, self._training, differentiate, inputs.signature)
        if key not in self._halves:
            halves = SegmentHalves(segment, nodes, operation_fn, trainable, others, inputs)
            specs = [tf.TensorSpec(v.shape, v.dtype) for v in trainable]
            self._inside = True
            try:
                reason = halves.trace(specs, self.wrap, differentiate)
            finally:
                self._inside = False
            if reason:
                self.inline[name] = reason
                return False
            self._halves[key] = halves
        positions = [self._position[id(v)] for v in trainable]
        self._apply(self._halves[key], positions, inputs, table)
        return True

    def _variables(self, nodes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The trainable variables of nodes, and their other state."""
        found: dict[int, keras.Variable] = {}
        for node in nodes:
            if isinstance(node.operation, keras.Layer):
                found.update((id(v), v) for v in node.operation.variables)
        carried = {id(v) for v in self.state.carried}
        trainable = [v for key, v in found.items() if key in self._position]
        return trainable, [v for key, v in found.items() if key in carried]

    def _apply(
        self, halves: SegmentHalves, positions: list[int], inputs: SegmentInputs, table: dict
    ) -> None:
        run = self.run
        given = [self._outer.state_mapping.get(id(v)) for v in halves.trainable]
        missing = [n for n, value in enumerate(given) if value is None]
        run.starts.append(inputs.tensors)
        if missing:
            gate = run.starts[-2] if len(run.starts) > 1 else []
            for n, value in zip(missing, run.get([positions[n] for n in missing], gate)):
                given[n] = value
        again = [positions[n] for n in missing]

        def params_again(cotangents: Sequence[Any]) -> list[Any]:
            values = list(given)
            gate = run.behind if run.behind is not None else list(cotangents)
            for n, value in zip(missing, run.fetch(again, gate) if run.fetch and again else ()):
                values[n] = value
            return values

        outputs = halves.call(
            given, inputs, params_again if missing and not run.keep else None, run, positions
        )
        self.flows.update(
            (id(t), [inputs.tensors[j] for j in flow]) for t, flow in zip(outputs, halves.flows)
        )
        halves.deliver(outputs, table, self._outer)


@dataclasses.dataclass(frozen=True)
class SegmentInputs:
    """What goes into a segment besides parameters: boundary tensors, their masks, state.

    Attributes:
        tensors: All of them, flat.
        present: Per boundary tensor, whether it is there (an optional input may not be).
        masked: Per boundary tensor, whether it carries a Keras mask.
        signature: Tells apart what needs a trace of its own.
    """

    tensors: list[Any]
    present: tuple[bool, ...]
    masked: tuple[bool, ...]
    signature: tuple

    @classmethod
    def of(cls, segment: Segment, table: dict[int, Any], state: Sequence[Any]) -> SegmentInputs:
        """Collects them."""
        boundary = [table[key] for key in segment.reads]
        masks = [None if x is None else _private.get_mask(x) for x in boundary]
        tensors = [tf.convert_to_tensor(t) for t in (*boundary, *masks, *state) if t is not None]
        present = tuple(x is not None for x in boundary)
        masked = tuple(m is not None for m in masks)
        specs = tuple((t.dtype.name, tuple(t.shape)) for t in tensors)
        return cls(tensors, present, masked, (present, masked, specs))

    def unflatten(self, flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Boundary tensors (with masks on them) and state, from tensors like `tensors`."""
        items = iter(flat)
        boundary = [next(items) if there else None for there in self.present]
        for x, has_mask in zip(boundary, self.masked):
            if has_mask:
                _private.set_mask(x, next(items))
        return boundary, list(items)


class SegmentHalves:
    """The two functions of a segment, and the meaning of their flat outputs.

    Args:
        segment: The segment.
        nodes: Its nodes.
        operation_fn: Gives operations their call context, as Keras does.
        trainable: Its trainable variables.
        others: Its other variables.
        inputs: Inputs to trace with.
    """

    def __init__(
        self,
        segment: Segment,
        nodes: Sequence[Any],
        operation_fn: Callable,
        trainable: Sequence[keras.Variable],
        others: Sequence[keras.Variable],
        inputs: SegmentInputs,
    ) -> None:
        self.segment = segment
        self.nodes = nodes
        self.operation_fn = operation_fn
        self.trainable, self.others = list(trainable), list(others)
        self.inputs = inputs
        self.masked: tuple[bool, ...] = ()
        self.losses = 0
        self.written: list[keras.Variable] = []
        self.flows: list[list[int]] = []
        self._vjp: Vjp | None = None
        self._forward: Callable | None = None

    def trace(self, params: Sequence[tf.TensorSpec], wrap: Callable, differentiate: bool) -> str:
        """Makes the functions; returns why they cannot be made, "" if they are."""
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in self.inputs.tensors]
        try:
            self._vjp = Vjp(self._compute, params, specs, wrap)
        except CapturesVariables:
            return "it reads variables of other layers"
        if self._vjp.rows:
            return "a gradient is rows of a table"
        self.flows = self._vjp.flows
        return ""

    def _compute(self, params: list[Any], flat: list[Any]) -> list[Any]:
        """The segment as a pure function."""
        boundary, state = self.inputs.unflatten(flat)
        mapping = [*zip(self.trainable, params), *zip(self.others, state)]
        scope = ForwardScope(mapping, self.trainable)
        table = dict(zip(self.segment.reads, boundary))
        with scope:
            walk(self.nodes, table, self.operation_fn)
        outputs = [table[key] for key in self.segment.writes]
        masks = [_private.get_mask(t) for t in outputs]
        losses = _private.add_loss_values(scope)
        variables = [*self.trainable, *self.others]
        self.written = [v for v in variables if scope.current(v) is not scope.given[id(v)]]
        self.masked = tuple(m is not None for m in masks)
        self.losses = len(losses)
        updated = [scope.current(v) for v in self.written]
        flat_outputs = [*outputs, *(m for m in masks if m is not None), *losses, *updated]
        return [tf.convert_to_tensor(t) for t in flat_outputs]

    def call(
        self,
        params: list[Any],
        inputs: SegmentInputs,
        params_again: Callable | None,
        run: Run,
        positions: Sequence[int],
    ) -> list[Any]:
        """Runs the forward half; a tape around it runs the backward half."""
        vjp = self._vjp
        assert vjp is not None
        if run.tape is None:
            return vjp.forward(params, inputs.tensors)[0]
        split = len(params)

        @tf.custom_gradient
        def both(*arguments: Any) -> Any:
            outputs, saved = vjp.forward(arguments[:split], arguments[split:])
            used = list(arguments[:split])

            def backward(*cotangents: Any) -> list[Any]:
                given = [
                    tf.zeros_like(t) if d is None and t.dtype.is_floating else d
                    for t, d in zip(outputs, cotangents)
                ]
                again = used if params_again is None else params_again(given)
                run.behind = [d for d in given if d is not None]
                found, inward = vjp.backward(again, saved, given)
                run.calls.append((tuple(positions), [*found, *inward]))
                return [*found, *inward]

            return outputs, backward

        return list(both(*params, *inputs.tensors))

    def deliver(self, outputs: Sequence[Any], table: dict[int, Any], scope: Any) -> None:
        """Puts flat outputs where the walk of the graph would have left them."""
        items = iter(outputs)
        made = [next(items) for _ in self.segment.writes]
        for tensor, has_mask in zip(made, self.masked):
            if has_mask:
                _private.set_mask(tensor, next(items))
        table.update(zip(self.segment.writes, made))
        for _ in range(self.losses):
            scope.add_loss(next(items))
        for variable, value in zip(self.written, items):
            scope.add_update((variable, value))


def walk(nodes: Sequence[Any], table: dict[int, Any], operation_fn: Callable) -> None:
    """Runs nodes one by one, as Keras does."""
    for node in nodes:
        args, kwargs = node.arguments.fill_in(table)
        outputs = operation_fn(node.operation)(*args, **kwargs)
        table.update(zip((id(t) for t in node.outputs), keras.tree.flatten(outputs)))


def cuttable(model: keras.Model) -> list[Any]:
    """The `Functional` graphs of a model that can be run in segments, nested ones included."""
    found = [_private_models.functional_of(one) for one in _private_models.flat_layers(model)]
    return list({id(one): one for one in found if one is not None}.values())


def joined(gradients: Sequence[Any]) -> Any:
    """Sum of the gradients of a parameter that was fetched more than once; None without any."""
    if len(gradients) < 2:
        return gradients[0] if gradients else None
    if all(isinstance(g, tf.IndexedSlices) for g in gradients):
        values = tf.concat([g.values for g in gradients], 0)
        indices = tf.concat([g.indices for g in gradients], 0)
        return tf.IndexedSlices(values, indices, gradients[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(g) for g in gradients])


def as_node(concrete: Any, *, jit_compile: bool = False) -> Callable:
    """A concrete function as one node of whatever graph calls it, on every device that does."""

    def call(*arguments: Any) -> list[Any]:
        return concrete(*arguments)

    if jit_compile:
        return tf.function(call, autograph=False, jit_compile=True)
    return tf.function(call, autograph=False, experimental_attributes={"_noinline": True})
