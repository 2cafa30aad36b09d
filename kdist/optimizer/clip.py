"""Clipping by the norm of all gradients, which lie on several devices."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from kdist._compat import keras_optimizers
from kdist.layers.lazy import Lazy, values_of, with_values
from kdist.optimizer.local import LocalOptimizer
from kdist.optimizer.update_jobs import Jobs

import keras
import numpy as np
import tensorflow as tf
from keras import ops


def clip_globally(
    jobs: Jobs,
    leaf: Any,
    local: Sequence[LocalOptimizer],
    gradients: Mapping[int, Any],
    some: Mapping[int, np.ndarray],
) -> None:
    """Gives each local optimizer the norm of the whole gradient to clip by.

    Args:
        jobs: What is updated where.
        leaf: The optimizer that the user compiled; nothing is done unless it clips so.
        local: Its local optimizers.
        gradients: By job, what its variable is updated with.
        some: By job, which elements have a gradient, where not all have.
    """
    if not (leaf.global_clipnorm and leaf.global_clipnorm > 0):
        return
    squares = []
    for one in local:
        with tf.device(one.device):
            for n, variable in zip(one.positions, one.variables):
                if variable.overwrite_with_gradient:
                    continue
                if n in gradients and jobs.is_first(n):
                    gradient = _update_gradient(leaf, one, variable, gradients[n])
                    if n in some:
                        gradient = ops.where(some[n], gradient, ops.zeros_like(gradient))
                    squares.append(ops.sum(ops.square(_shown(leaf, gradient))))
    norm = ops.sqrt(ops.sum(ops.stack(squares)))
    clip = leaf.global_clipnorm
    factor = clip * ops.minimum(1.0 / norm, 1.0 / clip) + (norm - norm)
    for one in local:
        keras_optimizers.clip_by(one.optimizer, functools.partial(_times, leaf, factor))


def _times(leaf: Any, factor: Any, gradients: Sequence[Any]) -> list[Any]:
    """Multiplied as Keras does: rows of a table become the whole table's gradient, unless lazy."""
    if isinstance(leaf, Lazy):
        values = [values_of(g) for g in gradients]
        return [with_values(g, v * ops.cast(factor, v.dtype)) for g, v in zip(gradients, values)]
    return [g if g is None else g * ops.cast(factor, g.dtype) for g in gradients]


def _shown(leaf: Any, gradient: Any) -> Any:
    """What has a gradient's norm: of rows that stand once each, these."""
    return values_of(gradient) if isinstance(leaf, Lazy) else gradient


def _update_gradient(
    leaf: Any, one: LocalOptimizer, variable: keras.Variable, gradient: Any
) -> Any:
    """The gradient that the optimizer clips: unscaled, with what was accumulated."""
    if leaf.loss_scale_factor is not None:
        gradient = ops.divide(gradient, leaf.loss_scale_factor)
    accumulated = keras_optimizers.accumulator(one.optimizer, variable)
    if accumulated is None:
        return gradient
    return ops.divide(ops.add(gradient, accumulated), leaf.gradient_accumulation_steps)
