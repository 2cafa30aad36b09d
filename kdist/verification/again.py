"""Metrics and optimizers of their own for twins, as those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdist._compat import keras_optimizers, keras_twins
from kdist.optimizer.settings import carry_settings
from kdist.verification.no_twin import NoTwin

import keras


def metric_again(metric: keras.Metric, dtype: str) -> keras.Metric:
    """A metric of its own for a twin.

    Raises:
        NoTwin: Its configuration does not say all that it is.
    """
    own = type(metric)
    try:
        config = metric.get_config()
        if "dtype" in config:
            config["dtype"] = dtype
        with keras_twins.own_lambdas(), keras.saving.custom_object_scope({own.__name__: own}):
            return own.from_config(config)
    except Exception as error:  # whatever the user's own constructor raises
        raise NoTwin(
            f"its metric {metric.name!r} cannot be made again from its configuration"
        ) from error


def optimizer_again(optimizer: Any, dtype: str, changes: Mapping[str, Any]) -> Any:
    """An optimizer with the same settings, not built.

    Loss scaling is left out in float64, which needs none.

    Args:
        optimizer: A Keras optimizer, or None.
        dtype: The twin's.
        changes: Settings with another value, where the optimizer, or one inside of it, has them.
    """
    if optimizer is None:
        return None
    if dtype == "float64" and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    own: Any = keras_optimizers.own_class(optimizer)
    try:
        config = optimizer.get_config()
        inner = config.get("inner_optimizer")
        for one in (config, inner["config"] if isinstance(inner, dict) else {}):
            one.update({name: value for name, value in changes.items() if name in one})
        known = {one.__name__: one for one in map(keras_optimizers.own_class, _inside(optimizer))}
        with keras_twins.own_lambdas(), keras.saving.custom_object_scope(known):
            again = own.from_config(config)
    except Exception as error:  # whatever the user's own constructor raises
        raise NoTwin(
            f"its optimizer {own.__name__} cannot be made again from its configuration"
        ) from error
    copy, left = again, {*changes, "kdist_config"}  # that is made of the changed settings
    while optimizer is not None and copy is not None:
        carry_settings(copy, optimizer, left)
        copy, optimizer = (getattr(one, "inner_optimizer", None) for one in (copy, optimizer))
    return again


def _inside(optimizer: Any) -> list[Any]:
    """An optimizer, what its wrappers wrap, and the members of a `MultiOptimizer`."""
    found = [optimizer]
    while (inner := getattr(found[-1], "inner_optimizer", None)) is not None:
        found.append(inner)
    return [*found, *getattr(found[-1], "optimizers", ())]
