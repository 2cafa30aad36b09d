"""What kdist attaches to a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras

if TYPE_CHECKING:
    from kdist.api.parallelize import Parallel

ATTRIBUTE = "_kdist"


def parallel_of(model: keras.Model) -> Parallel | None:
    """What kdist attached to a model, or None."""
    return model.__dict__.get(ATTRIBUTE)


def attached(model: keras.Model) -> Parallel:
    """What kdist attached to a model.

    Raises:
        ValueError: The model was not parallelized.
    """
    parallel = parallel_of(model)
    if parallel is None:
        raise ValueError(
            "The model is a plain Keras model. Pass it through kdist.parallelize(model, config) "
            f"first. Received: model={model!r}"
        )
    return parallel
