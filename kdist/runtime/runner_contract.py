"""What steps give runners, and get from them, whatever the programs run on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kdist.dtensor.lowered import Collective
from kdist.optimizer.reduction import Reduction
from kdist.optimizer.slice_gradients import SliceGradients
from kdist.optimizer.update import DistributedUpdate
from kdist.pipeline.schedule import Schedule
from kdist.program.batch import SplitBatch, share_of
from kdist.program.loss import has_rows
from kdist.program.program import Program
from kdist.program.step_result import SliceResult
from kdist.runtime.micro_batches import MicroBatches
from kdist.sharding.mesh import Topology
from kdist.storage.constant_ids import ConstantIds
from kdist.storage.variables import Stored

import tensorflow as tf

Begin = Callable[[SliceGradients, Sequence[int]], Reduction]
"""Begins the reduction of the gradients that a source will have, of some trainable variables."""


def loss_factor(scale: Any) -> tf.Tensor:
    """What programs multiply the loss by, a float32 scalar: a scale, or 1 for None."""
    return tf.constant(1.0) if scale is None else tf.cast(scale, tf.float32)


@dataclasses.dataclass(frozen=True)
class Collected:
    """A forward pass without a loss, for a loss over the whole batch.

    Attributes:
        results: Per slice, or replica of a pipeline, as steps take them; see `Program.collect`.
        parts: Per call of the model on a part of the batch: `outputs`, `masks`, `added`.
        batch: The batch in these parts.
        given: Values of trainable and of carried variables, whole, for the loss.
        back: What the backward pass needs of it.
    """

    results: Sequence[SliceResult]
    parts: Sequence[SliceResult]
    batch: SplitBatch
    given: tuple[list[Any], list[Any]]
    back: Any = None


@dataclasses.dataclass(frozen=True)
class Coming:
    """What will come back through the parts of a forward pass: specs, known before it is written.

    Attributes:
        cotangents: Per part, of the gradient of each flat output and its logits; None without one.
        added: The same of each `add_loss` value.
    """

    cotangents: Sequence[Sequence[Any]]
    added: Sequence[Sequence[Any]]

    @classmethod
    def of(
        cls,
        made: Sequence[Sequence[Any]],
        cotangents: Sequence[Sequence[Any]],
        added: Sequence[Sequence[Any]],
        like: Callable[[Any, Any], Any] = lambda made, g: tf.TensorSpec(made.shape, g.dtype),
    ) -> Coming:
        """What gradients are like that were found once.

        Args:
            made: Per part, what they are gradients of.
            cotangents: Per part, of outputs and logits; None without one.
            added: The same of `add_loss` values.
            like: Describes one, from what it is the gradient of and the gradient.
        """
        found, ends = [], [len(one) for one in cotangents]
        for tensors, *gradients in zip(made, cotangents, added, strict=True):
            pairs = zip(tensors, [*gradients[0], *gradients[1]], strict=True)
            found.append([None if g is None else like(t, g) for t, g in pairs])
        return cls(
            [one[:end] for one, end in zip(found, ends)],
            [one[end:] for one, end in zip(found, ends)],
        )


class Runner(Protocol):
    """Computes what each slice, or replica of a pipeline, gives to a step."""

    @property
    def entries(self) -> Sequence[Stored]:
        """`Stored` of each trainable variable."""

    @property
    def devices(self) -> list[str]:
        """The device on which each one's outputs are."""

    def gradients(
        self, batch: SplitBatch, scale: Any, begin: Begin | None = None
    ) -> list[SliceResult]:
        """Loss and gradients, in training mode; `begin` begins their reduction while they come."""

    def losses(self, batch: SplitBatch) -> list[SliceResult]:
        """Loss and outputs, in inference mode."""

    def outputs(self, batch: SplitBatch) -> list[SliceResult]:
        """Outputs alone, in inference mode."""

    def gradient_at(self, results: Sequence[Any], once: Mapping[int, Any]) -> SliceGradients:
        """How the update reads gradients; `once` are those that are there once for all slices."""


class WholeLossRunner(Runner, Protocol):
    """One whose passes leave the loss to the step; see `PlainRunner`."""

    @property
    def by_tape(self) -> bool:
        """Whether a tape records forward passes, so that any gradient may come back."""

    def collect(self, batch: SplitBatch, training: bool) -> Collected:
        """Forward passes without a loss."""

    def record(self, batch: SplitBatch, coming: Coming | None) -> Collected:
        """Forward passes through which gradients come back."""

    def pull_back(
        self,
        collected: Collected,
        cotangents: Sequence[Sequence[Any]],
        added: Sequence[Sequence[Any]],
        begin: Begin | None = None,
    ) -> list[Any]:
        """Gradients of every slice, given those of the parts that `record` returned."""

    def coming(
        self,
        collected: Collected,
        cotangents: Sequence[Sequence[Any]],
        added: Sequence[Sequence[Any]],
    ) -> Coming:
        """What such gradients are like."""

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Around a trace of passes that never run."""


class LoweredRunner(Runner, Protocol):
    """One of programs that DTensor has lowered."""

    def recorded(self) -> Sequence[Collective]:
        """Their collectives."""


class LoweredLossRunner(WholeLossRunner, LoweredRunner, Protocol):
    """One of such programs, which leaves the loss to the step."""


class StagesRunner(LoweredLossRunner, Protocol):
    """One of a pipeline's stages, whatever these run on and wherever the loss is."""

    schedule: Schedule

    def micro_batches(self, batch: SplitBatch) -> MicroBatches:
        """A batch as the stages take it."""


class CompiledState(Protocol):
    """A model's compiled state, as steps use it: `kdist.api.stepped_model.SteppedModel`."""

    model: Any
    program: Program | None
    topology: Topology
    compute: Topology
    update: DistributedUpdate | None

    @property
    def constant_ids(self) -> ConstantIds:
        """What the model looks up whatever the batch holds."""

    @property
    def whole_loss(self) -> str:
        """Why the loss is computed over the whole batch, "" if it is not."""

    @property
    def steps_together(self) -> int:
        """How many steps of a loop are one graph."""

    def warn_once(self, note: str) -> None:
        """Warns of something, once."""

    def warn_idle(self) -> None:
        """Warns of axes that cut nothing."""

    def tell_barriers(self, where: str) -> None:
        """Says where processes wait for each other."""

    def tell_crossed(self, collectives: Sequence[Collective]) -> None:
        """Says which inner axes cross processes."""


def row_shares(batch: SplitBatch) -> list[Any]:
    """Each replica's share of the rows, float64."""
    return [share_of(count, batch.size) for count in batch.counts]


def layer_weights(batch: SplitBatch, mean: bool) -> list[Any]:
    """What each replica's `add_loss` values count: its share of the rows, or 1 if it has any."""
    shares = row_shares(batch)
    return shares if mean else [has_rows(share) for share in shares]
