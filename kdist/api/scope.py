"""`scope`: models whose weights are made where they belong, and are never whole."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from kdist._compat import keras_births, keras_models, keras_optimizers, keras_saving
from kdist.api.attached import attached, parallel_of
from kdist.api.parallelize import parallelize
from kdist.config.parallel import ParallelConfig
from kdist.display.warn import warn
from kdist.storage import recipes
from kdist.storage.unborn import unborn_variables

import keras
import tensorflow as tf


@contextlib.contextmanager
def scope(config: ParallelConfig) -> Iterator[None]:
    """Makes the models that are built in this block parallel, their weights born as parts.

    A variable gets its values when its parts are first used, and then part by part: the very values
    that a plain build draws from the same seed. So compile the model before anything reads its
    weights, and they are made where the optimizer's level wants them. No device ever has more of a
    weight than it keeps, with Keras's own initializers that draw once, are constant, or `Identity`.
    `Orthogonal` makes a whole variable, of which the parts are kept; so does an initializer of your
    own, at once (it is named if its variable is large).

    Weights of `.h5` and `.keras` files that are loaded in the block, as KerasHub's `from_preset`
    does, are read in the same way: part by part, once the parts are used. Arrays that are assigned
    in the block wait in host memory.

    Args:
        config: What `kdist.parallelize` would get.

    Raises:
        ValueError: For another argument, in a `tf.distribute` strategy's scope, or in another
            `scope`; and, at the end of the block, what `kdist.parallelize` raises.

    Example:
        >>> with kdist.scope(kdist.ParallelConfig(mesh=kdist.mesh(data=4))):
        ...     model = build_model()
        >>> model.compile("adam", "mse")
    """
    if not isinstance(config, ParallelConfig):
        raise ValueError(
            f"`scope` takes a kdist.ParallelConfig(mesh=..., ...). Received: config={config!r}"
        )
    if tf.distribute.has_strategy() or keras_births.is_replaced():
        raise ValueError(
            "A kdist.scope stands alone. Leave the scope around it out. Received: a kdist.scope "
            "within another, or within a tf.distribute strategy's scope"
        )
    with (
        keras_births.noted_models() as models,
        unborn_variables(_made_whole),
        keras_saving.mapped_files(),
        keras_optimizers.built_without_values(),
    ):
        yield
    inside = {
        id(one) for model in models for one in keras_models.flat_layers(model) if one is not model
    }
    for model in models:
        if id(model) not in inside and parallel_of(model) is None:
            parallelize(model, config)
            attached(model).births = _made_whole


def _made_whole(variable: keras.Variable, why: str) -> None:
    """Says of a large variable that it is made whole before it is cut."""
    size = math.prod(variable.shape) * tf.as_dtype(keras_births.raw_dtype(variable)).size
    if size > recipes.CHUNK:
        warn(
            f"{variable.path} is made whole, {size >> 20} MiB, before it is cut: {why}. Use one of "
            "keras.initializers for a large weight, and call the model in the scope on "
            "keras.Input(...) alone."
        )
