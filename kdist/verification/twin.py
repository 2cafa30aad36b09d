"""A twin: the model made again from its configuration, in float64, with the same weights and state.

What is compared is then what users get, through `compile`, `train_on_batch` and the rest, and the
model itself is only read.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from kdist._compat import keras_models, keras_trainer, keras_twins
from kdist.runtime.keras_contract import as_spec, is_built
from kdist.verification.attributes import FromAttributes
from kdist.verification.no_twin import NoTwin

import keras
import tensorflow as tf

FLOATING = ("float16", "bfloat16", "float32", "mixed_float16", "mixed_bfloat16")

POLICIES = ("dtype", "default_policy", "source_name")
"""Keys of configurations that name a policy; the last one is what a quantized one came from."""

OF_TRAINING = frozenset(
    {"built", "compiled", "stop_training", "steps_per_execution", "unrolled_steps_per_execution"}
)
"""Attributes that `build`, `compile` and `fit` set on a model."""

METHODS_OF_STEPS = ("train_step", "test_step", "compute_loss", "compute_metrics")
"""Methods of a model that its steps call."""


@contextlib.contextmanager
def precision(policy: str) -> Iterator[None]:
    """Meanwhile, new layers have a dtype policy, and losses and metrics its variables' dtype."""
    floatx, before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(before)


def rewritten(config: Any, policy: str) -> Any:
    """A configuration of layers with every floating dtype, and dtype policy, replaced.

    Args:
        config: As `get_config` gives it.
        policy: The dtype policy to replace with, such as "float64".

    Example:
        >>> rewritten({"units": 3, "dtype": "float32"}, "float64")
        {'units': 3, 'dtype': 'float64'}
    """
    if isinstance(config, dict):
        if config.get("class_name") == "DTypePolicy":
            name = config["config"]["name"]
            return {**config, "config": {"name": policy if name in FLOATING else name}}
        return {
            key: policy
            if key in POLICIES and isinstance(value, str) and value in FLOATING
            else rewritten(value, policy)
            for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return type(config)(rewritten(value, policy) for value in config)
    return config


def make_twin(model: keras.Model, policy: str, x: Any) -> keras.Model:
    """Makes a model again and copies its weights and state.

    Call it, and use the twin, within `precision(policy)`.

    Args:
        model: A built model, parallelized or not.
        policy: "float64", or the model's own dtype policy.
        x: The inputs that the twin will see.

    Returns:
        A plain Keras model, not parallelized, not compiled.

    Raises:
        NoTwin: The configuration does not say all that the model is.
    """
    if own := [name for name in METHODS_OF_STEPS if name in vars(model)]:
        # It may be about this very object, as functions that were defined beside it are.
        raise NoTwin(f"its {own[0]} is an attribute of the object, and no method of its class")
    try:
        with keras_twins.own_lambdas(), keras_twins.names_kept():
            twin = _again(model, policy)
            if not is_built(twin):
                spec = keras.tree.map_structure(as_spec, x)
                keras_trainer.keras_backend.compute_output_spec(twin, spec)
    except NoTwin:
        raise
    except Exception as error:  # whatever the user's own constructors raise
        raise NoTwin(f"it cannot be made again from its configuration ({_short(error)})") from error
    for layer, again in zip(keras_models.flat_layers(model), keras_models.flat_layers(twin)):
        keras_twins.take_order(again, layer)
    _check_alike(model, twin)
    _copy_model(model, twin)
    return twin


def _again(model: keras.Model, policy: str) -> keras.Model:
    """The model from its configuration, or its attributes.

    What is not registered with Keras is found by name.
    """
    with keras.saving.custom_object_scope(_own_objects(model)):
        try:
            return _from_config(model, policy)
        except Exception:  # whatever the user's own constructors raise
            if keras_models.functional_of(model) is not None:
                raise
            return _from_attributes(model, policy)


def _from_config(model: keras.Model, policy: str) -> keras.Model:
    own = type(model)
    config = model.get_config()
    if policy == "float64":
        config = rewritten(config, policy)
    if keras_models.functional_of(model) is None and "layers" not in config:
        config = _accepted(own, config)
    return own.from_config(config)


def _from_attributes(layer: keras.Layer, policy: str) -> keras.Layer:
    """A layer, or model, from its attributes; layers among them from their configurations."""

    def inside(one: keras.Layer) -> keras.Layer:
        try:
            config = keras.saving.serialize_keras_object(one)
            config = rewritten(config, policy) if policy == "float64" else config
            again = keras.saving.deserialize_keras_object(config)
            if is_built(one) and not is_built(again):
                again.build_from_config(one.get_build_config())
            return again
        except Exception:  # whatever the user's own constructors raise
            if keras_models.functional_of(one) is not None:
                raise
            return make(one)

    make = FromAttributes("float64" if policy == "float64" else "float32", policy, inside)
    return make(layer)


def _accepted(own: type, config: dict[str, Any]) -> dict[str, Any]:
    """What a constructor takes of what Keras adds to every configuration."""
    parameters = inspect.signature(own).parameters
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return config
    added = {"name", "trainable", "dtype"} - set(parameters)
    return {key: value for key, value in config.items() if key not in added}


def _own_objects(model: keras.Model) -> dict[str, Any]:
    """Classes and functions of a model by name, for those that are not registered."""
    found: dict[str, Any] = {}
    for layer in keras_models.flat_layers(model):
        if not type(layer).__module__.startswith("keras."):
            found[type(layer).__name__] = type(layer)
        for value in vars(layer).values():
            if isinstance(value, types.FunctionType) and value.__name__ != "<lambda>":
                found.setdefault(value.__name__, value)
    return found


def _check_alike(model: keras.Model, twin: keras.Model) -> None:
    """Refuses a twin with other layers or variables."""
    mine = [type(layer).__name__ for layer in keras_models.flat_layers(model)]
    other = [type(layer).__name__ for layer in keras_models.flat_layers(twin)]
    if mine != other:
        raise NoTwin(f"made again it has {len(other)} layers instead of {len(mine)}, or other ones")
    shapes = [tuple(v.shape) for v in model.variables]
    if shapes != [tuple(v.shape) for v in twin.variables]:
        raise NoTwin("made again it has other variables, as after enable_lora or quantize")


def _copy_model(model: keras.Model, twin: keras.Model) -> None:
    """Copies flags, paths and values."""
    pairs = zip(keras_models.flat_layers(model), keras_models.flat_layers(twin))
    for layer, again in pairs:
        if again.trainable != layer.trainable:
            again.trainable = layer.trainable
        _copy_settings(layer, again)
    for variable, again in zip(model.variables, twin.variables):
        if again.trainable != variable.trainable:
            again.trainable = variable.trainable
        keras_trainer.rename(again, variable)
        again.assign(tf.cast(tf.convert_to_tensor(variable.value), again.dtype))


def _copy_settings(layer: keras.layers.Layer, again: keras.layers.Layer) -> None:
    """Copies numbers, flags and names that were set after construction, as `layer.rate = 0.2`."""
    for key, value in vars(layer).items():
        plain = isinstance(value, bool | int | float | str | None) and value not in FLOATING
        own = not key.startswith("_") and key not in OF_TRAINING
        if plain and own and vars(again).get(key, layer) != value:
            object.__setattr__(again, key, value)


def batch_in(dtype: str, data: Any) -> Any:
    """A batch with its floating arrays in a dtype; others as they are, absent ones None."""

    def convert(leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, tf.SparseTensor | tf.RaggedTensor):
            floating = leaf.dtype.is_floating
            return tf.cast(leaf, dtype) if floating else leaf
        leaf = tf.convert_to_tensor(leaf)
        return tf.cast(leaf, dtype) if leaf.dtype.is_floating else leaf

    return keras.tree.map_structure(convert, data)


def paired(model: keras.Model, twin: keras.Model) -> Callable[[Any], Any]:
    """Maps a layer or a variable of a model to the twin's; None for what is not the model's."""
    layers = zip(keras_models.flat_layers(model), keras_models.flat_layers(twin))
    table = {id(one): again for one, again in layers}
    table.update((id(one), again) for one, again in zip(model.variables, twin.variables))
    return lambda target: table.get(id(target))


def _short(error: BaseException) -> str:
    """The first line of an error, not too long."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return text if len(text) <= 160 else f"{text[:157]}..."
