"""Steps over slices that have inner axes: one graph per shape of a batch.

DTensor wants to know shapes, so a batch is taken from its iterator first, and the step is traced
for the shape that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist.batch import SplitBatch, split
from kdist.contract import single_steps, without_optionals
from kdist.pipeline.step import PipelineStep
from kdist.spmd_call import CannotExpand, signature
from kdist.step import Step
from kdist.training_pass import TrainingPass

import keras
import tensorflow as tf

SHOWN_RESULTS = ("terms", "loss_parts", "outputs")
MAX_SHAPES = 8
"""Shapes of a batch that get programs of their own; see `SpmdFunction`."""


class SpmdStep(Step):
    """The steps of one compiled model whose slices have inner axes; see `Step`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._gradients = tf.function(self._seen_gradients, autograph=False)
        self._apply_whole = tf.function(super().apply_whole, autograph=False)
        self.loop_shapes = Shapes()
        """Shapes of the batches of the user's own loop."""

    def cut(self, x: Any, y: Any, sample_weight: Any) -> SplitBatch:
        """Cuts a batch over the slices, into parts of known size.

        Raises:
            CannotExpand: It has sparse tensors, or dims of unknown size.
        """
        for leaf in tf.nest.flatten((x, y, sample_weight)):
            if isinstance(leaf, tf.SparseTensor):
                raise CannotExpand("sparse inputs")
            if leaf is not None and not leaf.shape.is_fully_defined():
                raise CannotExpand(f"batches of unknown size, here {leaf.shape}")
        return split(x, y, sample_weight, self.topology.data_size, static=True)

    def gradients(self, data: Any, compress: bool = True) -> TrainingPass:
        """See `Step.gradients`."""
        data = as_tensors(data)
        loss, found, results = self._gradients(data, compress)
        return TrainingPass(loss, found, self.split(data), results)

    def _seen_gradients(
        self, data: Any, compress: bool
    ) -> tuple[Any, list[Any], list[dict[str, Any]]]:
        """Loss, whole gradients, and what a `TrainingPass` shows of the slices' results."""
        found = super().gradients(data, compress)
        shown = [{k: v for k, v in r.items() if k in SHOWN_RESULTS} for r in found.results]
        return found.loss, found.gradients, shown

    def apply_whole(self, gradients: Sequence[Any]) -> None:
        """Updates the parameters from whole gradients."""
        self._apply_whole(gradients)


class SpmdPipelineStep(SpmdStep, PipelineStep):
    """The steps of a pipeline whose stages have inner axes."""


def as_tensors(data: Any) -> Any:
    """Arrays of a structure as tensors; None stays None."""

    def convert(leaf: Any) -> Any:
        keep = leaf is None or isinstance(leaf, tf.SparseTensor)
        return leaf if keep else tf.convert_to_tensor(leaf)

    return keras.tree.map_structure(convert, data)


class Shapes:
    """The shapes of a batch that get programs of their own: the first `MAX_SHAPES`."""

    def __init__(self) -> None:
        self._admitted: set[tuple] = set()

    def admit(self, data: Any) -> bool:
        """Whether a batch's shape is one of them; a new one is taken in while there is room."""
        shape = signature(data)
        if len(self._admitted) < MAX_SHAPES:
            self._admitted.add(shape)
        return shape in self._admitted


def too_many_shapes() -> str:
    """The reason that is given when a shape gets no program of its own."""
    return (
        f"{MAX_SHAPES} shapes of a batch have been compiled; further ones run on gathered weights, "
        f"with one compilation for all. Pad or bucket sequences to at most {MAX_SHAPES} lengths to "
        "split their compute."
    )


class SpmdFunction:
    """What Keras calls as the train, test or predict function of a model with inner axes.

    Falls back, once and with a warning that says why, to plain devices with gathered weights:
    for models with an operation that DTensor cannot run; and, so that the number of compilations
    is bounded, for every further shape once `MAX_SHAPES` shapes have been compiled.

    Args:
        step: One of `SpmdStep`'s steps.
        plain: Makes the same step on plain devices.
        model: The model.
        inspected: Told about the fallback: `inspected(reason)`.
        no_batch: Called when the data has run out.
    """

    def __init__(
        self,
        step: Callable,
        plain: Callable[[], Callable],
        model: keras.Model,
        inspected: Callable[[str], None],
        no_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self.step = tf.function(step, autograph=False)
        self._several = tf.function(self._in_one_graph, autograph=False)
        self.model = model
        self.inspected = inspected
        self.no_batch = no_batch
        self._make_plain = plain
        self._plain: Callable | None = None
        self._shapes = Shapes()
        self._expandable = True

    def on_batch(self, data: Any, known_size: bool = True) -> Any:
        """Runs one step on a global batch."""
        data = as_tensors(data)
        if self._expandable and self._shapes.admit(data):
            try:
                return self.step(data, known_size)
            except CannotExpand as reason:
                self._expandable = False
                self.inspected(
                    f"DTensor cannot run {reason}. The model runs on gathered weights instead: "
                    "results are the same, weights stay cut at rest, but compute is not split "
                    "over the inner axes."
                )
        elif self._plain is None:
            self.inspected(too_many_shapes())
        if self._plain is None:
            step = self._make_plain()
            self._plain = tf.function(
                lambda data: step(data), autograph=False, reduce_retracing=True
            )
        return self._plain(data)

    def __call__(self, iterator: Any) -> Any:
        """Runs `steps_per_execution` steps; the contract of Keras's train function."""
        known = True
        if isinstance(iterator, tf.data.Iterator):
            first = keras.tree.flatten(iterator.element_spec)[0]
            known = first.shape.rank is not None and first.shape[0] is not None
        batches = self._next(iterator)
        if not batches:
            if single_steps(self.model, iterator):
                self.no_batch()
            raise StopIteration
        return self._steps(batches, known)

    def _next(self, iterator: Any) -> list[Any]:
        """The batches of one execution; fewer at the end of the data."""
        batches: list[Any] = []
        try:
            for _ in range(self.model.steps_per_execution):
                batches.append(as_tensors(without_optionals(next(iterator))))
        except (StopIteration, tf.errors.OutOfRangeError):
            pass
        return batches

    def _steps(self, batches: list[Any], known: bool) -> Any:
        """One step on each batch: batches of one shape in one call, however many there are."""
        logs, wanted = None, self.model.steps_per_execution
        shapes = [signature(batch) for batch in batches]
        alike = next((i for i, one in enumerate(shapes) if one != shapes[0]), len(batches))
        if alike > 1 and self._expandable and self._shapes.admit(batches[0]):
            # Always of one length, so that the end of the data is no trace of its own.
            given = batches[:alike] + batches[:1] * (wanted - alike)
            try:
                logs = self._several(given, tf.constant(alike), known)
                batches = batches[alike:]
            except CannotExpand:
                pass  # the first step alone says so
        for batch in batches:
            logs = self.on_batch(batch, known)
        return logs

    def _in_one_graph(self, batches: list[Any], count: Any, known: bool) -> Any:
        """Steps on the first `count` batches, in a loop.

        Raises:
            CannotExpand: They have sparse tensors, which cannot be stacked.
        """
        if any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(batches)):
            raise CannotExpand("sparse inputs")
        stacked = keras.tree.map_structure(
            lambda *parts: None if parts[0] is None else tf.stack(parts), *batches
        )

        def step(i: Any) -> Any:
            data = keras.tree.map_structure(lambda t: None if t is None else t[i], stacked)
            return self.step(data, known)

        return tf.while_loop(
            lambda i, logs: i < count,
            lambda i, logs: (i + 1, step(i)),
            (tf.constant(1), step(0)),
            parallel_iterations=1,
        )[1]

    def predict(self, batches: list[Any]) -> Any:
        """The contract of Keras's predict function."""
        outputs = [self.on_batch(without_optionals(b)) for b in batches]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
