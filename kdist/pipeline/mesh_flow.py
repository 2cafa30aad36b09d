"""One replica's way through a pipeline whose stages are DTensor meshes, called one by one.

DTensor calls return before they are done, so while one stage works the next one's call is made:
the calls of a round of the schedule overlap. A boundary tensor is waited for where it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist import spmd
from kdist.batch import join
from kdist.pipeline.functions import Saved
from kdist.pipeline.instructions import (
    Instruction,
)
from kdist.pipeline.mesh_inputs import moved
from kdist.pipeline.replica_flow import ReplicaFlow
from kdist.sparse import is_sparse
from kdist.spmd_results import whole_value

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor


class MeshFlow(ReplicaFlow):
    """The values of one replica in one step, as DTensors of its slices; see `ReplicaFlow`.

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

    def run(self, one: Instruction) -> None:
        """Does an instruction."""
        self.runner.programs.replica = self.replica
        self.act(one)

    def slice(self, virtual: int) -> int:
        """The slice of a virtual stage."""
        stage = self.runner.staged.stage_of(virtual)
        return self.topology.slice_number(stage, self.replica)

    def mesh(self, virtual: int) -> dtensor.Mesh:
        """The DTensor mesh of a virtual stage."""
        return self.runner.meshes[self.slice(virtual)]

    def forward(self, virtual: int, i: int) -> None:
        """Forward of micro-batch `i` on a virtual stage."""
        functions = self.functions[i][virtual]
        body, mesh = functions.body, self.mesh(virtual)
        sent = self._sent.pop((virtual - 1, i), None)
        boundary, masks = (sent.boundary, sent.masks) if sent is not None else ({}, {})
        x, y, sample_weight = self.parts[i]
        names = self.runner.staged.inputs_of(virtual)
        inputs = {name: _packed(x[name], mesh) for name in names}
        loss = share = None
        if self.shares is not None:
            share = _packed(self.micro.shares[self.replica][i], mesh)
            if body.last:
                loss = _packed((y, sample_weight, self.shares[i]), mesh)
        variables = [self.program.state.trainable[n] for n in body.trainable]
        params = [self._value(v, virtual) for v in variables]
        state = {id(v): self._value(v, virtual) for v in body.carried}
        given = self.program.stage_input(
            body, _moved(boundary, mesh), _moved(masks, mesh), state, inputs, loss, share
        )
        output, saved = functions.forward(params, given)
        if self.micro.full or int(self.micro.counts[self.replica][i]) > 0:
            self._state.update(output.state)
        self._keep(virtual, i, output, saved, body.last)

    def backward(self, virtual: int, i: int) -> None:
        """Whole backward."""
        saved = self._with_cotangents(virtual, i)
        found, self._returned[virtual, i] = self.functions[i][virtual].backward(saved)
        del self._saved[virtual, i]
        self._accumulate(virtual, i, found)

    def backward_input(self, virtual: int, i: int) -> None:
        """Gradient of the inputs."""
        saved = self._with_cotangents(virtual, i)
        self._returned[virtual, i] = self.functions[i][virtual].backward_input(saved)

    def backward_weight(self, virtual: int, i: int) -> None:
        """Gradient of the parameters."""
        saved = self._saved.pop((virtual, i))
        self._accumulate(virtual, i, self.functions[i][virtual].backward_weight(saved))

    def _with_cotangents(self, virtual: int, i: int) -> Saved:
        functions, saved = self.functions[i][virtual], self._saved[virtual, i]
        mesh = self.mesh(virtual)
        returned = self._returned.pop((virtual + 1, i), [])
        boundary = [
            _zeros(sent, mesh) if t is None and sent.dtype.is_floating else _moved_one(t, mesh)
            for t, sent in zip(returned, saved.sent)
        ]
        scale = None
        if functions.has_loss:
            scale = tf.cast(self.scale, functions.example_output.loss.dtype)
        functions.set_cotangents(saved, boundary, _packed(scale, mesh))
        return saved

    def _accumulate(self, virtual: int, i: int, found: Sequence[Any]) -> None:
        """Adds a micro-batch's gradients to the sum; rows are put together by the update."""
        at = self.slice(virtual)
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
        again = [position for position in fresh if position in sums]
        sums.update({p: g for p, g in fresh.items() if p not in sums})
        if again:
            first, second = [sums[p] for p in again], [fresh[p] for p in again]
            sums.update(zip(again, self.runner.add(at, tuple(again), first, second)))

    def _value(self, variable: keras.Variable, virtual: int) -> Any:
        """A variable's value now, on the mesh of a virtual stage."""
        key = id(variable)
        if key in self._state:
            return _moved_one(self._state[key], self.mesh(virtual))
        return self.values[self.slice(virtual)][key]

    def result(self, want_outputs: bool) -> dict[str, Any]:
        """What `SpmdRunner` gives per slice; gradients per slice, as the update reads them."""
        result = self._results_of_last(want_outputs)
        losses = [*self._losses, *(self._penalties() if self.shares is not None else [])]
        if losses:
            values = [whole_value(value) for value in losses]
            result["loss"] = values[0] if len(values) == 1 else tf.add_n(values)
        parts = self._loss_parts if self.runner.want_parts else {}
        result["loss_parts"] = keras.tree.map_structure(whole_value, parts)
        training = self.functions[0][0].wanted.training
        written = [self.program.state.written[i] for i in self.program.traced(training).updated]
        result["updated"] = [dtensor.unpack(self._written_value(v)) for v in written]
        result["gradients"] = self._unpacked_gradients()
        return result

    def _results_of_last(self, want_outputs: bool) -> dict[str, Any]:
        counts = self.micro.counts[self.replica]
        result: dict[str, Any] = {"outputs": None, "masks": []}
        if want_outputs:
            outputs = [keras.tree.map_structure(whole_value, r.outputs) for r in self._results]
            result["outputs"] = join(outputs, counts)
            for column in zip(*(r.output_masks for r in self._results)):
                masks = [whole_value(mask) for mask in column]
                result["masks"].append(None if masks[0] is None else join(masks, counts))
        terms = zip(*(r.terms for r in self._results))
        result["terms"] = [tf.add_n([whole_value(t) for t in column]) for column in terms]
        return result

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
                one["dense"] = dtensor.unpack(gradient)
        for at, tables in self._rows.items():
            for position, by_virtual in tables.items():
                one = gradients.setdefault(at, {}).setdefault(position, {})
                one["rows"] = {
                    virtual: [list(zip(*map(dtensor.unpack, pair))) for pair in pairs]
                    for virtual, pairs in by_virtual.items()
                }
        return gradients


def _packed(data: Any, mesh: dtensor.Mesh) -> Any:
    """Data of a structure, the same on every device of a mesh; None stays None."""
    return keras.tree.map_structure(lambda t: None if t is None else spmd.replicate(t, mesh), data)


def _moved_one(tensor: Any, mesh: dtensor.Mesh) -> Any:
    return None if tensor is None else moved(tensor, mesh)


def _moved(tensors: dict[str, Any], mesh: dtensor.Mesh) -> dict[str, Any]:
    return {name: _moved_one(tensor, mesh) for name, tensor in tensors.items()}


def _zeros(like: Any, mesh: dtensor.Mesh) -> Any:
    return spmd.replicate(tf.zeros(like.shape, like.dtype), mesh)
