"""What `compile` gave a model, for its twin: losses, metrics, and the optimizer with its state."""

from __future__ import annotations

from typing import Any

from kdist._compat import keras_optimizers, keras_twins
from kdist.api.attached import parallel_of
from kdist.optimizer.local import leaf_optimizers
from kdist.optimizer.settings import carry_settings
from kdist.optimizer.wrappers import optimizers_of, unwrap
from kdist.verification.again import metric_again, optimizer_again
from kdist.verification.attributes import FromAttributes
from kdist.verification.no_twin import NoTwin
from kdist.verification.twin import paired

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
        NoTwin: A loss, a metric or the optimizer cannot be made again; or `compile` is overridden,
            and takes something of which no second one can be made.
    """
    dtype = "float64" if policy == "float64" else "float32"
    if type(model).compile is not keras.Model.compile:
        _compile_by_own(model, twin, FromAttributes(dtype, policy, _refuse_layer))
        return
    options = keras_twins.compile_options(model)
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


def _compile_by_own(model: keras.Model, twin: keras.Model, again: FromAttributes) -> None:
    """Compiles a twin by the `compile` of its class, with what the model's was given."""
    parallel = parallel_of(model)
    given = None if parallel is None else parallel.compiled_with
    if given is None:
        raise NoTwin(
            "its class has a `compile` of its own, and what that took before kdist.parallelize is "
            "not known: compile it again"
        )
    args, named = given
    named = {key: again.value(one, f"{key} of its own compile") for key, one in named.items()}
    named.update({key: False for key in ("jit_compile", "auto_scale_loss") if key in named})
    twin.compile(
        *(again.value(one, f"argument {n} of its own compile") for n, one in enumerate(args)),
        **named,
    )


def _refuse_layer(layer: keras.Layer) -> keras.Layer:
    raise NoTwin(f"its own `compile` takes a layer, {layer.name!r}: make it an attribute before")


def _each(given: Any, dtype: str) -> Any:
    """Losses or metrics in their structure; names and functions as they are."""
    if isinstance(given, dict):
        return {key: _each(value, dtype) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return [_each(value, dtype) for value in given]
    if isinstance(given, keras.Loss):
        return keras_twins.loss_in(given, dtype)
    if isinstance(given, keras.Metric):
        return metric_again(given, dtype)
    return given


def _changes(twin: keras.Model, lossless: bool) -> dict[str, Any]:
    """Settings of a `kdist.ShardedOptimizer` that a twin does not have."""
    if parallel_of(twin) is None:
        return {"state_format": {}, "state_on": "device"}
    return {"state_format": {}} if lossless else {}


def copy_optimizers(model: keras.Model, twin: keras.Model) -> None:
    """Builds a twin's optimizers and copies their state, and what each member does not decay.

    Raises:
        NoTwin: The state has another form.
    """
    mine, again = optimizers_of(model), optimizers_of(twin)
    if mine.keys() != again.keys():
        raise NoTwin(f"made again it has the optimizers {[*again]} instead of {[*mine]}")
    pair = paired(model, twin)
    for name, optimizer in mine.items():
        if not optimizer.built and optimizer is not model.optimizer:
            continue  # on its first use, as the model's
        known = model.trainable_variables
        if optimizer.built:
            known = keras_optimizers.updated_by(optimizer) or known
        _copy_optimizer(optimizer, again[name], known, [pair(v) for v in known])


def _copy_optimizer(
    optimizer: Any, copy: Any, known: list[keras.Variable], twins: list[keras.Variable]
) -> None:
    """Builds a twin's optimizer and copies its state.

    Args:
        optimizer: The model's.
        copy: The twin's.
        known: What the model's updates.
        twins: What the twin's does.
    """
    mine, again = unwrap(optimizer), unwrap(copy)
    if not again.inner.built:
        with keras_optimizers.build_scope(copy):
            copy.build(twins)
    _carry_members(mine.inner, again.inner, known, twins)
    if not optimizer.built:
        return
    source, target = mine.inner.variables, again.inner.variables
    if again.loss_scale is not None and mine.loss_scale is not None:
        source, target = mine.loss_scale.variables, again.loss_scale.variables
    if [tuple(v.shape) for v in source] != [tuple(v.shape) for v in target]:
        raise NoTwin("its optimizer's state has another form when made again")
    for variable, copied in zip(source, target):
        copied.assign(tf.cast(tf.convert_to_tensor(variable.value), copied.dtype))


def _carry_members(
    optimizer: Any, again: Any, known: list[keras.Variable], twins: list[keras.Variable]
) -> None:
    """Tells the optimizers that do math, of a twin, what configurations leave out.

    Args:
        optimizer: The model's, without its wrappers; may be a `MultiOptimizer`.
        again: The twin's, built.
        known: What the model's updates.
        twins: What the twin's does.
    """
    own = {i: leaf for leaf, members in leaf_optimizers(optimizer, known) for i in members}
    for copy, members in leaf_optimizers(again, twins):
        excluded: list[keras.Variable] = []
        for i in members:
            if copy is not again:
                carry_settings(copy, own[i])
            if keras_twins.not_decayed(own[i], [known[i]]):
                excluded.append(twins[i])
        if excluded:
            keras_optimizers.exclude_from_decay(copy, excluded)
