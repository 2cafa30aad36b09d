"""Programs that run segment by segment: the model's own call, with its graph interpreted in runs.

Each run of nodes is a forward and a backward function, traced once for all replicas. Parameters may
be fetched for one segment at a time, before its forward half and again before its backward half.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdist import _private, _private_models
from kdist.program import ForwardScope, Program
from kdist.segment import NodeInfo, Segment, info_of
from kdist.segment_halves import Fetch, Run, SegmentHalves, SegmentInputs, walk

import keras
import tensorflow as tf


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
        cut: Cuts nodes, given the keys of their outputs, into segments (see `kdist.segment.cut`).
        wrap: Makes a callable of a concrete function.

    Attributes:
        inline: Segments whose nodes run one by one, with the reason.
    """

    def __init__(
        self,
        model: keras.Model,
        add_loss_mean: bool,
        cut: Callable[[Sequence[NodeInfo], Sequence[int]], list[Segment]],
        wrap: Callable[[Any], Callable],
    ) -> None:
        super().__init__(model, add_loss_mean)
        self.cut = cut
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
            with _private.as_stored():
                nodes = [info_of(node) for node in _private_models.nodes_in_order(functional)]
            outputs = [id(t) for t in functional.outputs]
            self._segments[id(functional)] = self.cut(nodes, outputs)
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

    def scope(self, params: Sequence[Any], carried: Sequence[Any]) -> ForwardScope:
        """Parameters that are not given are fetched by the segment that uses them."""
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
            with _private.as_stored():
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
        halves.deliver(inputs, outputs, table, self._outer)


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
    """A concrete function as one node of whatever graph calls it, on every device that does.

    Raises:
        ValueError: XLA is asked for, and the function takes or returns what XLA keeps inside.
    """
    lists = [t.name for t in (*concrete.inputs, *concrete.outputs) if t.dtype == tf.variant]
    if jit_compile and lists:
        raise ValueError(
            "XLA cannot hand what a loop keeps (a list of tensors) from a forward to a backward "
            "function, as stages and segments do. Compile with jit_compile='auto' or False, or "
            f"unroll the loop (keras.layers.LSTM(unroll=True)). Received: jit_compile=True, {lists}"
        )

    def call(*arguments: Any) -> list[Any]:
        check_dtypes(concrete, arguments)
        return concrete(*arguments)

    if jit_compile:
        return tf.function(call, autograph=False, jit_compile=True)
    return tf.function(call, autograph=False, experimental_attributes={"_noinline": True})


def check_dtypes(concrete: Any, arguments: Sequence[Any]) -> None:
    """Refuses arguments that a concrete function was not traced for.

    TensorFlow would find out when it runs, and often report no more than that the other devices'
    receives were cancelled.

    Raises:
        TypeError: Naming the first one.
    """
    for i, (given, wanted) in enumerate(zip(arguments, concrete.inputs)):
        if given.dtype != wanted.dtype:
            raise TypeError(
                "A function takes the dtypes that it was traced for, here "
                f"{wanted.dtype.name} as argument {i} of {concrete.name}. Received: {given!r}"
            )
