"""Keras internals of building: what a model's losses and metrics are made from."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

from kdist._compat import keras_models

import keras
import tensorflow as tf
from keras.src import backend as keras_backend


def build_from_specs(model: keras.Model, specs: Any) -> None:
    """Builds layers, metrics and losses from the specs of one batch, and not the optimizer.

    Keras traces the model to learn what its outputs look like. A built Functional says so itself.
    """
    optimizer, built = model.optimizer, getattr(model.optimizer, "built", True)
    if not built:
        optimizer.built = True
    try:
        outputs = declared_outputs(model, keras.utils.unpack_x_y_sample_weight(specs)[0])
        if outputs is not None:
            # What fails on them is left to Keras, which says why.
            with contextlib.suppress(Exception), keras_models.calls_kept([model]):
                keras_models.give_call(model, functools.partial(_stand_ins, model, outputs))
                model._symbolic_build(data_batch=specs)
                return
        model._symbolic_build(data_batch=specs)
    finally:
        if not built:
            optimizer.built = False


def declared_outputs(model: keras.Model, x: Any) -> list[keras.KerasTensor] | None:
    """Specs of the flat outputs of a built Functional or Sequential, for specs of its inputs.

    None for other models, and where sizes beside that of the batch depend on the inputs.
    """
    functional = keras_models.functional_of(model)
    if functional is None or not all(one.built for one in keras_models.flat_layers(model)):
        return None
    given, taken = keras.tree.flatten(x), functional.inputs
    if len(given) != len(taken) or any(None in out.shape[1:] for out in functional.outputs):
        return None
    if not all(map(_takes, taken, given)):
        return None
    rows = {one.shape[0] for one in given}
    batch = rows.pop() if len(rows) == 1 else None
    return [
        keras.KerasTensor(
            (batch if out.shape[0] is None else out.shape[0], *out.shape[1:]), out.dtype
        )
        for out in functional.outputs
    ]


def _takes(declared: keras.KerasTensor, given: Any) -> bool:
    """Whether an input is dense, and of the shape that a Functional was made for."""
    if given is None or getattr(given, "sparse", False) or getattr(given, "ragged", False):
        return False
    if getattr(given.shape, "rank", 0) is None or len(given.shape) != len(declared.shape):
        return False
    return len(given.shape) > 0 and all(
        want in (None, have) for want, have in zip(declared.shape, given.shape)
    )


def _stand_ins(model: keras.Model, outputs: Sequence[keras.KerasTensor], *_: Any, **__: Any) -> Any:
    """What a Functional returns in a trace whose values nobody reads."""
    flat = [tf.compat.v1.placeholder(one.dtype, one.shape) for one in outputs]
    return keras_models.model_outputs(keras_models.functional_of(model), flat)


def build_from_loss(model: keras.Model, specs: Any) -> None:
    """Builds the layers that only `compute_loss` calls, from the specs of one batch."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(specs)
    y_pred = keras_backend.compute_output_spec(model, x, training=False)
    keras_backend.compute_output_spec(
        model._compute_loss, x, y, y_pred, sample_weight=sample_weight, training=False
    )
