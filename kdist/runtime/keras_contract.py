"""Keras's contract around the steps: what its trainer passes in, and what it expects back."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from kdist._compat import keras_applied, keras_models, keras_optimizers, keras_trainer
from kdist.runtime.taken import Taken, alive, ending_together
from kdist.runtime.worker_data import WorkerDataset, WorkerIterator

import keras
import tensorflow as tf


def is_built(model: keras.Model) -> bool:
    """Whether all variables of a model exist; without a `call` it has those of its layers."""
    return bool(model.built or not keras_models.has_call(model)) and layers_built(model)


def layers_built(model: keras.Model) -> bool:
    """Whether all variables of a model's layers exist."""
    return not _unbuilt(model)


def _unbuilt(model: keras.Model) -> list[keras.Layer]:
    """Layers inside a model that are not built; those that others have replaced do not count.

    Nor do those that make its batches, as KerasHub's tasks have them: no step calls them; and the
    look-up in a `TextVectorization`, which runs unbuilt.
    """
    if all(layer.built for layer in keras_models.flat_layers(model) if layer is not model):
        return []
    before = getattr(model, "preprocessor", None) if hasattr(model, "preprocess_samples") else None
    apart = {id(model)}
    if isinstance(before, keras.Layer):
        apart |= set(map(id, [before, *keras_models.flat_layers(before)]))
    for layer in keras_models.flat_layers(model):
        if isinstance(layer, keras.layers.TextVectorization):
            apart |= set(map(id, keras_models.layers_inside(layer)))
    held = keras_models.held_layers(model)
    return [one for one in held if not one.built and id(one) not in apart]


def build_by_step(model: keras.Model, step: Callable, *data: Any) -> None:
    """Builds the layers of a model as Keras does: by tracing a step of the user's own.

    Args:
        model: The model.
        step: The step.
        *data: What it takes, or specs of that.

    Raises:
        ValueError: The step does not build them all.
    """
    specs = keras.tree.map_structure(_traced_with, data)
    with keras_applied.applied_by(lambda *apply: None):
        tf.function(step, autograph=False).get_concrete_function(*specs)
    if left := [one.path or one.name for one in _unbuilt(model)]:
        raise ValueError(
            "A model is built before it trains: kdist places its weights first. Layers that its "
            "step does not call are built by a call (layer(x[:1])) or by layer.build(shape). "
            f"Received: {type(model).__name__} with unbuilt layers {left}"
        )


def _traced_with(leaf: Any) -> Any:
    """What a function is traced with in the place of a tensor; None for absent data."""
    if has_composites(leaf):
        return leaf if isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(leaf)
    spec = as_spec(leaf)
    return None if spec is None else tf.TensorSpec(spec.shape, spec.dtype)


def has_composites(example: Any) -> bool:
    """Whether tensors of a batch, or the specs of one, are sparse or ragged."""
    kinds = tf.SparseTensor | tf.SparseTensorSpec | tf.RaggedTensor | tf.RaggedTensorSpec
    return any(isinstance(one, kinds) for one in tf.nest.flatten(example))


def adapt_callbacks(callbacks: Any) -> None:
    """Makes callbacks that would write to TensorFlow's variables write to Keras's.

    `SwapEMAWeights` does the former on this backend, and would reach one copy of each weight.
    """
    members = getattr(callbacks, "callbacks", callbacks)
    for callback in members if isinstance(members, list | tuple) else [members]:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            keras_optimizers.swap_keras_variables(callback)


def step_function(
    kind: str,
    step: Callable,
    model: keras.Model,
    no_batch: Callable[[], None],
    several: Callable | None = None,
    tell_barriers: Callable[[str], None] = lambda where: None,
) -> Callable:
    """Keras's train, test or predict function over a step on plain devices.

    Args:
        kind: "train", "test" or "predict".
        step: Computes one batch.
        model: The model.
        no_batch: Called when data to train on has run out.
        several: Takes several steps on batches of an iterator; by default Keras's own.
        tell_barriers: Called where steps of one execution are calls of their own.
    """
    if kind == "predict":
        return _predict_function(step, model)
    function = several or keras_trainer.function_of(model, step)
    if kind == "train":
        function = _train_function(step, function, model, no_batch)
    return _or_by_workers(step, function, model, no_batch, tell_barriers)


def _predict_function(step: Callable, model: keras.Model) -> Callable:
    """Keras's predict function over a step on plain devices."""
    if model.run_eagerly:
        return lambda batches: one_after_the_other([step(batch) for batch in batches])
    one = tf.function(step, autograph=False, reduce_retracing=True)
    where_read = _WhereRead(step)

    @functools.partial(tf.function, autograph=False, reduce_retracing=True)
    def several(batches: list[Any]) -> Any:
        return one_after_the_other([one(batch) for batch in batches])

    def predict(batches: list[Any]) -> Any:
        if any(isinstance(batch, Taken) for batch in batches):
            if len(batches) == model.steps_per_execution > 1:
                return where_read.several(batches)
            return one_after_the_other([where_read(batch) for batch in batches])
        # The last ones may be fewer: a step on each is no trace of its own.
        if len(batches) == model.steps_per_execution > 1:
            return several(batches)
        return one_after_the_other([one(batch) for batch in batches])

    return predict


def one_after_the_other(outputs: list[Any]) -> Any:
    """The outputs of several batches as those of one."""
    if len(outputs) == 1:
        return outputs[0]
    return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)


class _WhereRead:
    """A step on batches whose rows are taken where they are read: graphs for each dataset."""

    def __init__(self, step: Callable) -> None:
        self._step = step
        self._made: weakref.WeakKeyDictionary[WorkerDataset, _OfDataset] = (
            weakref.WeakKeyDictionary()
        )

    def _of(self, dataset: WorkerDataset) -> _OfDataset:
        if dataset not in self._made:
            self._made[dataset] = _OfDataset(self._step, dataset)
        return self._made[dataset]

    def __call__(self, batch: Taken) -> Any:
        with ending_together():
            return self._of(batch.dataset).one(batch.first, batch.others)

    def several(self, batches: list[Taken]) -> Any:
        """What the step gives for batches of one iterator, in one call, one after the other."""
        of, others = self._of(batches[0].dataset), batches[0].others
        with ending_together():
            return of.several([batch.first for batch in batches], others)

    def up_to(self, count: int, first: Taken, iterator: WorkerIterator, together: int = 1) -> Any:
        """The logs of the last of some steps, in one call; fewer where the data ends.

        Args:
            count: How many steps there are at most.
            first: The first batch, which the iterator has given.
            iterator: Gives the others.
            together: See `in_loop`.
        """
        with ending_together():
            logs, done = self._of(first.dataset).up_to(
                tf.constant(count), first.first, iterator.first, first.others, together
            )
        iterator.has_given(int(done) - 1)
        return logs


class _OfDataset:
    """The graphs of a step on batches of a dataset.

    Attributes:
        one: Of a step.
        several: Of a step on each of some batches.
        up_to: Of steps in a loop.
    """

    def __init__(self, step: Callable, dataset: WorkerDataset) -> None:
        there = weakref.ref(dataset)
        self._step = lambda first, others: step(alive(there).taken(first.get_value(), others))
        self.one = tf.function(self._step, autograph=False, reduce_retracing=True)
        self.several = tf.function(self._several, autograph=False, reduce_retracing=True)
        self.up_to = tf.function(self._up_to, autograph=False)

    def _several(self, firsts: list[Any], others: Sequence[Any]) -> Any:
        return one_after_the_other([self.one(first, others) for first in firsts])

    def _up_to(
        self, count: Any, first: Any, iterator: Any, others: Sequence[Any], together: int
    ) -> Any:
        """See `_WhereRead.up_to`; returns how many steps there were too."""
        logs = self.one.get_concrete_function(first, others).structured_outputs
        zeros = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), logs)
        several = tf.function(self._each, autograph=False) if together > 1 else self._each

        def following(done: Any, last: Any, wanted: int = together) -> list[Any]:
            """Batches after `last`, none beyond `count`."""
            found = [last]
            for n in range(wanted):
                before = found[-1]
                there, get = done + n < count, iterator.get_next_as_optional
                found.append(tf.cond(there, get, lambda before=before: before))
            return found[1:]

        def goes_on(done: Any, _: Any, given: list[Any]) -> Any:
            there = [one.has_value() for one in given]
            return (done + together <= count) & tf.reduce_all(there)

        def turn(done: Any, _: Any, given: list[Any]) -> Any:
            logs, done = several(given, others), done + together
            return done, logs, following(done, given[-1])

        start = (tf.constant(0), zeros, [first, *following(1, first, together - 1)])
        done, logs, given = tf.while_loop(goes_on, turn, start, parallel_iterations=1)
        left = done
        for n, batch in enumerate(given[:-1]):
            there = (done + n < count) & batch.has_value()
            one = functools.partial(self.one, batch, others)
            logs = tf.cond(there, one, lambda logs=logs: logs)
            left += tf.cast(there, left.dtype)
        return logs, left

    def _each(self, firsts: Sequence[Any], others: Sequence[Any]) -> Any:
        """Steps on some batches; what the last one gives."""
        step = self.one if len(firsts) == 1 else self._step
        return [step(first, others) for first in firsts][-1]


def _train_function(
    step: Callable, function: Callable, model: keras.Model, no_batch: Callable[[], None]
) -> Callable:
    """`function`, Keras's own, but that nothing starts before there is a batch.

    Keras takes the batch inside of the step's graph. When none comes, parts of the update that need
    no gradient have run by then, on one device and not on another.
    """

    def on_batch(batch: tf.experimental.Optional) -> Any:
        return step(without_optionals(batch.get_value()))

    one = tf.function(on_batch, autograph=False, reduce_retracing=True)

    def train(iterator: Any) -> Any:
        if not single_steps(model, iterator):
            return function(iterator)
        batch = iterator.get_next_as_optional()
        if not batch.has_value():
            no_batch()
            raise StopIteration
        return one(batch)

    return train


def _or_by_workers(
    step: Callable,
    function: Callable,
    model: keras.Model,
    no_batch: Callable[[], None],
    tell_barriers: Callable[[str], None],
) -> Callable:
    """`function`, but for data that workers read: of that, a step takes the rows where they are."""
    where_read = _WhereRead(step)

    def call(iterator: Any) -> Any:
        if not isinstance(iterator, WorkerIterator):
            return function(iterator)
        wanted = model.steps_per_execution
        taken = iterator.take()
        if taken is None:
            if wanted == 1:
                no_batch()
            raise StopIteration
        if wanted > 1 and iterator.in_graphs and not model.run_eagerly:
            together = min(model.unrolled_steps_per_execution, wanted)
            return where_read.up_to(wanted, taken, iterator, together)
        tell_barriers("each process reads files of its own")
        logs = where_read(taken)
        for _ in range(wanted - 1):
            taken = iterator.take()
            if taken is None:
                break
            logs = where_read(taken)
        return logs

    return call


def single_steps(model: keras.Model, iterator: Any) -> bool:
    """Whether Keras would run one step in one graph with the iterator that feeds it."""
    tensors = isinstance(iterator, tf.data.Iterator)
    return tensors and model.steps_per_execution == 1 and not model.run_eagerly


def without_optionals(data: Any) -> Any:
    """Absent data, which generators yield as empty optionals, as None."""
    return keras.tree.map_structure(
        lambda t: None if isinstance(t, tf.experimental.Optional) else t, data
    )


def as_spec(leaf: Any) -> Any:
    """A symbolic stand-in for a tensor, array or tensor spec; None for absent data."""
    absent = tf.experimental.Optional | tf.OptionalSpec | tf.NoneTensorSpec
    if leaf is None or isinstance(leaf, absent):
        return None
    if not hasattr(leaf, "shape"):
        leaf = tf.convert_to_tensor(leaf)
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return keras.KerasTensor(tuple(leaf.shape), dtype)


def example_of(batch: Any) -> Any:
    """A batch to predict on; its specs where it is not here."""
    return batch.dataset.rows.spec if isinstance(batch, Taken) else batch


def peek(iterator: Any) -> tuple[Any, Any]:
    """Looks at what an iterator yields without losing it.

    Returns:
        The iterator to use from now on, and a batch or its specs.
    """
    if isinstance(iterator, tf.data.Iterator | WorkerIterator):
        return iterator, iterator.element_spec
    iterator = iter(iterator)
    first = next(iterator)
    return itertools.chain([first], iterator), first
