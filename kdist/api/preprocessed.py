"""What a model makes of a batch before its steps get it, as tasks of KerasHub do of texts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kdist.runtime.keras_contract import as_spec

import keras
import tensorflow as tf


def preprocessed(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """A batch in the form that a model's steps get, as its `fit` and `train_on_batch` give it.

    Args:
        model: One with `preprocess_samples`, as KerasHub's tasks have it, or any other.
        x: Inputs.
        y: Targets.
        sample_weight: Weights of examples.

    Returns:
        The three; as they are for a model without that method.
    """
    own = getattr(model, "preprocess_samples", None)
    if own is None:
        return x, y, sample_weight
    return keras.utils.unpack_x_y_sample_weight(own(x, y, sample_weight))


def method_of(model: keras.Model, name: str) -> Callable:
    """A method that takes a batch as `preprocessed` gives it: Keras's own of such a model.

    Args:
        model: See `preprocessed`.
        name: "fit", "train_on_batch" or "predict_on_batch".
    """
    if hasattr(model, "preprocess_samples"):
        return functools.partial(getattr(keras.Model, name), model)
    return getattr(model, name)


def preprocessed_specs(model: keras.Model, specs: Any) -> Any:
    """The same of the specs of a batch.

    Args:
        model: See `preprocessed`.
        specs: (x,), (x, y) or (x, y, sample_weight), of Keras's symbolic tensors.

    Returns:
        Specs, in one of these forms.
    """
    own = getattr(model, "preprocess_samples", None)
    if own is None:
        return specs
    signature = keras.tree.map_structure(_signature, specs)
    batches = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=signature)
    found = batches.map(own).element_spec
    return keras.tree.map_structure(as_spec, found if isinstance(found, tuple) else (found,))


def _signature(spec: keras.KerasTensor) -> tf.TypeSpec:
    kind = tf.SparseTensorSpec if spec.sparse else tf.TensorSpec
    return kind(spec.shape, spec.dtype)
