"""Steps over DTensor slices: eager orchestration around two compiled parts.

The slices' programs run as DTensor calls; everything after them (reduction over `data`, update,
state, metrics) is one `tf.function` over the per-device tensors, the same code as for plain
devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.batch import SplitBatch, join, split
from kdist.contract import single_steps, without_optionals
from kdist.spmd_call import CannotExpand, signature
from kdist.spmd_runner import SpmdRunner
from kdist.step import Step
from kdist.training_pass import TrainingPass

import keras
import tensorflow as tf

MAX_SHAPES = 8
"""Shapes of a batch that get a DTensor program of their own; see `SpmdFunction`."""


class SpmdStep(Step):
    """The steps of one compiled model on DTensor slices; see `Step`."""

    runner: SpmdRunner

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._finish_train = tf.function(self._finish_training, autograph=False)
        self._finish_gradients = tf.function(self._whole_gradients, autograph=False)
        self._apply_whole = tf.function(super().apply_whole, autograph=False)
        self._finish_test = tf.function(self._finish_testing, autograph=False)
        self._keep_predicted = tf.function(self._keep_inferred, autograph=False)
        self.loop_shapes = Shapes()
        """Shapes of the batches of the user's own loop."""

    def train(self, data: Any, known_size: bool = True) -> dict[str, Any]:
        """One training step on a global batch."""
        batch = self.split(data)
        results = _reduced(self.runner.gradients(batch, self._scale()))
        return self._finish_train(as_nest(batch), full_parts(batch), known_size, results)

    def test(self, data: Any, known_size: bool = True) -> dict[str, Any]:
        """One evaluation step on a global batch."""
        batch = self.split(data)
        results = _reduced(self.runner.losses(batch))
        return self._finish_test(as_nest(batch), full_parts(batch), known_size, results)

    def predict(self, data: Any, known_size: bool = True) -> Any:
        """Outputs for a global batch, rows in order."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        batch = split(x, None, None, self.topology.data_size)
        results = self.runner.outputs(batch)
        if self.program.tested.updated:
            updated = [{"updated": r["updated"]} for r in results]
            self._keep_predicted(as_nest(batch), full_parts(batch), updated)
        return join([r["outputs"] for r in results], batch.counts)

    def gradients(self, data: Any) -> TrainingPass:
        """Loss and whole gradients of a global batch, for the user's own loop."""
        batch = self.split(data)
        scale = self._scale()
        results = self.runner.gradients(batch, scale)
        nest = as_nest(batch)
        loss, found = self._finish_gradients(nest, full_parts(batch), scale, _reduced(results))
        return TrainingPass(loss, found, batch, results)

    def apply_whole(self, gradients: Any) -> None:
        """Updates the parameters from whole gradients."""
        self._apply_whole(gradients)

    def split(self, data: Any) -> SplitBatch:
        """Cuts a batch of tensors or arrays over the slices."""
        tensors = keras.tree.map_structure(
            lambda t: None if t is None else tf.convert_to_tensor(t), data
        )
        return super().split(tensors)

    def _with_whole_state(self, results: Any, training: bool) -> list[dict[str, Any]]:
        whole = self.runner.updated_whole
        return [{**r, "updated": whole(r["updated"], training)} for r in results]

    def _finish_training(self, nest: Any, full: bool, known_size: bool, results: Any) -> Any:
        batch = from_nest(nest, full, known_size)
        results = self._with_whole_state(results, True)
        return self.finish_training(batch, results, self._total(results, "loss"))

    def _whole_gradients(self, nest: Any, full: bool, scale: Any, results: Any) -> Any:
        batch = from_nest(nest, full, False)
        results = self._with_whole_state(results, True)
        return self._total(results, "loss"), self.finish_gradients(batch, results, scale)

    def _finish_testing(self, nest: Any, full: bool, known_size: bool, results: Any) -> Any:
        batch = from_nest(nest, full, known_size)
        results = self._with_whole_state(results, False)
        return self.finish_testing(batch, results, self._total(results, "loss"))

    def _keep_inferred(self, nest: Any, full: bool, results: Any) -> None:
        batch = from_nest(nest, full, False)
        results = self._with_whole_state(results, False)
        self._combine(*self._changed(results, training=False), batch)


def _reduced(results: Any) -> Any:
    """What the slices gave, without what only a look at a single pass uses."""
    return [{key: v for key, v in r.items() if key != "loss_parts"} for r in results]


def as_nest(batch: SplitBatch) -> tuple:
    """A `SplitBatch` as a structure of tensors; the whole batch and labels only."""
    return batch.whole, [(y, w) for _, y, w in batch.parts], batch.counts, batch.size


def full_parts(batch: SplitBatch) -> bool:
    """True if no slice is without rows."""
    assert batch.static_size is not None
    return batch.static_size >= len(batch.parts)


def from_nest(nest: tuple, full: bool, known_size: bool) -> SplitBatch:
    """Back from `as_nest`, inside a trace.

    `known_size` says whether single-device Keras would know the batch's size while tracing.
    """
    whole, labels, counts, size = nest
    static = keras.tree.flatten(whole)[0].shape[0] if known_size else None
    parts = [(None, y, w) for y, w in labels]
    return SplitBatch(whole, parts, counts, size, static, full)


class Shapes:
    """The shapes of a batch that get a DTensor program of their own: the first `MAX_SHAPES`."""

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
    """What Keras calls as the train, test or predict function of a model on DTensor slices.

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
        self.step = step
        self.model = model
        self.inspected = inspected
        self.no_batch = no_batch
        self._make_plain = plain
        self._plain: Callable | None = None
        self._shapes = Shapes()
        self._expandable = True

    def on_batch(self, data: Any, known_size: bool = True) -> Any:
        """Runs one step on a global batch."""
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
            plain = self._make_plain()
            if not self.model.run_eagerly:
                plain = tf.function(plain, autograph=False, reduce_retracing=True)
            self._plain = plain
        return self._plain(data)

    def __call__(self, iterator: Any) -> Any:
        """Runs `steps_per_execution` steps; the contract of Keras's train function."""
        known = True
        if isinstance(iterator, tf.data.Iterator):
            first = keras.tree.flatten(iterator.element_spec)[0]
            known = first.shape.rank is not None and first.shape[0] is not None
        logs = None
        for _ in range(self.model.steps_per_execution):
            try:
                data = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    if single_steps(self.model, iterator):
                        self.no_batch()
                    raise StopIteration from None
                break
            logs = self.on_batch(without_optionals(data), known)
        return logs

    def predict(self, batches: list[Any]) -> Any:
        """The contract of Keras's predict function."""
        outputs = [self.on_batch(without_optionals(b)) for b in batches]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
