"""The train, test and predict steps: a loop over declared work, the same for every mesh.

A step splits the global batch over the slices, has a runner compute each slice's loss and
gradients, lets the distributed update reduce and apply them, and combines state, metrics and logs
so that they equal a single-device run.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

from kdist.graphs.write_order import writes_after_reads
from kdist.optimizer.gradients import GradientSource
from kdist.optimizer.reduction import Reduction
from kdist.optimizer.slice_gradients import part_of
from kdist.optimizer.update import DistributedUpdate
from kdist.program.batch import SplitBatch, join, split
from kdist.program.program import Program
from kdist.program.state import combine
from kdist.program.training_pass import TrainingPass
from kdist.runtime import metrics
from kdist.runtime.plain_runner import Begin
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Coordinate, UpdateUnit
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

    def __init__(self, parallel: Any, runner: Any) -> None:
        self.parallel = parallel
        self.model: keras.Model = parallel.model
        self.program: Program = parallel.program
        self.topology: Topology = parallel.compute
        self.runner = runner
        self.metrics = metrics.MetricUpdates(self.model)

    @property
    def update(self) -> DistributedUpdate:
        """Applies gradients; there once the model trains, if it has trainable weights."""
        return self.parallel.update

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
        results, loss = self._differentiated(batch, self._scale(), there)
        return self.finish_training(batch, results, loss, *begun)

    def _differentiated(
        self, batch: SplitBatch, scale: Any, begin: Begin | None = None
    ) -> tuple[Sequence[dict[str, Any]], Any]:
        """Results per slice, gradients included, and the loss.

        Args:
            batch: The batch.
            scale: What the loss is multiplied by before differentiation, None for 1.
            begin: Begins the reduction of gradients that can be summed while others are computed.
        """
        results = self.runner.gradients(batch, scale, begin)
        return results, self._total(results, "loss")

    def finish_training(
        self,
        batch: SplitBatch,
        results: Sequence[dict[str, Any]],
        loss: Any,
        reduction: Reduction | None = None,
    ) -> dict[str, Any]:
        """Everything after the slices' compute: update, state, metrics.

        Args:
            batch: The batch.
            results: Per slice.
            loss: The loss.
            reduction: What sums the gradients, if it has begun.
        """
        with writes_after_reads():
            self._keep_state(batch, results, training=True)
            self.apply_results(results, reduction)
            return self._logs(batch, results, loss)

    def apply_results(
        self, results: Sequence[dict[str, Any]], reduction: Reduction | None = None
    ) -> None:
        """Reduces the slices' gradients and updates the parameters."""
        connected = self._connected(results)
        if not self.program.state.trainable:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return
        if not connected:
            raise ValueError(
                "No trainable weight gets a gradient from the loss. Check that the loss depends "
                "on the outputs of trainable layers. "
                f"Received: model={self.model.name!r} with "
                f"{len(self.program.state.trainable)} trainable weights"
            )
        self.update.apply(reduction or self.update.begin(self._source(results), connected))

    def _connected(self, results: Sequence[dict[str, Any]]) -> list[int]:
        """Positions of the trainable variables that have a gradient."""
        return self.program.trained.connected

    def _source(self, results: Sequence[dict[str, Any]]) -> GradientSource:
        """Where the update reads the gradients of some results."""
        return self.runner.gradient_at([r["gradients"] for r in results])

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
        results, loss = self._differentiated(batch, scale, there)
        with writes_after_reads():
            self._keep_state(batch, results, training=True)
        if there is not None and not begun:
            begin(self._source(results), self._connected(results))
        found = self._whole(begun[0], scale) if begun else []
        return TrainingPass(loss, found, batch, results)

    def _whole(self, reduction: Reduction, scale: Any) -> list[Any]:
        """One whole gradient, or None, per trainable variable.

        Rows of tables stay rows: an optimizer squares and clips them one by one, as in `fit`.
        """
        whole: list[Any] = [None] * len(self.program.state.trainable)
        for v, gradient in self.update.whole_gradients(reduction).items():
            if scale is not None:
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
        results, loss = self._evaluated(batch)
        return self.finish_testing(batch, results, loss)

    def _evaluated(self, batch: SplitBatch) -> tuple[Sequence[dict[str, Any]], Any]:
        """Results per slice in inference mode, and the loss."""
        results = self.runner.losses(batch)
        return results, self._total(results, "loss")

    def finish_testing(
        self, batch: SplitBatch, results: Sequence[dict[str, Any]], loss: Any
    ) -> dict[str, Any]:
        """State and metrics after evaluation."""
        with writes_after_reads():
            self._keep_state(batch, results, training=False)
            return self._logs(batch, results, loss)

    def predict(self, data: Any, known_size: bool = True) -> Any:
        """Outputs for a global batch, rows in order."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        batch = self.cut(x, None, None)
        results = self.runner.outputs(batch)
        with writes_after_reads():
            self._combine(*self._changed(results, training=False), batch)
        return join([r["outputs"] for r in results], batch.counts)

    def split(self, data: Any, known_size: bool = True) -> SplitBatch:
        """Cuts what the data pipeline yields over the slices; see `train`."""
        batch = self.cut(*keras.utils.unpack_x_y_sample_weight(data))
        return batch if known_size else dataclasses.replace(batch, static_size=None)

    def cut(self, x: Any, y: Any, sample_weight: Any) -> SplitBatch:
        """Cuts a batch over the slices."""
        return split(x, y, sample_weight, self.topology.data_size)

    def _keep_state(
        self, batch: SplitBatch, results: Sequence[dict[str, Any]], training: bool
    ) -> None:
        """Writes back the state that the forward passes changed."""
        self._combine(*self._changed(results, training), batch)

    def _changed(
        self, results: Sequence[dict[str, Any]], training: bool
    ) -> tuple[list[int], list[list[Any]]]:
        """Positions in `ModelState.written` that changed, and per slice their new values."""
        return self.program.traced(training).updated, [r["updated"] for r in results]

    def _combine(
        self, updated: Sequence[int], values: Sequence[Sequence[Any]], batch: SplitBatch
    ) -> None:
        combine(self.program.state, updated, values, batch)

    def _scale(self) -> Any:
        return None if self.update is None else self.update.scale()

    def _total(self, results: Sequence[dict[str, Any]], key: str) -> Any:
        parts = [r[key] for r in results]
        return parts[0] if len(parts) == 1 else tf.add_n(parts)

    def _logs(self, batch: SplitBatch, results: Sequence[dict[str, Any]], loss: Any) -> dict:
        count = len(results[0]["terms"])
        terms = [
            results[0]["terms"][k]
            if len(results) == 1
            else tf.add_n([r["terms"][k] for r in results])
            for k in range(count)
        ]
        metrics.track_loss(self.model, batch, loss, terms)
        return self.metrics.update(
            batch,
            [r["outputs"] for r in results],
            [r["masks"] for r in results],
            self.runner.devices,
        )


class WholeGradients:
    """Whole gradients, reduced already; see `kdist.optimizer.gradients.GradientSource`.

    Args:
        gradients: One, or None, per trainable variable.
        scale: The loss scale that the update will take out again, or None.
        entries: `Stored` of each trainable variable.
    """

    def __init__(self, gradients: Sequence[Any], scale: Any, entries: Sequence[Stored]) -> None:
        self.gradients = gradients
        self.scale = scale
        self.entries = entries

    @property
    def rows(self) -> set[int]:
        """See `GradientSource`."""
        return {v for v, g in enumerate(self.gradients) if is_sparse(g)}

    def unit(self, variable: int, unit: UpdateUnit) -> Any:
        """See `GradientSource`."""
        placement = self.entries[variable].placement
        return self._scaled(
            part_of(self.gradients[variable], unit.index(placement), placement.shape)
        )

    def local(self, variable: int, at: Coordinate) -> Any:
        """See `GradientSource`; the first slice's that uses the variable stands for all."""
        placement = self.entries[variable].placement
        if at[0] != placement.slices[0]:
            return None
        part = part_of(self.gradients[variable], placement.inner_index(at[1]), placement.shape)
        return self._scaled(tf.convert_to_tensor(part))

    def _scaled(self, gradient: Any) -> Any:
        return gradient if self.scale is None else multiplied(gradient, self.scale)


def multiplied(gradient: Any, factor: Any) -> Any:
    """A gradient, a tensor or rows of a table, times a scalar."""
    factor = tf.cast(factor, gradient.dtype)
    if not is_sparse(gradient):
        return gradient * factor
    return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
