"""Models that are made for batches of one size, which replicas and micro-batches do not have."""

from __future__ import annotations

from kdist._compat import keras_models

import keras


def refuse_row_state(model: keras.Model) -> None:
    """Refuses layers that keep rows of a batch for the next one.

    Raises:
        ValueError: There is one.
    """
    for layer in keras_models.flat_layers(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                "A stateful RNN keeps a state for each row of a batch, outside of the model's "
                "weights: kdist neither cuts it with the batch nor writes it. Use stateful=False "
                "and pass the state on in the data (initial_state=), or train on one device. "
                f"Received: layer {layer.name!r} with stateful=True in model {model.name!r}"
            )


def refuse_fixed_batch(model: keras.Model, replicas: int, micro_batches: int) -> None:
    """Refuses a batch size that a cut batch contradicts.

    A `Sequential` has the size of the first batch that it saw, whether the user gave one or not:
    there it is no promise, and none is refused.

    Args:
        model: A built model.
        replicas: Parts that a batch is cut into.
        micro_batches: Parts that each of these is cut into.

    Raises:
        ValueError: A Functional model has inputs of a fixed batch size and would be given another.
    """
    if isinstance(model, keras.Sequential) or replicas * micro_batches == 1:
        return
    functional = keras_models.functional_of(model)
    for tensor in functional.inputs if functional is not None else ():
        if tensor.shape[0] is not None:
            micro = f" of {micro_batches} micro-batches each" if micro_batches > 1 else ""
            raise ValueError(
                f"An input of the model has a batch size of {tensor.shape[0]} rows, and the layers "
                f"may rely on it; {replicas} replicas{micro} compute smaller batches. Leave the "
                "size open: keras.Input(shape) without batch_shape and batch_size. "
                f"Received: input {tensor.name!r} of shape {tensor.shape} in model {model.name!r}"
            )
