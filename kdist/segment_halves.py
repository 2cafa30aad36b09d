"""One segment of a model as two functions, forward and backward, with what goes in and out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist import _private
from kdist.program import ForwardScope
from kdist.segment import Segment
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
