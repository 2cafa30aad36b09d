"""The variables of a model, by what a step does with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kdist._compat import keras_models, keras_seeds, keras_trainer, keras_twins
from kdist.storage.variables import stored

import keras

CODES = ("int8", "uint8")
"""Dtypes of what a layer keeps of a quantized weight; four bits are packed."""


@dataclasses.dataclass(frozen=True)
class ModelState:
    """The variables of a model, by what happens to them in a step.

    Attributes:
        trainable: Updated by the optimizer from gradients.
        frozen: Weights that do not train, of the kind that does, or quantized, and are stored cut
            over the data axis: gathered like trainable ones.
        fixed: Other weights: other frozen ones, and statistics that the forward pass may update.
        seeds: States of seed generators; of the one for operations without a seed too, once used.
        metrics: Variables of metrics that layers or the model own.
    """

    trainable: tuple[keras.Variable, ...]
    frozen: tuple[keras.Variable, ...]
    fixed: tuple[keras.Variable, ...]
    seeds: tuple[keras.Variable, ...]
    metrics: tuple[keras.Variable, ...]

    @classmethod
    def of(cls, model: keras.Model) -> ModelState:
        """Sorts the variables of a built model."""
        trainable, frozen = model.trainable_variables, frozen_and_cut(model)
        known = {id(v) for v in (*trainable, *frozen)}
        weights = {id(v) for v in model.weights}
        fixed: list[keras.Variable] = []
        seeds: list[keras.Variable] = []
        for v in model.variables:
            if id(v) not in known:
                known.add(id(v))
                (fixed if id(v) in weights else seeds).append(v)
        unseeded = keras_seeds.unseeded_generator()
        if unseeded is not None and id(unseeded) not in known:
            seeds.append(unseeded)
        metrics: list[keras.Variable] = []
        for metric in model.metrics:
            own = (keras_trainer.loss_tracker(model), keras_trainer.compiled_metrics(model))
            if metric in own or metric in keras_trainer.loss_trackers(model):
                continue
            metrics.extend(v for v in metric.variables if id(v) not in known)
            known.update(id(v) for v in metric.variables)
        return cls(tuple(trainable), tuple(frozen), tuple(fixed), tuple(seeds), tuple(metrics))

    @property
    def params(self) -> tuple[keras.Variable, ...]:
        """What programs take as parameters: trainable variables, then frozen ones."""
        return self.trainable + self.frozen

    @property
    def written(self) -> tuple[keras.Variable, ...]:
        """All that a forward pass may write: `carried`, then `params`."""
        return self.carried + self.params

    @property
    def carried(self) -> tuple[keras.Variable, ...]:
        """Non-trainable state in the order in which programs take and return it."""
        return self.fixed + self.seeds + self.metrics


def frozen_and_cut(model: keras.Model) -> list[keras.Variable]:
    """Those of `frozen_weights` that are stored cut over the data axis."""
    found = []
    for variable in frozen_weights(model):
        entry = stored(variable)
        if entry is not None and entry.placement.gathered:
            found.append(variable)
    return found


def frozen_weights(model: keras.Model) -> list[keras.Variable]:
    """Weights that do not train, though layers made them to, and codes of quantized ones."""
    trainable = {id(v) for v in model.trainable_variables}
    found = {id(v): v for v in (*keras_twins.made_to_train(model), *_codes(model))}
    return [v for key, v in found.items() if key not in trainable]


def _codes(model: keras.Model) -> Iterator[keras.Variable]:
    """The integers that kernels and tables were quantized to, which nothing writes."""
    for layer in keras_models.flat_layers(model):
        if getattr(layer, "quantization_mode", None) is not None:
            yield from (v for v in layer.weights if v.dtype in CODES)
