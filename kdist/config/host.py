"""What users say about tables that are kept in host memory: `kdist.place`."""

from __future__ import annotations

from typing import Literal

from kdist._compat import keras_models
from kdist.config.settings import Setting

import keras

Where = Literal["host", "device"]
WHERE = ("host", "device")

LOOKS_UP = (keras.layers.Embedding, keras.layers.ReversibleEmbedding)
"""Layers whose `call` looks rows of their table up, and does nothing else with it."""

host_setting: Setting[Where] = Setting("kdist.place")


def place(layer: keras.layers.Layer, where: Where = "host") -> keras.layers.Layer:
    """Keeps the table of an embedding in host memory.

    The table, its look-ups, the update of it and the optimizer's state are on the host. Devices get
    the rows that their part of a batch looks up, each once, and send gradients of rows back; none
    ever holds the table. Numbers are those of Keras on one device. The host is a CPU outside the
    mesh; see `Plan.host_tables`. It takes effect in `kdist.parallelize`. The idea is that of
    MindSpore's `primitive_target="CPU"` for `EmbeddingLookup`.

    Which rows are looked up has to follow from the model's inputs, not from weights or random
    numbers: rows are fetched before the model's program runs.

    Args:
        layer: A `keras.layers.Embedding`, or a `keras.layers.ReversibleEmbedding` with
            `tie_weights=False`, built or not.
        where: "host", or "device" to take that back.

    Returns:
        The layer.

    Raises:
        ValueError: The layer has no table, or uses it for more than look-ups, or `where` is not
            listed. What else cannot be on the host is refused by `kdist.parallelize`.

    Example:
        >>> table = kdist.place(keras.layers.Embedding(10_000_000, 64), "host")
    """
    if where not in WHERE:
        raise ValueError(f"A table is on the 'host' or the 'device'. Received: where={where!r}")
    if not isinstance(layer, keras.layers.Layer):
        raise ValueError(
            "kdist.place takes a keras layer with a table. "
            f"Received: {layer!r} of type {type(layer).__name__}"
        )
    if where == "host":
        _check_layer(layer)
    host_setting.set(layer, where)
    return layer


def _check_layer(layer: keras.layers.Layer) -> None:
    received = f"Received: layer {layer.name!r} of type {type(layer).__name__}"
    if not isinstance(layer, keras.layers.Embedding):
        inside = [one for one in keras_models.flat_layers(layer)[1:] if isinstance(one, LOOKS_UP)]
        fix = f"Place these one by one: {[one.path or one.name for one in inside]}"
        raise ValueError(
            "Only a table of which layers look rows up can be on the host: that of a "
            f"keras.layers.Embedding. {fix if inside else 'Leave this layer where it is'}. "
            f"{received}"
        )
    if getattr(layer, "tie_weights", False):
        raise ValueError(
            "A table on the host is used row by row. This one is used whole a second time: "
            "call(..., reverse=True) multiplies by it. Use tie_weights=False, or leave it on the "
            f"device. {received}"
        )
    if type(layer).call not in [known.call for known in LOOKS_UP]:
        raise ValueError(
            "What a table on the host gives is known of the `call` of Keras's Embedding alone; "
            "this class has its own. Put what it adds into a layer around an Embedding, and place "
            f"that. {received}"
        )


def host_layers(model: keras.Model) -> list[keras.layers.Embedding]:
    """The layers of a model whose tables are on the host.

    Raises:
        ValueError: One of them has a table that cannot be there.
    """
    layers = keras_models.flat_layers(model)
    given = {id(target): where for target, where in host_setting.given()}
    own = {True: "host", False: "device"}
    placed = [
        layer
        for layer in layers
        if given.get(id(layer), own[getattr(layer, "on_host", False)]) == "host"
    ]
    for layer in placed:
        _check_table(layer)
    return placed


def _check_table(layer: keras.layers.Embedding) -> None:
    """Refuses a table that other rows than those looked up matter of, and one that is encoded."""
    why = ""
    if not layer.built:
        why = "is not built: build the model, or call it once, first"
    elif getattr(layer, "tie_weights", False):
        why = "is also used whole, by call(..., reverse=True): use tie_weights=False"
    elif layer.quantization_mode:
        why = "is quantized: place it before quantize(), or leave it on the device"
    elif layer.lora_enabled:
        why = "has LoRA factors: leave it on the device"
    elif layer.embeddings_regularizer is not None:
        why = "has a penalty over all of its rows: use optimizer weight decay, or none"
    elif not layer.embeddings.trainable:
        why = "does not train: leave it on the device, or set trainable=True"
    if why:
        raise ValueError(
            "A table on the host is built, trains, and is used row by row. "
            f"Received: layer {layer.name!r}, whose table {why}"
        )
