"""The train, test and predict steps: a loop over declared work, the same for every mesh.

A step splits the global batch over the slices, has a runner compute each slice's loss and
gradients, lets the distributed update reduce and apply them, and combines state, metrics and logs
so that they equal a single-device run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

from kdist.display.warn import warn
from kdist.graphs.instantiation import prepared_cheaply
from kdist.graphs.write_order import writes_after_reads
from kdist.optimizer.early import update_early
from kdist.optimizer.gradients import GradientSource
from kdist.optimizer.reduction import Reduction
from kdist.optimizer.slice_gradients import part_of
from kdist.optimizer.update import DistributedUpdate
from kdist.program.batch import SplitBatch, join, split
from kdist.program.looked_up import RowsAhead, corrected
from kdist.program.program import Program
from kdist.program.state import combine
from kdist.program.step_result import SliceResult, StepResult
from kdist.program.training_pass import TrainingPass
from kdist.runtime import metrics
from kdist.runtime.loss_terms import OVERRIDDEN
from kdist.runtime.runner_contract import Begin, CompiledState, Runner
from kdist.runtime.table_penalties import TablePenalties, table_penalties
from kdist.sharding.mesh import Topology
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Coordinate
from kdist.storage.constant_ids import knowing
from kdist.storage.overwritten import overwritten, refuse_added
from kdist.storage.sparse import is_sparse
from kdist.storage.variables import Stored

import keras
import tensorflow as tf


class Step:
    """The steps of one compiled model.

    Args:
        parallel: The model's compiled state, of `kdist.api.parallelize`: program, update, mesh.
        runner: Computes per slice (see `kdist.runtime.plain_runner.PlainRunner`).
    """

    def __init__(self, parallel: CompiledState, runner: Runner) -> None:
        assert parallel.program is not None
        self.parallel = parallel
        self.model: keras.Model = parallel.model
        self.program: Program = parallel.program
        self.topology: Topology = parallel.compute
        self.runner = runner
        self.metrics = metrics.MetricUpdates(self.model)

    @property
    def update(self) -> DistributedUpdate:
        """Applies gradients; there once the model trains, if it has trainable weights."""
        # None before: who may come then asks.
        return cast(DistributedUpdate, self.parallel.update)

    def prepared(self) -> contextlib.AbstractContextManager[None]:
        """Meanwhile, what runs for the first time is prepared as the graph of a step is."""
        devices = self.topology.devices
        if len(devices) == 1:
            return contextlib.nullcontext()
        return prepared_cheaply(devices, calls=True)

    def train(self, data: Any, known_size: bool = True) -> dict[str, Any]:
        """One training step on a global batch; returns the logs.

        Args:
            data: The batch.
            known_size: Whether Keras on one device would know the batch's size while tracing.
        """
        batch = self.split(data, known_size)
        begun: list[Reduction] = []

        def begin(source: GradientSource, connected: Sequence[int]) -> Reduction:
            begun.append(self.update.begin(source, connected))
            return begun[0]

        there = begin if self.program.state.trainable else None
        result = self._penalized(batch, self._scale(), there)
        return self.finish_training(batch, result, *begun)

    def look_ahead(self, data: Any, there: Any, known_size: bool = True) -> RowsAhead:
        """Fetches rows for training on a batch, of tables that are looked up a step ahead.

        Args:
            data: The batch.
            there: Whether it comes, a boolean scalar.
            known_size: See `train`.
        """
        parts = self._parts(self.split(data, known_size))
        with knowing(self.parallel.constant_ids):
            return self.program.tables.look_ahead(parts, there)

    def train_ahead(
        self, data: Any, rows: RowsAhead, following: Any, there: Any, known_size: bool = True
    ) -> tuple[dict[str, Any], RowsAhead]:
        """One training step, while rows for the next are fetched.

        Args:
            data: The batch.
            rows: What was fetched for it.
            following: The next batch; any, if there is none.
            there: Whether there is one, a boolean scalar.
            known_size: See `train`.

        Returns:
            The logs, and what was fetched for the next step.
        """
        ahead = self.look_ahead(following, there, known_size)
        with self.program.tables.taking(rows):
            logs = self.train(data, known_size)
        return logs, corrected(ahead)

    def _parts(self, batch: SplitBatch) -> Sequence[Sequence[Any]]:
        """Per replica, the parts that look rows of tables up."""
        return [[part] for part in batch.parts]

    def _penalized(self, batch: SplitBatch, scale: Any, begin: Begin | None) -> StepResult:
        """`_differentiated`, with the penalties of fetched tables."""
        penalties = self._penalties(scale, training=True)
        with knowing(self.parallel.constant_ids):
            result = self._differentiated(batch, scale, penalties.joining(begin))
        return penalties.added_to(result)

    def _penalties(self, scale: Any, training: bool) -> TablePenalties:
        """The penalties of fetched tables.

        Raises:
            ValueError: Whether they count is not known.
        """
        tables = self.program.tables
        if tables.penalized and self.parallel.whole_loss == OVERRIDDEN:
            raise ValueError(
                "The penalty of a table on the host, or split by hand, is computed there, and "
                "added to the loss; an overridden compute_loss may leave penalties out. Use "
                "weight_decay of the optimizer, Keras's compute_loss, or leave the table whole on "
                "the device. Received: "
                f"compute_loss of {type(self.model).__name__}, embeddings_regularizer of "
                f"{[one.layer.path for one in tables.penalized]}"
            )
        return table_penalties(tables, scale, training)

    def _differentiated(
        self, batch: SplitBatch, scale: Any, begin: Begin | None = None
    ) -> StepResult:
        """The loss and what every slice gave, gradients included.

        Args:
            batch: The batch.
            scale: What the loss is multiplied by before differentiation, None for 1.
            begin: Begins the reduction of gradients that can be summed while others are computed.
        """
        results = self.runner.gradients(batch, scale, begin)
        return StepResult(self._total([one.loss for one in results]), results)

    def finish_training(
        self, batch: SplitBatch, result: StepResult, reduction: Reduction | None = None
    ) -> dict[str, Any]:
        """Everything after the slices' compute: update, state, metrics.

        Args:
            batch: The batch.
            result: What they gave.
            reduction: What sums the gradients, if it has begun.
        """
        frees = self.update is not None and self.update.one_by_one
        with writes_after_reads(apart=frees):
            self._keep_state(batch, result, training=True)
            self.apply_result(result, reduction)
            logs = self._logs(batch, result)
        if reduction is not None and frees:
            update_early(reduction)
        return logs

    def apply_result(self, result: StepResult, reduction: Reduction | None = None) -> None:
        """Reduces the slices' gradients and updates the parameters."""
        connected = self._connected(result)
        if not self.program.state.trainable:
            warn("The model does not have any trainable weights.")
            return
        if not connected:
            raise ValueError(
                "No trainable weight gets a gradient from the loss. Check that the loss depends "
                "on the outputs of trainable layers. "
                f"Received: model={self.model.name!r} with "
                f"{len(self.program.state.trainable)} trainable weights"
            )
        self.update.apply(reduction or self.update.begin(self._source(result), connected))

    def _connected(self, result: StepResult) -> list[int]:
        """Positions of the trainable variables that have a gradient."""
        return sorted({*self.program.trained.connected, *result.once})

    def _source(self, result: StepResult) -> GradientSource:
        """Where the update reads the gradients."""
        return self.runner.gradient_at([one.gradients for one in result.slices], result.once)

    def gradients(self, data: Any, compress: bool = True) -> TrainingPass:
        """Loss and whole gradients of a global batch, for the user's own loop.

        Args:
            data: The batch.
            compress: See `DistributedUpdate.begin`.
        """
        batch = self.split(data)
        scale = self._scale()
        begun: list[Reduction] = []

        def begin(source: GradientSource, connected: Sequence[int]) -> Reduction:
            begun.append(self.update.begin(source, connected, compress, accumulate=False))
            return begun[0]

        there = begin if self.program.state.trainable else None
        result = self._penalized(batch, scale, there)
        with writes_after_reads():
            self._keep_state(batch, result, training=True)
        if there is not None and not begun:
            begin(self._source(result), self._connected(result))
        found = self._whole(begun[0], scale) if begun else []
        return TrainingPass(result.loss, found, batch, result.slices)

    def _whole(self, reduction: Reduction, scale: Any) -> list[Any]:
        """One whole gradient, or None, per trainable variable.

        Rows of tables stay rows: an optimizer squares and clips them one by one, as in `fit`.
        """
        whole: list[Any] = [None] * len(self.program.state.trainable)
        unscaled = overwritten(self.program.state.trainable)
        for v, gradient in self.update.whole_gradients(reduction).items():
            if scale is not None and v not in unscaled:
                gradient = multiplied(gradient, 1 / tf.cast(scale, gradient.dtype))
            whole[v] = gradient
        return whole

    def apply_whole(self, gradients: Sequence[Any]) -> None:
        """Updates the parameters from whole gradients, which have travelled before."""
        source = WholeGradients(gradients, self._scale(), self.runner.entries)
        there = [v for v, g in enumerate(gradients) if g is not None]
        with writes_after_reads():
            self.update.apply(self.update.begin(source, there, compress=False))

    def test(self, data: Any, known_size: bool = True) -> dict[str, Any]:
        """One evaluation step on a global batch; returns the logs; see `train`."""
        batch = self.split(data, known_size)
        result = self._penalties(None, training=False).added_to(self._evaluated(batch))
        return self.finish_testing(batch, result)

    def _evaluated(self, batch: SplitBatch) -> StepResult:
        """The loss and what every slice gave, in inference mode."""
        results = self.runner.losses(batch)
        return StepResult(self._total([one.loss for one in results]), results)

    def finish_testing(self, batch: SplitBatch, result: StepResult) -> dict[str, Any]:
        """State and metrics after evaluation: none of a batch that did not come."""
        with tf.control_dependencies([result.loss]), writes_after_reads():
            self._keep_state(batch, result, training=False)
            return self._logs(batch, result)

    def predict(self, data: Any, known_size: bool = True) -> Any:
        """Outputs for a global batch, rows in order."""
        if isinstance(data, SplitBatch):  # of rows that each process read by itself
            batch = data
        else:
            batch = self.cut(keras.utils.unpack_x_y_sample_weight(data)[0], None, None)
        results = self.runner.outputs(batch)
        with writes_after_reads():
            self._combine(*self._changed(results, training=False), batch)
        return join([one.outputs for one in results], batch.counts)

    def split(self, data: Any, known_size: bool = True) -> SplitBatch:
        """Cuts what the data pipeline yields over the slices; see `train`."""
        if isinstance(data, SplitBatch):  # of rows that each process read by itself
            batch = data
        else:
            batch = self.cut(*keras.utils.unpack_x_y_sample_weight(data))
        return batch if known_size else dataclasses.replace(batch, static_size=None)

    def by_shape(self, function: Callable) -> Callable:
        """A function of a batch of this model, as graphs."""
        return tf.function(function, autograph=False, reduce_retracing=True)

    def cut(self, x: Any, y: Any, sample_weight: Any) -> SplitBatch:
        """Cuts a batch over the slices."""
        return split(x, y, sample_weight, self.topology.data_size)

    def _keep_state(self, batch: SplitBatch, result: StepResult, training: bool) -> None:
        """Writes back the state that the forward passes changed."""
        self._combine(*self._changed(result.slices, training), batch)

    def _changed(
        self, results: Sequence[SliceResult], training: bool
    ) -> tuple[list[int], list[Sequence[Any]]]:
        """Positions in `ModelState.written` that changed, and per slice their new values."""
        return self.program.traced(training).updated, [one.updated for one in results]

    def _combine(
        self, updated: Sequence[int], values: Sequence[Sequence[Any]], batch: SplitBatch
    ) -> None:
        combine(self.program.state, updated, values, batch)

    def _scale(self) -> Any:
        return None if self.update is None else self.update.scale()

    def _total(self, parts: Sequence[Any]) -> Any:
        """The sum of slices' parts of a scalar."""
        return parts[0] if len(parts) == 1 else tf.add_n(parts)

    def _logs(self, batch: SplitBatch, result: StepResult) -> dict[str, Any]:
        terms = [self._total(column) for column in zip(*(one.terms for one in result.slices))]
        metrics.track_loss(self.model, batch, result.loss, terms)
        return self.metrics.update(
            batch,
            [one.outputs for one in result.slices],
            [one.masks for one in result.slices],
            self.runner.devices,
        )


class WholeGradients:
    """Whole gradients, reduced already; see `kdist.optimizer.gradients.GradientSource`.

    Args:
        gradients: One, or None, per trainable variable; also a variable that has added some up.
        scale: The loss scale that the update will take out again, or None.
        entries: `Stored` of each trainable variable.
    """

    def __init__(self, gradients: Sequence[Any], scale: Any, entries: Sequence[Stored]) -> None:
        self.gradients = [
            g if g is None or is_sparse(g) else tf.convert_to_tensor(g) for g in gradients
        ]
        self.scale = scale
        self.entries = entries
        variables = [entry.variable for entry in entries]
        self._unscaled = overwritten(variables)
        for variable, gradient in zip(variables, self.gradients):
            refuse_added(variable, gradient)

    @property
    def rows(self) -> set[int]:
        """See `GradientSource`."""
        return {v for v, g in enumerate(self.gradients) if is_sparse(g)}

    def unit(self, variable: int, unit: UpdateUnit) -> Any:
        """See `GradientSource`."""
        placement = self.entries[variable].placement
        part = part_of(self.gradients[variable], unit.index(placement), placement.shape)
        return self._scaled(variable, part)

    def local(self, variable: int, at: Coordinate) -> Any:
        """See `GradientSource`; the first slice's that uses the variable stands for all."""
        placement = self.entries[variable].placement
        if at[0] != placement.slices[0]:
            return None
        part = part_of(self.gradients[variable], placement.inner_index(at[1]), placement.shape)
        return self._scaled(variable, tf.convert_to_tensor(part))

    def _scaled(self, variable: int, gradient: Any) -> Any:
        if self.scale is None or variable in self._unscaled:
            return gradient
        return multiplied(gradient, self.scale)


def multiplied(gradient: Any, factor: Any) -> Any:
    """A gradient, a tensor or rows of a table, times a scalar."""
    factor = tf.cast(factor, gradient.dtype)
    if not is_sparse(gradient):
        return gradient * factor
    return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
