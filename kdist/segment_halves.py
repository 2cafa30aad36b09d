"""One segment of a model as two functions, forward and backward, with what goes in and out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist import _private, _private_models
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

    A Keras mask is an attribute of a tensor object. A layer may take it off its input (attention
    does), or return its input itself (dropout in inference): then all who read that object, under
    whatever key, see the same. So an object goes in once, and is one object inside, too.

    Attributes:
        tensors: Boundary tensors and masks, each object once; then state.
        boundary: Per key that the segment reads, the position of its tensor; None for an optional
            input that is not given.
        masks: Position of a boundary tensor -> position of its mask, where it has one.
        signature: Tells apart what needs a trace of its own.
    """

    tensors: list[Any]
    boundary: tuple[int | None, ...]
    masks: dict[int, int]
    signature: tuple

    @classmethod
    def of(cls, segment: Segment, table: dict[int, Any], state: Sequence[Any]) -> SegmentInputs:
        """Collects them."""
        objects = Objects([])
        values = [table[key] for key in segment.reads]
        boundary = tuple(None if x is None else objects.position(x) for x in values)
        masks = objects.masks([i for i in boundary if i is not None])
        tensors = [tf.convert_to_tensor(t) for t in (*objects.tensors, *state)]
        given = {i: m for i, m in masks.items() if m is not None}
        specs = tuple((t.dtype.name, tuple(t.shape)) for t in tensors)
        return cls(tensors, boundary, given, (boundary, tuple(given.items()), specs))

    def unflatten(self, flat: Sequence[Any], state: int) -> tuple[list[Any], list[Any]]:
        """Boundary tensors (with masks on them) and `state` values, from tensors like `tensors`."""
        for i, mask in self.masks.items():
            _private.set_mask(flat[i], flat[mask])
        boundary = [None if i is None else flat[i] for i in self.boundary]
        return boundary, list(flat[len(flat) - state :])


class Objects:
    """A list of tensors in which each object has one position.

    Args:
        tensors: Those that it starts with.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = list(tensors)
        self._positions = {id(t): i for i, t in enumerate(self.tensors)}

    def position(self, tensor: Any) -> int:
        """Where a tensor is; it is put at the end if it is not there yet."""
        position = self._positions.setdefault(id(tensor), len(self.tensors))
        if position == len(self.tensors):
            self.tensors.append(tensor)
        return position

    def masks(self, positions: Sequence[int]) -> dict[int, int | None]:
        """Per position, that of the tensor's Keras mask; None where it has none."""
        found = {i: _private.get_mask(self.tensors[i]) for i in positions}
        return {i: None if mask is None else self.position(mask) for i, mask in found.items()}


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
        self.writes: list[int] = []
        self.masks: dict[int, int | None] = {}
        self.made = 0
        self.adders: list[keras.Layer | None] = []
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
        boundary, state = self.inputs.unflatten(flat, len(self.others))
        mapping = [*zip(self.trainable, params), *zip(self.others, state)]
        scope = ForwardScope(mapping, self.trainable)
        table = dict(zip(self.segment.reads, boundary))
        with scope:
            walk(self.nodes, table, self.operation_fn)
        made = self._leave(flat, table)
        losses = _private.add_loss_values(scope)
        variables = [*self.trainable, *self.others]
        self.written = [v for v in variables if scope.current(v) is not scope.given[id(v)]]
        layers = [layer for node in self.nodes for layer in _private_models.layers_of(node)]
        self.adders = [_private.adder_of(layers, value) for value in losses]
        self.made = len(made)
        updated = [scope.current(v) for v in self.written]
        return [tf.convert_to_tensor(t) for t in (*made, *losses, *updated)]

    def _leave(self, flat: list[Any], table: dict[int, Any]) -> list[Any]:
        """Tensors to hand out: those of `writes` and masks, where they are not given ones.

        Notes which objects `writes` are and which masks these and the boundary tensors have now, by
        position among what was given and what is handed out.
        """
        objects = Objects(flat)
        self.writes = [objects.position(table[key]) for key in self.segment.writes]
        boundary = [i for i in self.inputs.boundary if i is not None]
        self.masks = objects.masks([*boundary, *self.writes])
        return objects.tensors[len(flat) :]

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

    def deliver(
        self, inputs: SegmentInputs, outputs: Sequence[Any], table: dict[int, Any], scope: Any
    ) -> None:
        """Leaves everything as the walk of the graph would have: tensors, masks, losses, state."""
        objects = [*inputs.tensors, *outputs[: self.made]]
        table.update((key, objects[i]) for key, i in zip(self.segment.writes, self.writes))
        for i, mask in self.masks.items():
            _private.set_mask(objects[i], None if mask is None else objects[mask])
        items = iter(outputs[self.made :])
        for layer in self.adders:
            _private.add_loss_for(layer, next(items), scope)
        for variable, value in zip(self.written, items):
            scope.add_update((variable, value))


def walk(nodes: Sequence[Any], table: dict[int, Any], operation_fn: Callable) -> None:
    """Runs nodes one by one, as Keras does."""
    for node in nodes:
        args, kwargs = node.arguments.fill_in(table)
        outputs = operation_fn(node.operation)(*args, **kwargs)
        table.update(zip((id(t) for t in node.outputs), keras.tree.flatten(outputs)))
