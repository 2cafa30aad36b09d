"""Steps over slices that have inner axes: graphs by the shape of a batch; and several in a graph.

A batch is taken from its iterator first, since the graph of a step is for its shape, or for shapes
like it (`kdist.runtime.by_shape`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist.dtensor import sizes
from kdist.dtensor.retraced import CannotExpand
from kdist.dtensor.signatures import signature
from kdist.graphs.instantiation import prepared_cheaply
from kdist.program.batch import SplitBatch, leading, split
from kdist.program.looked_up import tensors_of, with_tensors
from kdist.program.step_result import SliceResult, StepResult
from kdist.program.training_pass import TrainingPass
from kdist.runtime.by_shape import ByShape
from kdist.runtime.in_loop import in_loop
from kdist.runtime.in_place import InPlace
from kdist.runtime.keras_contract import one_after_the_other, single_steps, without_optionals
from kdist.runtime.pipeline_step import PipelineStep
from kdist.runtime.runner_contract import Begin, LoweredLossRunner, LoweredRunner, StagesRunner
from kdist.runtime.step import Step
from kdist.runtime.taken import Taken
from kdist.runtime.whole_loss import WholeLossPipelineStep, WholeLossStep
from kdist.runtime.worker_data import WorkerIterator

import keras
import tensorflow as tf

SHOWN_RESULTS = ("terms", "loss_parts", "outputs")


class MeshStep(Step):
    """The steps of one compiled model whose slices have inner axes; see `Step`."""

    runner: LoweredRunner

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._gradients = self.by_shape(self._seen_gradients)
        self._apply_whole = tf.function(super().apply_whole, autograph=False)

    def prepared(self) -> contextlib.AbstractContextManager[None]:
        """See `Step.prepared`."""
        return prepared_cheaply(self.topology.devices)

    @property
    def micro_batches(self) -> int:
        """Into how many a replica's rows are cut."""
        return 1

    def _penalized(self, batch: SplitBatch, scale: Any, begin: Begin | None) -> StepResult:
        """See `Step`; tells of inner axes that cross processes, and of those that cut nothing."""
        result = super()._penalized(batch, scale, begin)
        self.parallel.tell_crossed(self.runner.recorded())
        self.parallel.warn_idle()
        return result

    def by_shape(self, function: Callable) -> ByShape:
        """A function of a batch of this model as graphs by its shape."""
        parts = self.topology.data_size * self.micro_batches
        return ByShape(function, parts, self.topology.devices, self.parallel.warn_once)

    def cut(self, x: Any, y: Any, sample_weight: Any) -> SplitBatch:
        """Cuts a batch over the slices, into parts of known size where the batch's is known.

        Raises:
            CannotExpand: It has sparse tensors, or dims of unknown size.
        """
        leaves = [leaf for leaf in tf.nest.flatten((x, y, sample_weight)) if leaf is not None]
        for leaf in leaves:
            if isinstance(leaf, tf.SparseTensor):
                raise CannotExpand("sparse inputs", of_batch=True)
            if not leaf.shape.is_fully_defined() and sizes.active() is None:
                raise CannotExpand(f"batches of unknown size, here {leaf.shape}", of_batch=True)
        sizes.note(leaves)
        batch = split(x, y, sample_weight, self.topology.data_size, static=True)
        # One device would have traced the step for this size.
        size = batch.size if batch.static_size is None else batch.static_size
        return dataclasses.replace(batch, static_size=size)

    def gradients(self, data: Any, compress: bool = True) -> TrainingPass:
        """See `Step.gradients`."""
        data = as_tensors(self.program.padded(data))
        loss, found, shown = self._gradients(data, compress)
        if not isinstance(data, SplitBatch):
            data = super().cut(*keras.utils.unpack_x_y_sample_weight(data))
        return TrainingPass(loss, found, data, [SliceResult(**one) for one in shown])

    def _seen_gradients(self, data: Any, compress: bool) -> tuple[Any, list[Any], list[Any]]:
        """Loss, whole gradients, and what a `TrainingPass` shows of the slices' results."""
        found = super().gradients(data, compress)
        shown = [{name: getattr(one, name) for name in SHOWN_RESULTS} for one in found.results]
        return found.loss, found.gradients, shown

    def apply_whole(self, gradients: Sequence[Any]) -> None:
        """Updates the parameters from whole gradients."""
        self._apply_whole(gradients)


class MeshPipelineStep(MeshStep, PipelineStep):
    """The steps of a pipeline whose stages have inner axes."""

    runner: StagesRunner

    @property
    def micro_batches(self) -> int:
        """See `MeshStep`."""
        return int(self.runner.schedule.micro_batches)


class WholeLossMeshStep(WholeLossStep, MeshStep):
    """The steps of a model over inner axes whose loss is computed over the whole batch."""

    runner: LoweredLossRunner


class WholeLossMeshPipelineStep(WholeLossPipelineStep, MeshPipelineStep):
    """The same of a pipeline."""

    runner: StagesRunner


def as_tensors(data: Any) -> Any:
    """Arrays of a structure as tensors; None stays None."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, tf.RaggedTensor):
            raise ValueError(
                "Over inner axes, and one step ahead, a batch has sizes, and ragged tensors have "
                "none, but for ids that only a DistributedEmbedding takes. Pad others before: "
                "x.to_tensor(), or preprocess of the layer. "
                f"Received: a ragged tensor of shape {leaf.shape}"
            )
        keep = leaf is None or isinstance(leaf, tf.SparseTensor)
        return leaf if keep else tf.convert_to_tensor(leaf)

    return keras.tree.map_structure(convert, data)


class BatchFunction:
    """What Keras calls as a train, test or predict function that takes batches before its graph.

    For a model with inner axes, one whose tables are looked up a step ahead, one that repeats what
    a budget of memory asks for, which needs sizes, and steps without a barrier. Falls back, once
    and with a warning that says why, to plain devices with gathered weights, for models with an
    operation that DTensor cannot run.

    Args:
        steps: The model's steps, kdist's or its own (`kdist.calls.own_steps`).
        kind: Which of them: "train", "test" or "predict".
        plain: Makes the same step on plain devices.
        model: The model.
        inspected: Told about the fallback: `inspected(reason)`.
        no_batch: Called when the data has run out.
    """

    def __init__(
        self,
        steps: Any,
        kind: str,
        plain: Callable[[], Callable],
        model: keras.Model,
        inspected: Callable[[str], None],
        no_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self.steps, self._step = steps, getattr(steps, kind)
        tables = steps.program.tables.prefetched if kind == "train" else []
        self.ahead = [one.layer.embeddings.path for one in tables]
        several = self._predicted if kind == "predict" else self._in_one_graph
        self.one, self.several = steps.by_shape(self._step), steps.by_shape(several)
        self.in_place = InPlace(self._step, steps.topology.devices)
        self.model = model
        self.inspected = inspected
        self.no_batch = no_batch
        self._make_plain = plain
        self._plain: Callable | None = None
        self._expandable = True

    def on_batch(self, data: Any, known_size: bool = True) -> Any:
        """Runs one step on a global batch."""
        data = self._dense(data)
        if self._expandable:
            try:
                return self.one(data, known_size)
            except CannotExpand as reason:
                self._falls_back(reason)
        if self._plain is None:
            step = self._make_plain()
            self._plain = tf.function(
                lambda data, known: step(data, known), autograph=False, reduce_retracing=True
            )
        return self._plain(data, known_size)

    def _falls_back(self, reason: CannotExpand) -> None:
        """Goes on with gathered weights, and says why."""
        self._expandable = False
        self.inspected(
            f"DTensor cannot run {reason}. The model runs on gathered weights instead: "
            "results are the same, weights stay cut at rest, but compute is not split "
            "over the inner axes."
        )

    def on_taken(self, taken: Taken, known_size: bool = True) -> Any:
        """Runs one step on a batch that processes read; where it is, if a graph is for that."""
        if self._expandable and not self.ahead:
            try:
                graph = self.in_place.graph(taken, known_size)
                if graph is not None:
                    return graph()
            except CannotExpand as reason:
                self._falls_back(reason)
        return self.on_batch(taken.whole(), known_size)

    def _dense(self, data: Any) -> Any:
        """A batch as tensors, padded where the model alone would do it."""
        return as_tensors(self.steps.program.padded(data))

    def __call__(self, iterator: Any) -> Any:
        """Runs `steps_per_execution` steps; the contract of Keras's train function."""
        known = True
        if isinstance(iterator, tf.data.Iterator | WorkerIterator):
            first = leading(iterator.element_spec)
            known = first.shape.rank is not None and first.shape[0] is not None
        if isinstance(iterator, WorkerIterator) and not self.ahead:
            return self._where_read(iterator, known)
        batches = self._next(iterator)
        if not batches:
            if single_steps(self.model, iterator):
                self.no_batch()
            raise StopIteration
        return self._steps(batches, known)

    def _where_read(self, iterator: WorkerIterator, known: bool) -> Any:
        """The same on batches that processes read; one call each."""
        logs, wanted = None, self.model.steps_per_execution
        self.steps.parallel.tell_barriers("each process reads its rows over inner axes")
        for _ in range(wanted):
            taken = iterator.take()
            if taken is None:
                break
            logs = self.on_taken(taken, known)
        if logs is None:
            if wanted == 1:
                self.no_batch()
            raise StopIteration
        return logs

    def _next(self, iterator: Any) -> list[Any]:
        """The batches of one execution; fewer at the end of the data."""
        batches: list[Any] = []
        try:
            for _ in range(self.model.steps_per_execution):
                batches.append(self._dense(without_optionals(next(iterator))))
        except (StopIteration, tf.errors.OutOfRangeError):
            pass
        return batches

    def _steps(self, batches: list[Any], known: bool) -> Any:
        """One step on each batch: batches of one shape in one call, however many there are."""
        logs, wanted = None, self.model.steps_per_execution
        shapes = [signature(batch) for batch in batches]
        alike = next((i for i, one in enumerate(shapes) if one != shapes[0]), len(batches))
        if alike > 1 and self._expandable:
            # Always of one length, so that the end of the data is no trace of its own.
            given = batches[:alike] + batches[:1] * (wanted - alike)
            try:
                logs = self.several((given, tf.constant(alike)), known)
                batches = batches[alike:]
            except CannotExpand:
                pass  # the first step alone says so
        for batch in batches:
            logs = self.on_batch(batch, known)
        return logs

    def _in_one_graph(self, data: tuple[list[Any], Any], known: bool) -> Any:
        """Steps on the first `count` of some batches, in a loop.

        Raises:
            CannotExpand: They have sparse tensors, which cannot be stacked.
        """
        batches, count = data
        if any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(batches)):
            if self.ahead:
                raise ValueError(
                    "Batches of which rows are looked up a step ahead are stacked, and sparse ones "
                    "cannot be. Make them dense, or leave prefetch=True out. Received: sparse "
                    f"inputs, with prefetch=True for {self.ahead}"
                )
            raise CannotExpand("sparse inputs")
        stacked = keras.tree.map_structure(
            lambda *parts: None if parts[0] is None else tf.stack(parts), *batches
        )

        def batch(i: Any) -> Any:
            return keras.tree.map_structure(lambda t: None if t is None else t[i], stacked)

        together = self.steps.parallel.steps_together
        if not self.ahead:
            return in_loop(lambda i: (self._step(batch(i), known), ()), (), count, together)
        first = self.steps.look_ahead(batch(0), tf.constant(True), known)

        def looking_ahead(i: Any, *tensors: Any) -> tuple[Any, tuple]:
            rows, following = with_tensors(first, tensors), batch(tf.minimum(i + 1, count - 1))
            logs, after = self.steps.train_ahead(batch(i), rows, following, i + 1 < count, known)
            return logs, tuple(tensors_of(after))

        return in_loop(looking_ahead, tuple(tensors_of(first)), count, together)

    def predict(self, batches: list[Any]) -> Any:
        """The contract of Keras's predict function."""
        if any(isinstance(batch, Taken) for batch in batches):
            return one_after_the_other([self.on_taken(batch) for batch in batches])
        batches = [self._dense(without_optionals(batch)) for batch in batches]
        shapes = {signature(batch) for batch in batches}
        if len(batches) == self.model.steps_per_execution > 1 == len(shapes) and self._expandable:
            with contextlib.suppress(CannotExpand):  # the first batch alone says so
                return self.several(batches)
        return one_after_the_other([self.on_batch(batch) for batch in batches])

    def _predicted(self, batches: list[Any], known: bool = True) -> Any:
        """What is predicted on some batches, in one graph."""
        one = tf.function(self._step, autograph=False)
        return one_after_the_other([one(batch, known) for batch in batches])
