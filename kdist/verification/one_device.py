"""Whether a model fits one device, which it must to be compared with the mesh."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from kdist._compat import keras_models
from kdist.display.tables import readable
from kdist.sharding.mesh import Device

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Needed:
    """Bytes that a training step takes on one device, at least.

    Attributes:
        weights: Of all variables.
        gradients: Of the trainable ones.
        slots: Of the optimizer's variables; 0 while it is not built.
        outputs: Of all layers for the batch; 0 where the model has no graph of layers.
    """

    weights: int
    gradients: int
    slots: int
    outputs: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.weights + self.gradients + self.slots + self.outputs

    def __str__(self) -> str:
        parts = [f"{f.name} {readable(getattr(self, f.name))}" for f in dataclasses.fields(self)]
        return ", ".join(parts)


def needed(model: keras.Model, rows: int, itemsize: int) -> Needed:
    """What a step of a built model takes, from shapes alone.

    Args:
        model: The model.
        rows: Rows of the batch.
        itemsize: Bytes of a floating number.
    """

    def size(variables: list[keras.Variable]) -> int:
        return itemsize * sum(math.prod(v.shape) for v in variables)

    slots = [] if model.optimizer is None else model.optimizer.variables
    return Needed(
        size(model.variables),
        size(model.trainable_variables),
        size(slots),
        itemsize * _output_elements(model, rows),
    )


def _output_elements(model: keras.Model, rows: int) -> int:
    functional = keras_models.functional_of(model)
    if functional is None:
        return 0
    nodes = keras_models.nodes_in_order(functional)
    shapes = [t.shape for node in nodes for t in node.outputs]
    return sum(math.prod(rows if dim is None else dim for dim in shape) for shape in shapes)


def memory_of(device: str) -> int | None:
    """Bytes of a device, None where TensorFlow does not tell: a GPU without a limit."""
    parsed = Device.parse(device)
    if parsed.kind == "CPU":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    physical = tf.config.list_physical_devices(parsed.kind)
    limits: list[Any] = []
    for one in physical:
        settings = tf.config.get_logical_device_configuration(one)
        limits += [None] if settings is None else [s.memory_limit for s in settings]
    limit = limits[parsed.index] if parsed.index < len(limits) else None
    return None if limit is None else int(limit) * 2**20


def refuse_too_large(
    model: keras.Model, rows: int, itemsize: int, device: str, limit: int | None
) -> None:
    """Raises where a model does not fit one device.

    Args:
        model: The built model.
        rows: Rows of the batch.
        itemsize: Bytes of a floating number.
        device: The device.
        limit: Its bytes; None for what is known of it.

    Raises:
        ValueError: It does not.
    """
    limit = memory_of(device) if limit is None else limit
    takes = needed(model, rows, itemsize)
    if limit is not None and takes.total > limit:
        raise ValueError(
            "kdist.verify trains the model on one device too, and it does not fit: a step takes "
            f"{takes.total} bytes at least ({takes}), and {device} has {limit} bytes "
            f"({readable(limit)}). Verify a model with fewer of the same layers, a smaller batch, "
            f"or dtype='own'. Received: model={model.name!r}, {rows} rows of {itemsize}-byte "
            "numbers"
        )
