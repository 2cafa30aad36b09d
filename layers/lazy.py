"""Keras's optimizers on the rows of a table that a batch looks up, and on no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist._compat import keras_averages, keras_optimizers

import keras
import tensorflow as tf
from keras import ops


class SummedRows(tf.IndexedSlices):
    """A gradient in which each row is known to stand once."""


def rows_summed(gradient: Any) -> Any:
    """A gradient in which each row stands once; as it is if it is not made of rows."""
    if not isinstance(gradient, tf.IndexedSlices) or isinstance(gradient, SummedRows):
        return gradient
    indices, where = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, where, tf.size(indices))
    return SummedRows(values, indices, gradient.dense_shape)


def values_of(gradient: Any) -> Any:
    """A gradient, or its rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Any, values: Any) -> Any:
    """A gradient, with other values of its rows if it is made of rows."""
    if not isinstance(gradient, tf.IndexedSlices):
        return values
    return type(gradient)(values, gradient.indices, gradient.dense_shape)


class Lazy(keras.optimizers.Optimizer):
    """What makes an optimizer of Keras lazy; a base class before the optimizer's own.

    Where a gradient is rows of a table, those of one row are summed, and the optimizer's own
    arithmetic runs on the different rows: of the table, and of the optimizer's state. Others stay
    as they are: no average falls, no momentum moves them, weights decay in rows that are looked up
    alone. Steps are counted for all rows together. So Adam is PyTorch's `SparseAdam`, and what an
    update costs does not depend on the table's size. Any other gradient updates as in Keras.

    With `gradient_accumulation_steps`, what a step updates are the rows that any of its batches
    looked up, by the mean of the batches' sums: one step of the lazy optimizer on them.

    With `use_ema`, averages are Keras's, of all rows: each step reads and writes them whole, since
    files and `keras.callbacks.SwapEMAWeights` read them after any step.

    `update_step` of the optimizer has to find state by `_get_variable_index`, to write it by
    `assign`, `assign_add` and `assign_sub`, and to treat each element alone.

    Attributes:
        accumulates_rows: Whether rows have been accumulated.
    """

    accumulates_rows = False

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable: rows of it if the gradient is rows, each once, else all of it."""
        decays = keras_optimizers.decays_given(self, variable)
        if not isinstance(gradient, tf.IndexedSlices):
            if decays:
                self.assign_sub(variable, self._decay(variable, learning_rate))
            super().update_step(gradient, variable, learning_rate)
            return
        rows = _OnRows(self, variable, gradient.indices)
        if decays:
            rows.assign_sub(rows.variable, self._decay(rows.variable.value, learning_rate))
        on_rows: Any = super().update_step
        on_rows.__func__(rows, gradient.values, rows.variable, learning_rate)
        rows.write()

    def _backend_apply_gradients(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """As Keras's, but that rows accumulate row by row."""
        steps = self.gradient_accumulation_steps
        if not steps or not any(isinstance(one, tf.IndexedSlices) for one in grads):
            super()._backend_apply_gradients(grads, variables)
            return
        self.accumulates_rows = True
        sums = [keras_optimizers.accumulator(self, v) for v in variables]
        for gradient, total in zip(grads, sums, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                self._accumulate_rows(total, rows_summed(gradient))
        ops.cond(
            (keras_optimizers.iterations_variable(self) + 1) % steps == 0,
            lambda: self._update_accumulated(grads, variables, sums),
            lambda: self._accumulate_dense(grads, sums),
        )
        keras_averages.average_weights(self)

    def _accumulate_rows(self, total: Any, gradient: Any) -> None:
        """Adds rows to their sums, and marks these as looked up."""
        values = self.read_rows(total, gradient.indices) + gradient.values
        first = values[:, :1]
        # Where nothing was looked up there is +0.
        first = tf.where(first == 0, tf.constant(-0.0, first.dtype), first)
        values = tf.concat([first, values[:, 1:]], 1)
        self.assign(total, tf.IndexedSlices(values, gradient.indices))

    def _accumulate_dense(self, grads: Sequence[Any], sums: Sequence[Any]) -> None:
        pairs = [pair for pair in zip(grads, sums) if not isinstance(pair[0], tf.IndexedSlices)]
        if pairs:
            keras_optimizers.accumulate(self, *zip(*pairs))

    def _update_accumulated(
        self, grads: Sequence[Any], variables: Sequence[Any], sums: Sequence[Any]
    ) -> None:
        """Updates by what has accumulated, and begins anew."""
        steps, means = self.gradient_accumulation_steps, []
        for gradient, total in zip(grads, sums, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                rows = _looked_up(total)
                shape = gradient.dense_shape
                means.append(SummedRows(self.read_rows(total, rows) / steps, rows, shape))
            else:
                means.append((gradient + total) / steps)
        keras_optimizers.update(self, self._clip_gradients(means), variables)
        for mean, total in zip(means, sums, strict=True):
            zeros = with_values(mean, tf.zeros_like(values_of(mean)))
            self.assign(total, zeros)

    def _decay(self, value: Any, learning_rate: Any) -> Any:
        factors = [tf.cast(one, value.dtype) for one in (self.weight_decay, learning_rate)]
        return value * factors[0] * factors[1]

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        """Nothing: `update_step` knows which rows are looked up."""

    def _clip_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Sums rows, and clips the sums: norms are those of the gradients of whole tables."""
        given = [rows_summed(one) for one in grads]
        clipped = super()._clip_gradients([values_of(one) for one in given])
        return [with_values(*both) for both in zip(given, clipped, strict=True)]

    def read_rows(self, variable: Any, indices: Any) -> Any:
        """Some rows of a variable, or of state of its shape."""
        keras_variable = isinstance(variable, keras.Variable)
        return tf.gather(variable.value if keras_variable else variable, indices)


def _looked_up(total: Any) -> Any:
    """The numbers of the rows that were added to a sum since it was reset, (n,)."""
    value = total.value if isinstance(total, keras.Variable) else total
    places = tf.range(total.shape[0])[:, tf.newaxis] * [1, 0]
    # Not read whole: variables whose rows are written are copied then.
    first = tf.gather_nd(value, places)
    bits = tf.bitcast(first, {2: tf.int16, 4: tf.int32, 8: tf.int64}[first.dtype.size])
    return tf.where(bits != 0)[:, 0]


class _Rows:
    """Some rows of a variable, as an optimizer reads and writes a variable.

    Attributes:
        whole: The variable.
        value: The rows, (n, ...).
        changed: Whether they were written.
    """

    def __init__(self, whole: Any, value: Any) -> None:
        self.whole, self.value, self.changed = whole, value, False

    @property
    def dtype(self) -> Any:
        """Of the rows."""
        return self.value.dtype

    @property
    def shape(self) -> Any:
        """Of the rows."""
        return self.value.shape

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return tf.convert_to_tensor(self.value, dtype, name=name)


class _OnRows:
    """An optimizer as its `update_step` sees it, with rows in the place of a variable.

    Args:
        optimizer: Built.
        variable: What is updated.
        indices: Of the rows, each once.
    """

    def __init__(self, optimizer: Lazy, variable: Any, indices: Any) -> None:
        self._optimizer, self._indices = optimizer, indices
        self.variable = _Rows(variable, optimizer.read_rows(variable, indices))
        self._parts = [self.variable]
        number = keras_optimizers.index_of(optimizer, variable)
        for name, slots in keras_optimizers.families(optimizer).items():
            if name == keras_optimizers.ACCUMULATORS:
                continue
            part = _Rows(slots[number], optimizer.read_rows(slots[number], indices))
            setattr(self, name, [part])
            self._parts.append(part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def _get_variable_index(self, variable: Any) -> int:
        return 0

    def assign(self, part: _Rows, value: Any) -> None:
        part.value, part.changed = tf.cast(value, part.dtype), True

    def assign_add(self, part: _Rows, value: Any) -> None:
        self.assign(part, part.value + tf.cast(value, part.dtype))

    def assign_sub(self, part: _Rows, value: Any) -> None:
        self.assign(part, part.value - tf.cast(value, part.dtype))

    def write(self) -> None:
        """Writes the rows that were assigned to where they are."""
        for part in self._parts:
            if part.changed:
                rows = tf.IndexedSlices(part.value, self._indices)
                self._optimizer.assign(part.whole, rows)


@keras.saving.register_keras_serializable("kdist")
class LazySGD(Lazy, keras.optimizers.SGD):
    """See `Lazy`."""


@keras.saving.register_keras_serializable("kdist")
class LazyAdagrad(Lazy, keras.optimizers.Adagrad):
    """See `Lazy`."""


@keras.saving.register_keras_serializable("kdist")
class LazyFtrl(Lazy, keras.optimizers.Ftrl):
    """See `Lazy`."""


@keras.saving.register_keras_serializable("kdist")
class LazyAdam(Lazy, keras.optimizers.Adam):
    """See `Lazy`."""


@keras.saving.register_keras_serializable("kdist")
class LazyAdamW(Lazy, keras.optimizers.AdamW):
    """See `Lazy`."""


LAZY = {
    keras.optimizers.SGD: LazySGD,
    keras.optimizers.Adagrad: LazyAdagrad,
    keras.optimizers.Ftrl: LazyFtrl,
    keras.optimizers.Adam: LazyAdam,
    keras.optimizers.AdamW: LazyAdamW,
}
"""Optimizer of Keras -> the same on rows."""


def lazy(optimizer: Any) -> Any:
    """An optimizer that updates, of a table, the rows that a batch looks up, and no others.

    A `TableConfig` with an `optimizer` uses it. Of any other embedding it is said by
    `keras.optimizers.MultiOptimizer`, or for all weights by `model.compile`: gradients that are not
    rows update as in Keras. It trains the same with and without `kdist.parallelize`.

    Args:
        optimizer: `keras.optimizers.SGD`, `Adagrad`, `Ftrl`, `Adam` or `AdamW`, not built, or its
            name. It is copied.

    Returns:
        A Keras optimizer of a class that `.keras` files can hold.

    Raises:
        ValueError: For another optimizer.

    Example:
        >>> users = kdist.layers.HostEmbedding(100_000, 64, name="users")
        >>> rules = keras.optimizers.OptimizerMap(keras.optimizers.Adam())
        >>> rules[".*users/embeddings"] = kdist.lazy("adagrad")
        >>> optimizer = keras.optimizers.MultiOptimizer(rules)
    """
    given = keras.optimizers.get(optimizer)
    if isinstance(given, Lazy):
        return again(given)
    if (own := LAZY.get(type(given))) is None:
        raise ValueError(
            f"Lazy are {', '.join(one.__name__ for one in LAZY)} of keras.optimizers. Use one of "
            "these, or in a TableConfig dense=True, which updates all rows as Keras does. "
            f"Received: {type(given).__name__}"
        )
    return again(given, own)


def again(optimizer: Any, own: Any = None) -> Any:
    """An optimizer of the same settings, not built; of another class if one is given."""
    copy = (own or type(optimizer)).from_config(optimizer.get_config())
    keras_optimizers.carry_decay_rules(copy, optimizer)
    return copy
