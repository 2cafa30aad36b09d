"""One replica's way through a pipeline whose stages have inner axes: see `kdist.pipeline.flow`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from kdist.batch import join
from kdist.dtensor.sharded import Sharded, replicate
from kdist.pipeline.functions import Saved
from kdist.pipeline.instructions import Instruction
from kdist.pipeline.replica_flow import ReplicaFlow
from kdist.sparse import is_sparse

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor


class MeshFlow(ReplicaFlow):
    """The values of one replica in one step, as parts on its slices; see `ReplicaFlow`.

    Here `functions` are, per micro-batch, those of every virtual stage.

    Args:
        *args: Of `ReplicaFlow`.
        values: Per slice, by identity of the variable, its value.
    """

    def __init__(self, *args: Any, values: Sequence[dict[int, Any]]) -> None:
        super().__init__(*args)
        self.values = values
        self._sums: dict[int, dict[int, Any]] = {}
        self._rows: dict[int, dict[int, dict[int, list[Any]]]] = {}

    def act(self, one: Instruction) -> tf.Operation | None:
        """See `ReplicaFlow.act`."""
        self.runner.programs.replica = self.replica
        return super().act(one)

    def forward(self, virtual: int, i: int) -> tf.Operation | None:
        """Forward of micro-batch `i` on a virtual stage."""
        functions, mesh = self.functions[i][virtual], self.runner.mesh
        body = functions.body
        sent = self._sent.pop((virtual - 1, i), None)
        boundary, masks = (sent.boundary, sent.masks) if sent is not None else ({}, {})
        x, y, sample_weight = self.parts[i]
        names = self.runner.staged.inputs_of(virtual)
        inputs = {name: _everywhere(x[name], mesh) for name in names}
        loss = share = None
        if self.shares is not None:
            share = _everywhere(self.micro.shares[self.replica][i], mesh)
            if body.last:
                loss = _everywhere((y, sample_weight, self.shares[i]), mesh)
        variables = [self.program.state.trainable[n] for n in body.trainable]
        params = [self._value(v, virtual) for v in variables]
        state = {id(v): self._value(v, virtual) for v in body.carried}
        given = self.program.stage_input(body, boundary, masks, state, inputs, loss, share)
        output, saved = functions.forward(params, given)
        before = {**state, **{id(v): p for v, p in zip(variables, params)}}
        for key, new in output.state.items():
            if not self.micro.full:
                new = self._if_rows(virtual, i, new, before[key])
            self._state[key] = new
        self._keep(virtual, i, output, saved, body.last)
        return _operation([*output.flat(), *saved.tensors])

    def _if_rows(self, virtual: int, i: int, new: Sharded, old: Sharded) -> Sharded:
        """New state, or the old where a micro-batch has no rows."""
        rows = self.micro.counts[self.replica][i] > 0
        devices = self.topology.slices[self.slice(self.runner.staged.stage_of(virtual))].devices
        return _combined(lambda a, b: tf.where(rows, a, b), new, old, devices)

    def backward(self, virtual: int, i: int) -> tf.Operation | None:
        """Whole backward."""
        saved = self._with_cotangents(virtual, i)
        found, self._returned[virtual, i] = self.functions[i][virtual].backward(saved)
        del self._saved[virtual, i]
        self._accumulate(virtual, i, found)
        return _operation([*found, *self._returned[virtual, i]])

    def backward_input(self, virtual: int, i: int) -> tf.Operation | None:
        """Gradient of the inputs."""
        saved = self._with_cotangents(virtual, i)
        inward = self.functions[i][virtual].backward_input(saved)
        self._returned[virtual, i] = inward
        return _operation([*inward, *saved.kept])

    def backward_weight(self, virtual: int, i: int) -> tf.Operation | None:
        """Gradient of the parameters."""
        saved = self._saved.pop((virtual, i))
        found = self.functions[i][virtual].backward_weight(saved)
        self._accumulate(virtual, i, found)
        return _operation(found)

    def _with_cotangents(self, virtual: int, i: int) -> Saved:
        functions, saved = self.functions[i][virtual], self._saved[virtual, i]
        mesh = self.runner.mesh
        boundary = [
            _zeros(sent, mesh) if t is None and sent.dtype.is_floating else t
            for t, sent in zip(self._returned.pop((virtual + 1, i), []), saved.sent)
        ]
        scale = None
        if functions.has_loss:
            scale = replicate(tf.cast(self.scale, functions.example_output.loss.dtype), mesh)
        functions.set_cotangents(saved, boundary, scale)
        return saved

    def _accumulate(self, virtual: int, i: int, found: Sequence[Any]) -> None:
        """Adds a micro-batch's gradients to the sum; rows are put together by the update."""
        at = self.slice(self.runner.staged.stage_of(virtual))
        sums = self._sums.setdefault(at, {})
        fresh: dict[int, Any] = {}
        for position, gradient in zip(self.functions[i][virtual].body.trainable, found):
            if gradient is None:
                continue
            if is_sparse(gradient):
                rows = self._rows.setdefault(at, {}).setdefault(position, {})
                rows.setdefault(virtual, []).append((gradient.values, gradient.indices))
            else:
                fresh[position] = gradient
        self._add(at, sums, fresh)

    def _add(self, at: int, sums: dict[int, Any], fresh: dict[int, Any]) -> None:
        """Adds gradients to the sums of a slice; both are laid out as their parameters are."""
        devices = self.topology.slices[at].devices
        for position, gradient in fresh.items():
            if position in sums:
                gradient = _combined(operator.add, sums[position], gradient, devices)
            sums[position] = gradient

    def _value(self, variable: keras.Variable, virtual: int) -> Any:
        """A variable's value now, on the mesh of a virtual stage."""
        key = id(variable)
        if key in self._state:
            return self._state[key]
        return self.values[self.slice(self.runner.staged.stage_of(virtual))][key]

    def result(self, want_outputs: bool) -> dict[str, Any]:
        """What `SpmdRunner` gives per slice; gradients per slice, as the update reads them."""
        result = self._results_of_last(want_outputs)
        losses = [*self._losses, *(self._penalties() if self.shares is not None else [])]
        if losses:
            values = [value.whole(self.last) for value in losses]
            result["loss"] = values[0] if len(values) == 1 else tf.add_n(values)
        parts = self._loss_parts if self.runner.want_parts else {}
        result["loss_parts"] = keras.tree.map_structure(self._whole, parts)
        training = self.functions[0][0].wanted.training
        written = [self.program.state.written[i] for i in self.program.traced(training).updated]
        result["updated"] = [self._written_value(v) for v in written]
        result["gradients"] = self._unpacked_gradients()
        return result

    def _results_of_last(self, want_outputs: bool) -> dict[str, Any]:
        counts = self.micro.counts[self.replica]
        result: dict[str, Any] = {"outputs": None, "masks": []}
        if want_outputs:
            outputs = [keras.tree.map_structure(self._whole, r.outputs) for r in self._results]
            result["outputs"] = join(outputs, counts)
            for column in zip(*(r.output_masks for r in self._results)):
                masks = [self._whole(mask) for mask in column]
                result["masks"].append(None if masks[0] is None else join(masks, counts))
        terms = zip(*(r.terms for r in self._results))
        result["terms"] = [tf.add_n([self._whole(t) for t in column]) for column in terms]
        return result

    @property
    def last(self) -> str:
        """The device on which outputs and losses come together."""
        return str(self.runner.devices[self.replica])

    def _whole(self, tensor: Sharded | None) -> Any:
        return None if tensor is None else tensor.whole(self.last)

    def _written_value(self, variable: keras.Variable) -> Any:
        if id(variable) in self._state:
            return self._state[id(variable)]
        numbers = (
            self.topology.slice_number(stage, self.replica)
            for stage in range(self.runner.schedule.num_stages)
        )
        own = (self.values[number] for number in numbers)
        return next(found[id(variable)] for found in own if id(variable) in found)

    def _penalties(self) -> list[Any]:
        """Weight penalties count once: on the first replica, on the stage that has the variable."""
        values: list[Any] = []
        for stage in range(self.runner.schedule.num_stages):
            positions = self.program.penalties_on(stage)
            if not positions or self.replica > 0:
                continue
            at = self.topology.slice_number(stage, self.replica)
            params = [self._value(self.program.state.trainable[p], stage) for p in positions]
            scale = tf.constant(0.0) if self.scale is None else self.scale
            found, gradients = self.runner.penalties(at, positions, params, scale)
            values += found
            self._note_penalties(positions, found)
            if self.scale is not None:
                self._add(at, self._sums.setdefault(at, {}), dict(zip(positions, gradients)))
        return values

    def _unpacked_gradients(self) -> dict[int, dict[int, dict[str, Any]]]:
        """Per slice, by trainable variable: sums, and rows of each micro-batch, on each device."""
        gradients: dict[int, dict[int, dict[str, Any]]] = {}
        for at, sums in self._sums.items():
            for position, gradient in sums.items():
                one = gradients.setdefault(at, {}).setdefault(position, {})
                one["dense"] = list(gradient.parts)
        for at, tables in self._rows.items():
            for position, by_virtual in tables.items():
                one = gradients.setdefault(at, {}).setdefault(position, {})
                one["rows"] = {
                    virtual: [list(zip(*(t.parts for t in pair))) for pair in pairs]
                    for virtual, pairs in by_virtual.items()
                }
        return gradients


def _everywhere(data: Any, mesh: dtensor.Mesh) -> Any:
    """Data of a structure, the same on every device of a slice; None stays None."""
    return keras.tree.map_structure(lambda t: None if t is None else replicate(t, mesh), data)


def _zeros(like: Any, mesh: dtensor.Mesh) -> Sharded:
    return replicate(tf.zeros(like.shape, like.dtype), mesh)


def _combined(
    function: Callable[[Any, Any], Any], first: Sharded, second: Sharded, devices: Sequence[str]
) -> Sharded:
    """Combines two tensors that are laid out alike, on each device of their slice."""
    parts = []
    for device, a, b in zip(devices, first.parts, second.parts, strict=True):
        with tf.device(device):
            parts.append(function(a, b))
    return Sharded(tuple(parts), first.layout)


def _operation(tensors: Sequence[Any]) -> tf.Operation | None:
    """The operation of a graph that made the first of some tensors."""
    for tensor in tensors:
        if tensor is not None:
            values = tensor.values if is_sparse(tensor) else tensor
            return values.parts[0].op
    return None
