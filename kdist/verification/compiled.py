"""What `compile` gave a model, for its twin: losses, metrics, and the optimizer with its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdist._compat import keras_optimizers, keras_twins
from kdist.api.parallelize import parallel_of
from kdist.optimizer.local import leaf_optimizers
from kdist.optimizer.settings import carry_settings
from kdist.optimizer.wrappers import unwrap
from kdist.verification.twin import NoTwin

import keras
import tensorflow as tf


def compile_alike(
    model: keras.Model, twin: keras.Model, policy: str, lossless: bool = False
) -> None:
    """Compiles a twin as a model was, with objects of its own; the optimizer is not built.

    Args:
        model: The compiled model.
        twin: Its twin; parallelized already, if it will be.
        policy: The twin's dtype policy.
        lossless: Whether moments that are kept in 16 bits are not; on one device they never are.

    Raises:
        NoTwin: A loss, a metric or the optimizer cannot be made again, or `compile` is overridden.
    """
    if type(model).compile is not keras.Model.compile:
        raise NoTwin("its class has a `compile` of its own, whose arguments are not known")
    options = keras_twins.compile_options(model)
    dtype = "float64" if policy == "float64" else "float32"
    twin.compile(
        optimizer=optimizer_again(model.optimizer, dtype, _changes(twin, lossless)),
        loss=_each(options["loss"], dtype),
        loss_weights=options["loss_weights"],
        metrics=_each(options["metrics"], dtype),
        weighted_metrics=_each(options["weighted_metrics"], dtype),
        run_eagerly=bool(options["run_eagerly"]),
        jit_compile=False,
        auto_scale_loss=False,
    )


def _each(given: Any, dtype: str) -> Any:
    """Losses or metrics in their structure; names and functions as they are."""
    if isinstance(given, dict):
        return {key: _each(value, dtype) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return [_each(value, dtype) for value in given]
    if isinstance(given, keras.Loss):
        return keras_twins.loss_in(given, dtype)
    if isinstance(given, keras.Metric):
        return _metric_again(given, dtype)
    return given


def _metric_again(metric: keras.Metric, dtype: str) -> keras.Metric:
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


def _changes(twin: keras.Model, lossless: bool) -> dict[str, Any]:
    """Settings of a `kdist.ShardedOptimizer` that a twin does not have."""
    if parallel_of(twin) is None:
        return {"state_format": {}, "state_on": "device"}
    return {"state_format": {}} if lossless else {}


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
    copy = again
    while optimizer is not None and copy is not None:
        carry_settings(copy, optimizer, changes)
        copy, optimizer = (getattr(one, "inner_optimizer", None) for one in (copy, optimizer))
    return again


def _inside(optimizer: Any) -> list[Any]:
    """An optimizer, what its wrappers wrap, and the members of a `MultiOptimizer`."""
    found = [optimizer]
    while (inner := getattr(found[-1], "inner_optimizer", None)) is not None:
        found.append(inner)
    return [*found, *getattr(found[-1], "optimizers", ())]


def copy_optimizer(model: keras.Model, twin: keras.Model) -> None:
    """Builds a twin's optimizer and copies its state, and which weights each member does not decay.

    Raises:
        NoTwin: The state has another form.
    """
    mine, again = unwrap(model.optimizer), unwrap(twin.optimizer)
    if twin.optimizer is None:
        return
    if not again.inner.built:
        with keras_optimizers.build_scope(twin.optimizer):
            twin.optimizer.build(twin.trainable_variables)
    _carry_members(mine.inner, again.inner, model, twin)
    if not model.optimizer.built:
        return
    source, target = mine.inner.variables, again.inner.variables
    if again.loss_scale is not None and mine.loss_scale is not None:
        source, target = mine.loss_scale.variables, again.loss_scale.variables
    if [tuple(v.shape) for v in source] != [tuple(v.shape) for v in target]:
        raise NoTwin("its optimizer's state has another form when made again")
    for variable, copied in zip(source, target):
        copied.assign(tf.cast(tf.convert_to_tensor(variable.value), copied.dtype))


def _carry_members(optimizer: Any, again: Any, model: keras.Model, twin: keras.Model) -> None:
    """Tells the optimizers that do math, of a twin, what configurations leave out.

    Args:
        optimizer: The model's, without its wrappers; may be a `MultiOptimizer`.
        again: The twin's, built.
        model: The compiled model.
        twin: Its twin.
    """
    known = model.trainable_variables
    own = {i: leaf for leaf, members in leaf_optimizers(optimizer, known) for i in members}
    for copy, members in leaf_optimizers(again, twin.trainable_variables):
        excluded: list[keras.Variable] = []
        for i in members:
            if copy is not again:
                carry_settings(copy, own[i])
            if keras_twins.not_decayed(own[i], [known[i]]):
                excluded.append(twin.trainable_variables[i])
        if excluded:
            keras_optimizers.exclude_from_decay(copy, excluded)
