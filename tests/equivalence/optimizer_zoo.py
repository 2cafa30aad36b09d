"""Every optimizer that Keras ships, as a factory that accepts the options of a feature.

Learning rates are large for such small models: weights must move far enough in four steps for a
wrong update to show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

OptimizerFactory = Callable[..., keras.optimizers.Optimizer]


def _factory(cls: type, **defaults: Any) -> OptimizerFactory:
    return lambda **options: cls(**{**defaults, **options})


def _loss_scaled(**options: Any) -> keras.optimizers.Optimizer:
    # The scale grows every second step, so that a run sees it change.
    inner = keras.optimizers.SGD(**{"learning_rate": 0.1, "momentum": 0.9, **options})
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=2)


def _multi(**options: Any) -> keras.optimizers.Optimizer:
    rules = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(**{"learning_rate": 0.1, "momentum": 0.9, **options}),
        {".*kernel": keras.optimizers.Adam(**{"learning_rate": 0.01, **options})},
    )
    return keras.optimizers.MultiOptimizer(rules)


_O = keras.optimizers

OPTIMIZERS: Mapping[str, OptimizerFactory] = {
    "sgd": _factory(_O.SGD, learning_rate=0.1),
    "sgd_momentum": _factory(_O.SGD, learning_rate=0.1, momentum=0.9),
    "sgd_nesterov": _factory(_O.SGD, learning_rate=0.1, momentum=0.9, nesterov=True),
    "rmsprop": _factory(_O.RMSprop, learning_rate=0.01, momentum=0.5, centered=True),
    "adam": _factory(_O.Adam, learning_rate=0.01),
    "adam_amsgrad": _factory(_O.Adam, learning_rate=0.01, amsgrad=True),
    "adamw": _factory(_O.AdamW, learning_rate=0.01, weight_decay=0.1),
    "adadelta": _factory(_O.Adadelta, learning_rate=1.0),
    "adagrad": _factory(_O.Adagrad, learning_rate=0.1),
    "adamax": _factory(_O.Adamax, learning_rate=0.01),
    "adafactor": _factory(_O.Adafactor, learning_rate=0.05),
    "nadam": _factory(_O.Nadam, learning_rate=0.01),
    "ftrl": _factory(_O.Ftrl, learning_rate=0.1, l2_regularization_strength=0.01),
    "lion": _factory(_O.Lion, learning_rate=0.003),
    "lamb": _factory(_O.Lamb, learning_rate=0.01),
    "muon": _factory(_O.Muon, learning_rate=0.02),
    "schedule_free_adamw": _factory(_O.ScheduleFreeAdamW, learning_rate=0.01, warmup_steps=2),
    "loss_scale_sgd": _loss_scaled,
    "multi": _multi,
}

# Optimizers without options of their own to clip, accumulate or average with.
WRAPPERS = frozenset({"multi"})


def shipped() -> set[str]:
    """Names of the optimizer classes that this version of Keras exports."""
    names = set()
    for name in dir(keras.optimizers):
        item = getattr(keras.optimizers, name)
        if isinstance(item, type) and issubclass(item, keras.optimizers.Optimizer):
            names.add(name)
    return names - {"Optimizer"}
