"""The parts of a model's loss, by name: compiled losses, what layers add, penalties of weights.

A step over the mesh and a pass on one device name them alike, so that each can be compared by
itself. Values of one name are added: a layer may call `add_loss` more than once, on several stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kdist._compat import keras_models, keras_trainer, keras_twins

import keras
from keras import ops

LossParts = dict[str, list[Any]]
"""Name -> the scalars that add up to that part."""


def compiled_names(model: keras.Model) -> list[str]:
    """What each loss that `compile` got is called, in their order; without `loss_weights`."""
    entries = keras_trainer.compiled_losses(model)
    if len(entries) == 1:
        return ["compiled loss"]
    return [f"compiled loss of {entry.name!r}" for entry in entries]


def added_name(layer: keras.Layer | None) -> str:
    """What the values are called that a layer gave to `add_loss`; None for one not tracked."""
    if layer is None:
        return "add_loss of layers that the model does not track"
    return f"add_loss of {(layer.path or layer.name)!r}"


def penalty_name(variable: keras.Variable) -> str:
    """What the penalty of a weight is called."""
    return f"penalty of {variable.path!r}"


def collected(pairs: Iterable[tuple[str, Any]]) -> LossParts:
    """Values by name, in order."""
    found: LossParts = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def merged(parts: Iterable[Mapping[str, list[Any]]]) -> LossParts:
    """Several sets of parts as one."""
    return collected((name, v) for one in parts for name, values in one.items() for v in values)


def added_up(parts: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Each part as one scalar."""
    return {name: ops.sum(ops.stack(list(values))) for name, values in parts.items()}


def compute_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True
) -> tuple[Any, LossParts]:
    """A model's loss, as Keras computes it after a call of the model, and its parts.

    Args:
        model: A compiled model whose `compute_loss` is Keras's own.
        x: Inputs of a batch.
        y: Its targets.
        y_pred: The outputs.
        sample_weight: Weights, or None.
        training: Training or inference.

    Returns:
        The loss; and what Keras added up, compiled losses before their `loss_weights`.
    """
    if not keras_trainer.losses_built(model):  # only then they are there to be noted
        keras_trainer.compute_loss(model, x, y, y_pred, sample_weight, training)
    with keras_trainer.noted_losses(model) as values:
        loss = keras_trainer.compute_loss(model, x, y, y_pred, sample_weight, training)
    pairs = [*zip(compiled_names(model), values)]
    for layer in keras_models.flat_layers(model):
        pairs += [(added_name(layer), ops.sum(v)) for v in keras_twins.added_losses(layer)]
    penalties = keras_trainer.regularization_losses(model)
    pairs += [(penalty_name(variable), ops.sum(value)) for variable, value in penalties]
    return loss, collected(pairs)
