"""Models built inside a `tf.distribute.MirroredStrategy` scope.

Many users stay with such scopes. kdist takes the strategy's devices as its data axis, and turns the
mirrored variables into its own local ones; Keras's strategy code is then out of the way.
"""

from __future__ import annotations

from typing import Any

from kdist._compat import keras_optimizers, keras_trainer
from kdist.config.parallel import ParallelConfig
from kdist.sharding.mesh import Topology, mesh

import keras
import tensorflow as tf


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """The strategy in whose scope a model was built, if it has any."""
    return keras_trainer.model_strategy(model)


def config_from(strategy: tf.distribute.Strategy) -> ParallelConfig:
    """A configuration whose data axis is the devices of a strategy.

    Raises:
        ValueError: The strategy is of another kind than `MirroredStrategy`.
    """
    check_kind(strategy)
    devices = [short_name(d) for d in strategy.extended.worker_devices]
    return ParallelConfig(mesh=mesh(devices=devices, data=len(devices)))


def check_kind(strategy: Any) -> None:
    """Refuses strategies other than `MirroredStrategy`."""
    if type(strategy) is not tf.distribute.MirroredStrategy:
        raise ValueError(
            "kdist takes over models built in a tf.distribute.MirroredStrategy scope. Build the "
            "model outside of other strategies, and give the devices with kdist.mesh. "
            f"Received: strategy={strategy!r}"
        )


def check_devices(strategy: tf.distribute.Strategy, topology: Topology) -> None:
    """Refuses a mesh whose devices are not those of the strategy in scope."""
    check_kind(strategy)
    mine = {short_name(d) for d in topology.devices}
    theirs = {short_name(d) for d in strategy.extended.worker_devices}
    if mine != theirs:
        raise ValueError(
            "A model built in a MirroredStrategy scope uses that strategy's devices. Leave the "
            "mesh out, make it over the same devices, or build the model outside of the scope. "
            f"Received: mesh over {sorted(mine)}, strategy over {sorted(theirs)}"
        )


def short_name(device: str) -> str:
    """`cpu:3` for any form of a device string."""
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type.lower()}:{spec.device_index}"


def refuse_scope() -> None:
    """Refuses to make local variables inside a strategy's scope, which would mirror them."""
    if tf.distribute.has_strategy():
        raise ValueError(
            "Train outside of the `with strategy.scope():` block: inside of it TensorFlow would "
            "mirror each of kdist's per-device variables again. "
            f"Received: strategy={tf.distribute.get_strategy()!r}"
        )


def detach(model: keras.Model) -> None:
    """Takes a model's state, metrics and optimizer out of the strategy they were made in."""
    variables = [v for v in model.variables if not keras_trainer.is_view(v)]
    for metric in model.metrics:
        variables.extend(metric.variables)
    optimizer = getattr(model, "optimizer", None)
    while optimizer is not None:
        keras_optimizers.set_optimizer_strategy(optimizer, tf.distribute.get_strategy())
        variables.extend(v for v in optimizer.variables if not keras_trainer.is_view(v))
        optimizer = getattr(optimizer, "inner_optimizer", None)
    for variable in variables:
        make_plain(variable)


def make_plain(variable: keras.Variable) -> None:
    """Replaces a mirrored variable behind a Keras variable by one `tf.Variable`."""
    value = keras_trainer.tf_variable(variable)
    if not isinstance(value, tf.distribute.DistributedValues):
        return
    plain = tf.Variable(tf.convert_to_tensor(value), trainable=value.trainable, name=variable.name)
    plain._unique_id = value._unique_id
    keras_trainer.set_tf_variable(variable, plain)
