"""`ParallelConfig(verify="first_step")`: the first training batch is verified before any update."""

from __future__ import annotations

import itertools
from typing import Any

from kdist.api.parallelize import Parallel
from kdist.display.tables import print_prose
from kdist.runtime.mesh_step import without_optionals
from kdist.verification.report import VerificationError
from kdist.verification.verify import verify_prepared

import keras
import tensorflow as tf
from rich.console import Console


def verify_batch(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> None:
    """Verifies a batch, in the form that the model's steps get, and says so in one line.

    Raises:
        VerificationError: The mesh does not give what one device gives.
    """
    report = verify_prepared(model, (x, y, sample_weight))
    if not report.ok:
        raise VerificationError(report)
    print_prose(Console(soft_wrap=True), f"verify='first_step': {report.verdict}")


def verify_first(parallel: Parallel, source: Any) -> Any:
    """Verifies the first batch of what `fit` trains on; notes it in `parallel.verified`.

    Args:
        parallel: The model that trains.
        source: The iterator that Keras passes to the train function.

    Returns:
        What yields the batches of the train function's first call; those of later calls are still
        in `source`.

    Raises:
        VerificationError: The mesh does not give what one device gives.
    """
    taken = list(itertools.islice(source, parallel.model.steps_per_execution))
    if not taken:
        return iter(())
    parallel.verified = True  # before, since gradients of this very model may be taken
    try:
        data = keras.utils.unpack_x_y_sample_weight(without_optionals(taken[0]))
        verify_batch(parallel.model, *data)
    except BaseException:
        parallel.verified = False
        raise
    if not isinstance(source, tf.data.Iterator):
        return iter(taken)
    # Of the same kind and spec as the later ones, so that the step is traced once.
    again = tf.data.Dataset.from_generator(
        lambda: iter(taken), output_signature=source.element_spec
    )
    return iter(again)
