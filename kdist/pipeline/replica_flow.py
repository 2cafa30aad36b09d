"""What is the same of a replica's way through a pipeline, whatever its stages are."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from kdist.dtensor.sharded import Sharded
from kdist.loss_parts import LossParts, collected, merged, penalty_name
from kdist.pipeline.functions import Saved
from kdist.pipeline.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
)
from kdist.pipeline.micro import MicroBatches
from kdist.pipeline.recorder import Recorder, Stamps

import tensorflow as tf

Unit = tuple[int, int]
"""(virtual stage, micro-batch)"""


class ReplicaFlow(abc.ABC):
    """The values of one replica in one step: what its instructions read and leave behind.

    Args:
        runner: Knows program, mesh and stored variables.
        replica: Which one.
        functions: The functions of the virtual stages.
        micro: The batch.
        parts: The replica's micro-batches, x as the model's inputs by name.
        shares: Per micro-batch, its share of each compiled loss; None where no loss is wanted.
        scale: What the loss is multiplied by before differentiation.
    """

    def __init__(
        self,
        runner: Any,
        replica: int,
        functions: Sequence[Any],
        micro: MicroBatches,
        parts: Sequence[Any],
        shares: Sequence[Any] | None,
        scale: Any,
    ) -> None:
        self.runner, self.replica, self.functions = runner, replica, functions
        self.micro, self.parts, self.shares, self.scale = micro, parts, shares, scale
        self.program = runner.program
        self.topology = runner.topology
        self._state: dict[int, Any] = {}
        self._sent: dict[Unit, Any] = {}
        self._saved: dict[Unit, Saved] = {}
        self._returned: dict[Unit, list[Any]] = {}
        self._results: list[Any] = [None] * len(parts)
        self._losses: list[Any] = []
        self._loss_parts: LossParts = {}

    def run(self, one: Instruction, recorder: Recorder | None = None) -> tuple[Any, Any]:
        """Writes an instruction into the graph of the step.

        Returns:
            The first and the last operation of the graph that belong to it, None without one.
        """
        virtual = one.virtual_stage(self.runner.schedule.num_stages)
        with tf.device(self.device(one.stage)), tf.name_scope(self.name(one)):
            if recorder is None:
                operation = self.act(one)
                return operation, operation
            arrived = recorder.now(self._incoming(one, virtual))
            start = recorder.now([arrived])
            with tf.control_dependencies([start]):
                operation = self.act(one)
            end = recorder.now([start.op if operation is None else operation])
            recorder.add(self.replica, one, Stamps(arrived, start, end))
            return start.op, end.op

    def _incoming(self, one: Instruction, virtual: int) -> list[Any]:
        """What an instruction gets from another virtual stage; of one in parts, the first."""
        if isinstance(one, Forward):
            sent = self._sent.get((virtual - 1, one.micro_batch))
            found = [] if sent is None else [*sent.boundary.values(), *sent.masks.values()]
        elif isinstance(one, BackwardWeight):
            found = []
        else:
            found = self._returned.get((virtual + 1, one.micro_batch), [])
        there = [t for t in found if t is not None]
        return [t.parts[0] if isinstance(t, Sharded) else t for t in there]

    def name(self, one: Instruction) -> str:
        """What the graph calls an instruction."""
        return f"replica{self.replica}/{one.cell(self.runner.schedule.num_stages)}"

    def slice(self, stage: int) -> int:
        """The slice of a stage."""
        return int(self.topology.slice_number(stage, self.replica))

    def device(self, stage: int) -> str:
        """The device of a stage; the first of its slice."""
        return str(self.topology.slices[self.slice(stage)].devices[0])

    def act(self, one: Instruction) -> tf.Operation | None:
        """Does an instruction; returns the operation of the graph that it is, None without one."""
        virtual = one.virtual_stage(self.runner.schedule.num_stages)
        actions = {
            Forward: self.forward,
            Backward: self.backward,
            BackwardInput: self.backward_input,
            BackwardWeight: self.backward_weight,
        }
        return actions[type(one)](virtual, one.micro_batch)

    def _keep(self, virtual: int, i: int, output: Any, saved: Saved, last: bool) -> None:
        """Notes what a forward left behind."""
        if last:
            self._results[i] = output
        if output.loss is not None:
            self._losses.append(output.loss)
        self._loss_parts = merged([self._loss_parts, output.loss_parts])
        self._sent[virtual, i] = output
        self._saved[virtual, i] = saved

    def _note_penalties(self, positions: Sequence[int], values: Sequence[Any]) -> None:
        """Notes the penalties of some trainable variables as parts of the loss."""
        names = [penalty_name(self.program.state.trainable[p]) for p in positions]
        self._loss_parts = merged([self._loss_parts, collected(zip(names, values))])

    @abc.abstractmethod
    def forward(self, virtual: int, i: int) -> Any:
        """Forward of micro-batch `i` on a virtual stage."""

    @abc.abstractmethod
    def backward(self, virtual: int, i: int) -> Any:
        """Whole backward."""

    @abc.abstractmethod
    def backward_input(self, virtual: int, i: int) -> Any:
        """Gradient of the inputs."""

    @abc.abstractmethod
    def backward_weight(self, virtual: int, i: int) -> Any:
        """Gradient of the parameters."""
