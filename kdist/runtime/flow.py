"""One replica's way through a pipeline: what its instructions read and leave behind."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kdist._compat import keras_trainer
from kdist.dtensor.sharded import Sharded, each
from kdist.pipeline.communication import Message
from kdist.pipeline.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
)
from kdist.program.batch import join
from kdist.program.logits import with_logits
from kdist.program.loss_parts import LossParts, collected, merged, penalty_name
from kdist.program.step_result import SliceResult
from kdist.runtime.added_rows import AddedRows
from kdist.runtime.ends import Ends, ends
from kdist.runtime.handed_on import HandedOn, Unit
from kdist.runtime.micro_batches import MicroBatches
from kdist.runtime.recorder import Stamps, TimelineRecorder
from kdist.stages.functions import Saved, StageFunctions
from kdist.storage.fetched_table import is_fetched
from kdist.storage.sparse import is_sparse, joined
from kdist.storage.variables import backing_of

import keras
import tensorflow as tf

if TYPE_CHECKING:
    from kdist.runtime.pipeline_runner import PipelineRunner


class Flow:
    """The values of one replica in one step, all in the step's graph, as parts on its slices.

    Args:
        runner: Knows program, mesh and backend.
        replica: Which one.
        functions: Per micro-batch, the functions of the virtual stages.
        micro: The batch.
        parts: The replica's micro-batches, x as the model's inputs by name.
        shares: Per micro-batch, its share of each compiled loss; None where no loss is wanted.
        scale: What the loss is multiplied by before differentiation.

    Attributes:
        gradients: Per slice of the replica, by trainable variable, the sum so far of what is dense.
        cotangents: By (virtual stage, micro-batch), those that a loss over the whole batch gives.
        held: Per slice of the replica, the weights that are gathered there, by position.
        handed_on: What its virtual stages have made for each other.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        replica: int,
        functions: Sequence[Sequence[StageFunctions]],
        micro: MicroBatches,
        parts: Sequence[Any],
        shares: Sequence[Any] | None,
        scale: Any,
    ) -> None:
        self.runner, self.replica, self.functions = runner, replica, functions
        self.micro, self.parts, self.shares, self.scale = micro, parts, shares, scale
        self.program, self.backend = runner.program, runner.backend
        self.gradients: dict[int, dict[int, Sharded]] = {}
        self.cotangents: dict[Unit, list[Any]] = {}
        self.held: dict[int, dict[int, Sharded]] = {}
        self._penalties: list[Sharded] = []
        self._rows: dict[tuple[int, int, int], list[Any]] = {}
        self._fetched: dict[tuple[int, int], dict[int, Any]] = {}
        self._read: dict[tuple[int, int], Sharded] = {}
        self._state: dict[int, Sharded] = {}
        self.handed_on = HandedOn(runner.schedule.num_stages)
        self._saved: dict[Unit, Saved] = {}
        self._results: list[Any] = [None] * len(parts)
        self._losses: list[Sharded] = []
        self._loss_parts: LossParts = {}
        self._added: dict[Unit, list[Any]] = {}

    def run(self, one: Instruction, recorder: TimelineRecorder | None = None) -> Ends:
        """Writes an instruction into the graph of the step.

        Returns:
            The first and the last operation of the graph that belong to it, None without one.
        """
        with tf.device(self.device(one.stage)), tf.name_scope(self.name(one)):
            if recorder is None:
                return self.act(one)
            arrived = recorder.now(self.handed_on.incoming(one))
            start = recorder.now([arrived])
            with tf.control_dependencies([start]):
                first, last = self.act(one)
            if first is not None:
                # TensorFlow leaves the edge out where an input has it: a variable that is read.
                keras_trainer.run_after(first, [start.op])
            end = recorder.now([start if last is None else last])
            recorder.add(self.replica, one, Stamps(arrived, start, end))
            return (None, None) if tf.executing_eagerly() else (start.op, end.op)

    def name(self, one: Instruction) -> str:
        """What the graph calls an instruction."""
        return f"replica{self.replica}/{one.cell(self.runner.schedule.num_stages)}"

    def slice(self, stage: int) -> int:
        """The slice of a stage."""
        return int(self.runner.topology.slice_number(stage, self.replica))

    def device(self, stage: int) -> str:
        """The device of a stage; the first of its slice."""
        return str(self.backend.devices(self.slice(stage))[0])

    def act(self, one: Instruction) -> Ends:
        """Does an instruction; returns its first and its last operation of the graph."""
        virtual = one.virtual_stage(self.runner.schedule.num_stages)
        actions = {
            Forward: self.forward,
            Backward: self.backward,
            BackwardInput: self.backward_input,
            BackwardWeight: self.backward_weight,
        }
        return actions[type(one)](self.slice(one.stage), virtual, one.micro_batch)

    def send(self, message: Message) -> None:
        """Hands over what an instruction made for another stage."""
        self.handed_on.send(message)

    def receive(self, message: Message) -> None:
        """Takes what another stage has sent to the devices of its stage."""
        with tf.name_scope(f"{self.name(message.target)}/received"):
            devices = self.backend.devices(self.slice(message.target.stage))
            self.handed_on.receive(message, devices)

    def forward(self, s: int, virtual: int, i: int) -> Ends:
        """Forward of micro-batch `i` on a virtual stage, on slice `s`."""
        functions = self.functions[i][virtual]
        body = functions.body
        boundary, masks = self.handed_on.forth.pop((virtual - 1, i)) if virtual else ({}, {})
        x, y, sample_weight = self.backend.data(self.parts[i])
        loss = share = None
        if self.shares is not None:
            loss = (y, sample_weight, self.shares[i])
            share = self.micro.shares[self.replica][i]
        variables = [self.program.state.params[n] for n in body.params]
        params = [self._parameter(position, s, (virtual, i)) for position in body.params]
        state = {id(v): self._carried(v, s, (virtual, i)) for v in body.carried}
        given = body.given(boundary, masks, state, x, loss, share)
        output, saved = functions.forward(s, params, given)
        before = {**state, **{id(v): p for v, p in zip(variables, params)}}
        for key, new in output.state.items():
            self._state[key] = new if self.micro.full else self._if_rows(s, i, new, before[key])
        gathered = self.runner.gathered
        saved.freed = frozenset(
            n
            for n, position in enumerate(body.params)
            if position in gathered and id(variables[n]) not in self._state
        )
        for n in saved.freed:
            saved.params[n] = None
        self._keep(virtual, i, output, saved, body.last)
        return ends([*output.flat(), *saved.tensors])

    def _if_rows(self, s: int, i: int, new: Sharded, old: Sharded) -> Sharded:
        """New state, or the old where a micro-batch has no rows."""
        rows = self.micro.counts[self.replica][i] > 0
        return each(lambda a, b: tf.where(rows, a, b), self.backend.devices(s), new, old)

    def _keep(self, virtual: int, i: int, output: Any, saved: Saved, last: bool) -> None:
        """Notes what a forward left behind."""
        if last:
            self._results[i] = output
        else:
            self.handed_on.forth[virtual, i] = output.boundary, output.masks
        if output.loss is not None:
            self._losses.append(output.loss)
        self._loss_parts = merged([self._loss_parts, output.loss_parts])
        self._added[virtual, i] = output.added
        self._saved[virtual, i] = saved

    def backward(self, s: int, virtual: int, i: int) -> Ends:
        """Whole backward."""
        saved = self._with_cotangents(s, virtual, i)
        self._take_up(s, virtual, i, saved)
        found, inward = self.functions[i][virtual].backward(s, saved)
        del self._saved[virtual, i]
        self.handed_on.back[virtual, i] = inward
        sums = self._accumulate(s, virtual, i, found)
        return ends([*found, *inward], sums)

    def backward_input(self, s: int, virtual: int, i: int) -> Ends:
        """Gradient of the inputs."""
        saved = self._with_cotangents(s, virtual, i)
        self._take_up(s, virtual, i, saved)
        inward = self.functions[i][virtual].backward_input(s, saved)
        self.handed_on.back[virtual, i] = inward
        return ends([*inward, *saved.kept])

    def backward_weight(self, s: int, virtual: int, i: int) -> Ends:
        """Gradient of the parameters."""
        saved = self._saved.pop((virtual, i))
        self._take_up(s, virtual, i, saved)
        found = self.functions[i][virtual].backward_weight(s, saved)
        return ends(found, self._accumulate(s, virtual, i, found))

    def _with_cotangents(self, s: int, virtual: int, i: int) -> Saved:
        saved = self._saved[virtual, i]
        functions = self.functions[i][virtual]
        returned = [] if functions.body.last else self.handed_on.back.pop((virtual + 1, i))
        others = self.cotangents.get((virtual, i), [])
        if functions.has_loss:
            others = [tf.cast(self.scale, functions.example_output.loss.dtype)]
        functions.set_cotangents(s, saved, returned, others)
        return saved

    def _take_up(self, s: int, virtual: int, i: int, saved: Saved) -> None:
        """Takes what is gathered for a backward; what it does not look at is described."""
        held = self.held.get(s, {})
        for n in saved.freed:
            position = self.functions[i][virtual].body.params[n]
            saved.params[n] = held.get(position, self.backend.described(position))

    def _accumulate(self, s: int, virtual: int, i: int, found: Sequence[Any]) -> list[Any]:
        """Adds a micro-batch's gradients to the sum; rows are put together at the end.

        Returns:
            The operations that add.
        """
        made: list[Any] = []
        for position, gradient in zip(self.functions[i][virtual].body.params, found):
            if gradient is not None and self.runner.entries[position].placement.fetched:
                variable = self.program.state.trainable[position]
                turn = self.program.tables.turn(variable, virtual, i)
                self._fetched.setdefault((s, position), {})[turn] = gradient
            elif is_sparse(gradient):
                self._rows.setdefault((s, position, virtual), []).append(gradient)
            elif gradient is not None:
                made += self._add(s, position, gradient)
        return made

    def _add(self, s: int, position: int, gradient: Sharded) -> list[Any]:
        """Adds to the sum of a slice; both are laid out as the parameter is."""
        sums = self.gradients.setdefault(s, {})
        first = position not in sums
        if not first:
            overwrites = self.program.state.trainable[position].overwrite_with_gradient
            join = tf.maximum if overwrites else operator.add
            gradient = each(join, self.backend.devices(s), sums[position], gradient)
        sums[position] = gradient
        return [] if first or tf.executing_eagerly() else [part.op for part in gradient.parts]

    def _value(self, variable: keras.Variable, s: int) -> Sharded:
        """A variable's value now, on a slice."""
        key = id(variable)
        if key in self._state:
            return self._state[key]
        if (key, s) not in self._read:
            self._read[key, s] = self.backend.read(variable, s)
        return self._read[key, s]

    def _carried(self, variable: keras.Variable, s: int, unit: Unit) -> Sharded:
        """The value of state that a forward takes; of a fetched table, its rows."""
        if not is_fetched(variable):
            return self._value(variable, s)
        backing_of(variable).turn = self.program.tables.turn(variable, *unit)
        return self.backend.read(variable, s)

    def _parameter(self, position: int, s: int, unit: Unit | None = None) -> Sharded:
        """A parameter's value now, on a slice; gathered before, if it is not stored."""
        variable = self.program.state.params[position]
        if unit is not None and is_fetched(variable):
            return self._carried(variable, s, unit)
        if id(variable) in self._state or position not in self.runner.gathered:
            return self._value(variable, s)
        return self.held[s][position]

    def result(self, want_outputs: bool, want_parts: bool) -> SliceResult:
        """What a step takes.

        Args:
            want_outputs: Whether the model's outputs and their masks are wanted.
            want_parts: Whether the parts of the loss are.
        """
        loss = None
        with tf.device(self.last):
            outputs, masks = self._outputs() if want_outputs else (None, [])
            columns = zip(*(r.terms for r in self._results))
            terms = [tf.add_n([self._whole(t) for t in column]) for column in columns]
            losses = [self._whole(value) for value in (*self._losses, *self._penalties)]
            if losses:
                loss = losses[0] if len(losses) == 1 else tf.add_n(losses)
        parts = self._loss_parts if want_parts else {}
        state, training = self.program.state, self.functions[0][0].wanted.training
        updated = [state.written[i] for i in self.program.traced(training).updated]
        return SliceResult(
            loss=loss,
            terms=terms,
            loss_parts=keras.tree.map_structure(self._whole, parts),
            gradients=self.summed(),
            updated=[
                self._value(v, self.slice(self.program.stage_with(v))).joined() for v in updated
            ],
            outputs=outputs,
            masks=masks,
        )

    @property
    def last(self) -> str:
        """The device on which outputs and losses come together."""
        return str(self.runner.devices[self.replica])

    def _whole(self, tensor: Sharded | None) -> Any:
        return None if tensor is None else tensor.whole(self.last)

    def _outputs(self) -> tuple[Any, list[Any]]:
        """The model's outputs for the rows of the replica's part, their masks and logits."""
        counts = self.micro.joined_rows(self.replica)
        outputs = [keras.tree.map_structure(self._whole, r.outputs) for r in self._results]
        masks = []
        for column in zip(*(r.output_masks for r in self._results)):
            found = [self._whole(mask) for mask in column]
            masks.append(None if found[0] is None else join(found, counts))
        joined, logits = join(outputs, counts)
        return joined, with_logits(masks, logits)

    def collected(self, i: int) -> SliceResult:
        """What a loss over the whole batch takes of micro-batch `i`; see `Program.collect`."""
        result = self._results[i]
        stages = range(len(self.functions[i]))
        outputs, logits = keras.tree.map_structure(self._whole, result.outputs)
        return SliceResult(
            outputs=outputs,
            masks=with_logits([self._whole(mask) for mask in result.output_masks], logits),
            added=[self._whole(value) for n in stages for value in self._added[n, i]],
        )

    def give_cotangents(self, i: int, outputs: Sequence[Any], added: Sequence[Any]) -> None:
        """Notes the gradients of what `collected` gave; None where there is none."""
        given = keras.tree.flatten(self._results[i].outputs)
        outputs = [
            None if d is None else self.backend.everywhere(d, like=t)
            for d, t in zip(outputs, given, strict=True)
        ]
        rest = list(added)
        for virtual in range(len(self.functions[i])):
            count = len(self._added[virtual, i])
            self.cotangents[virtual, i] = rest[:count]
            del rest[:count]
        self.cotangents[len(self.functions[i]) - 1, i] += outputs

    def penalty(self, stage: int, positions: Sequence[int]) -> None:
        """Penalties of some weights of a stage, and their gradients."""
        s, variables = self.slice(stage), [self.program.state.trainable[p] for p in positions]
        with tf.device(self.device(stage)):
            params = [self._parameter(position, s) for position in positions]
            scale = tf.constant(0.0) if self.scale is None else self.scale
            found, gradients = self.backend.penalties(s, positions, params, scale)
        if self.scale is not None:
            for position, gradient in zip(positions, gradients):
                self._add(s, position, gradient)
        self._loss_parts = merged(
            [self._loss_parts, collected(zip(map(penalty_name, variables), found))]
        )
        self._penalties += found

    def summed(self) -> dict[int, dict[int, list[Any]]]:
        """Per slice, by trainable variable, the sum on each device; of rows alone, rows."""
        found: dict[int, dict[int, list[Any]]] = {
            s: {position: list(total.parts) for position, total in sums.items()}
            for s, sums in self.gradients.items()
        }
        added = AddedRows(self.runner, self.functions[0])
        tables: dict[tuple[int, int], dict[int, Sequence[Any]]] = {}
        for (s, position, virtual), rows in self._rows.items():
            tables.setdefault((s, position), {})[virtual] = rows
        for (s, position), users in tables.items():
            before = found.setdefault(s, {}).get(position)
            found[s][position] = []
            for k, device in enumerate(self.backend.devices(s)):
                with tf.device(device):
                    parts = [] if before is None else [before[k]]
                    found[s][position].append(joined([*parts, *added(s, position, k, users)]))
        for (s, position), gradients in self._fetched.items():
            found.setdefault(s, {})[position] = []
            for k, device in enumerate(self.backend.devices(s)):
                with tf.device(device):
                    there = {turn: gradient.parts[k] for turn, gradient in gradients.items()}
                    found[s][position].append(self.program.tables.joined(s, position, there))
        return found
