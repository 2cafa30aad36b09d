"""What a model makes of a batch before its steps get it, as tasks of KerasHub do of texts."""

from __future__ import annotations

from typing import Any

import keras


def prepared(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """A batch in the form that a model's steps get, as its `fit` and `train_on_batch` give it.

    Args:
        model: One with `preprocess_samples`, as KerasHub's tasks have it, or any other.
        x: Inputs.
        y: Targets.
        sample_weight: Weights of examples.

    Returns:
        The three; as they are for a model without that method.
    """
    prepare = getattr(model, "preprocess_samples", None)
    if prepare is None:
        return x, y, sample_weight
    return keras.utils.unpack_x_y_sample_weight(prepare(x, y, sample_weight))
