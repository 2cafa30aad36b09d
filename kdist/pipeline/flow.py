"""One replica's way through a pipeline: what its instructions read and leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist import _private
from kdist.batch import join
from kdist.pipeline.functions import Saved
from kdist.pipeline.replica_flow import ReplicaFlow
from kdist.program import ModelState
from kdist.sparse import add, is_sparse, joined
from kdist.state import replica_seed
from kdist.variables import stored

import keras
import tensorflow as tf


class Flow(ReplicaFlow):
    """The values of one replica in one step, all in the step's graph; see `ReplicaFlow`.

    Attributes:
        gradients: Per slice of the replica, by trainable variable, the sum so far.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gradients: dict[int, dict[int, Any]] = {}
        self._rows: dict[tuple[int, int, int], list[Any]] = {}
        self._read: dict[tuple[int, int], Any] = {}

    def forward(self, virtual: int, i: int) -> tf.Operation | None:
        """Forward of micro-batch `i` on a virtual stage."""
        functions = self.functions[virtual]
        body, stage = functions.body, self.runner.staged.stage_of(virtual)
        sent = self._sent.pop((virtual - 1, i), None)
        boundary, masks = (sent.boundary, sent.masks) if sent is not None else ({}, {})
        x, y, sample_weight = self.parts[i]
        loss = share = None
        if self.shares is not None:
            loss = (y, sample_weight, self.shares[i])
            share = self.micro.shares[self.replica][i]
        state = {id(v): self._carried(v, stage) for v in body.carried}
        params = [self._param(position, stage) for position in body.trainable]
        given = self.program.stage_input(body, boundary, masks, state, x, loss, share)
        output, saved = functions.forward(params, given)
        before = {
            **state,
            **{id(self.program.state.trainable[n]): p for n, p in zip(body.trainable, params)},
        }
        for key, new in output.state.items():
            if not self.micro.full:
                new = tf.where(self.micro.counts[self.replica][i] > 0, new, before[key])
            self._state[key] = tf.stop_gradient(new)
        self._keep(virtual, i, output, saved, body.last)
        return _operation([*output.flat(), *saved.tensors])

    def backward(self, virtual: int, i: int) -> tf.Operation | None:
        """Whole backward."""
        saved = self._with_cotangents(virtual, i)
        found, inward = self.functions[virtual].backward(saved)
        del self._saved[virtual, i]
        self._returned[virtual, i] = inward
        self._accumulate(virtual, found)
        return _operation([*found, *inward])

    def backward_input(self, virtual: int, i: int) -> tf.Operation | None:
        """Gradient of the inputs."""
        saved = self._with_cotangents(virtual, i)
        inward = self.functions[virtual].backward_input(saved)
        self._returned[virtual, i] = inward
        return _operation([*inward, *saved.kept])

    def backward_weight(self, virtual: int, i: int) -> tf.Operation | None:
        """Gradient of the parameters."""
        found = self.functions[virtual].backward_weight(self._saved.pop((virtual, i)))
        self._accumulate(virtual, found)
        return _operation(found)

    def _with_cotangents(self, virtual: int, i: int) -> Saved:
        functions, saved = self.functions[virtual], self._saved[virtual, i]
        scale = None
        if functions.has_loss:
            scale = tf.cast(self.scale, functions.example_output.loss.dtype)
        functions.set_cotangents(saved, self._returned.pop((virtual + 1, i), []), scale)
        return saved

    def _accumulate(self, virtual: int, found: Sequence[Any]) -> None:
        """Adds a micro-batch's gradients to the sum; rows are put together at the end."""
        at = self.slice(self.runner.staged.stage_of(virtual))
        sums = self.gradients.setdefault(at, {})
        for position, gradient in zip(self.functions[virtual].body.trainable, found):
            if gradient is None:
                continue
            if is_sparse(gradient):
                self._rows.setdefault((at, position, virtual), []).append(gradient)
            else:
                sums[position] = gradient if position not in sums else sums[position] + gradient

    def _param(self, position: int, stage: int) -> Any:
        key = id(self.program.state.trainable[position])
        if key in self._state:
            return self._state[key]
        if (key, stage) not in self._read:
            entry = self.runner.entries[position]
            self._read[key, stage] = entry.whole_at(self.slice(stage))
        return self._read[key, stage]

    def _carried(self, variable: keras.Variable, stage: int) -> Any:
        key = id(variable)
        if key in self._state:
            return self._state[key]
        if (key, stage) not in self._read:
            self._read[key, stage] = carried_value(
                self.program.state, variable, self.replica, self.topology, stage
            )
        return self._read[key, stage]

    def result(self) -> dict[str, Any]:
        """What `PlainRunner` gives per slice: loss, terms, gradients, state, outputs, masks."""
        self._finish_rows()
        last = self.runner.staged.stage_of(self.runner.schedule.virtual_stages - 1)
        with tf.device(self.device(last)):
            counts = self.micro.counts[self.replica]
            masks = [
                None if column[0] is None else join(list(column), counts)
                for column in zip(*(r.output_masks for r in self._results))
            ]
            result = {
                "outputs": join([r.outputs for r in self._results], counts),
                "masks": masks,
                "terms": [tf.add_n(list(t)) for t in zip(*(r.terms for r in self._results))],
            }
        penalties = self._penalties() if self.shares is not None else []
        with tf.device(self.device(last)):
            losses = [*self._losses, *penalties]
            if losses:
                result["loss"] = losses[0] if len(losses) == 1 else tf.add_n(losses)
        result["loss_parts"] = self._loss_parts
        traced = self.program.traced(self.functions[0].wanted.training)
        written = self.program.state.written
        result["updated"] = [self._state[id(written[i])] for i in traced.updated]
        result["gradients"] = self.gradients
        return result

    def _finish_rows(self) -> None:
        """Puts the micro-batches' rows together, and with dense gradients of the same variable."""
        for (at, position, virtual), parts in self._rows.items():
            look_up = self.functions[virtual].look_ups()[position]
            with tf.device(self.topology.slices[at].devices[0]):
                total = add(parts, look_up.by_batch, look_up.merged)
                self._add(at, position, total)

    def _add(self, at: int, position: int, gradient: Any) -> None:
        """Adds to the sum of a slice; rows stay rows."""
        sums = self.gradients.setdefault(at, {})
        sums[position] = joined([sums[position], gradient] if position in sums else [gradient])

    def _penalties(self) -> list[Any]:
        """Weight penalties count once: on the first replica, on the stage that has the variable."""
        values = []
        for stage in range(self.runner.schedule.num_stages):
            positions = self.program.penalties_on(stage)
            if not positions or self.replica > 0:
                continue
            with tf.device(self.device(stage)):
                values += self._penalty(stage, positions)
        return values

    def _penalty(self, stage: int, positions: Sequence[int]) -> list[Any]:
        params = [self._param(position, stage) for position in positions]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(params)
            values = []
            for position, param in zip(positions, params):
                value = self.program.state.trainable[position].regularizer(param)
                values.append(tf.cast(tf.reduce_sum(value), keras.config.floatx()))
            self._note_penalties(positions, values)
            if self.scale is None:
                return values
            target = tf.add_n(values) * tf.cast(self.scale, values[0].dtype)
        for position, gradient in zip(positions, tape.gradient(target, params)):
            if gradient is not None:
                self._add(self.slice(stage), position, gradient)
        return values


def carried_value(
    state: ModelState, variable: keras.Variable, replica: int, topology: Any, stage: int
) -> Any:
    """A replica's value of state that is not trained, on the device in scope."""
    if any(variable is one for one in state.seeds):
        return replica_seed(tf.convert_to_tensor(variable.value), replica)
    entry = stored(variable)
    if entry is None:
        return tf.convert_to_tensor(variable.value)
    number = topology.slice_number(stage, replica)
    if number not in entry.placement.slices:
        number = entry.placement.home[replica]
    return tf.convert_to_tensor(entry.whole_at(number))


def _operation(tensors: Sequence[Any]) -> tf.Operation | None:
    """The operation of a graph that made the first of some tensors."""
    for tensor in tensors:
        if tensor is not None:
            tensor = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
            if tf.executing_eagerly():
                return None
            _private.run_independently(tensor.op)
            return tensor.op
    return None
