"""Models built inside the scope of a `tf.distribute` strategy.

Many users stay with such scopes. kdist takes the strategy's devices as its data axis, and turns the
strategy's variables into its own local ones; Keras's strategy code is then out of the way.
"""

from __future__ import annotations

import math
from typing import Any

from kdist._compat import keras_optimizers, keras_trainer, variable_internals
from kdist._compat.cluster_runtime import JOB
from kdist.cluster.joining import has_joined
from kdist.config.parallel import ParallelConfig
from kdist.sharding.device import Device
from kdist.sharding.mesh import Topology, mesh

import keras
import tensorflow as tf

TAKEN = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.TPUStrategy,
    tf.distribute.experimental.TPUStrategy,
)
"""Strategies whose devices become a mesh, with those derived from them."""

REFUSED = {
    tf.distribute.experimental.CentralStorageStrategy: (
        "Its variables and updates stay on one device. Use MirroredStrategy, and "
        "kdist.OptimizerConfig(state_on='host') to keep updates on the host"
    ),
    tf.distribute.ParameterServerStrategy: (
        "Its workers train without waiting for each other. Use MirroredStrategy for the devices "
        "of one machine, kdist.init() in each process for several; large tables have a place of "
        "their own with kdist.place(layer, 'host')"
    ),
}
"""Strategies that work in a way that kdist does not, with what to use instead."""


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """The strategy in whose scope a model was built, if it has any."""
    return keras_trainer.model_strategy(model)


def config_from(strategy: tf.distribute.Strategy) -> ParallelConfig:
    """A configuration whose data axis is the devices of a strategy; see `mesh_from_strategy`."""
    return ParallelConfig(mesh=mesh_from_strategy(strategy))


def mesh_from_strategy(
    strategy: tf.distribute.Strategy, **axes: int
) -> keras.distribution.DeviceMesh:
    """A mesh of the devices that a `tf.distribute` strategy trains on.

    Args:
        strategy: A `OneDeviceStrategy`, `MirroredStrategy`, `MultiWorkerMirroredStrategy` or
            `TPUStrategy`. With several workers, `kdist.init()` comes after the strategy in each of
            them, and goes on in the first.
        **axes: Sizes of further axes, after `data`, which gets what is left of the devices; see
            `kdist.mesh`.

    Returns:
        The mesh. Without axes, all devices are the data axis.

    Raises:
        ValueError: Another strategy; or the axes do not divide the devices.

    Example:
        >>> strategy = tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(4)])
        >>> with strategy.scope():
        ...     model = build_model()
        >>> mesh = kdist.mesh_from_strategy(strategy, model=2)
        >>> model = kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh))
    """
    check_kind(strategy)
    devices = devices_of(strategy)
    rest = math.prod(axes.values())
    if "data" in axes or rest < 1 or len(devices) % rest:
        raise ValueError(
            "The axes beside data divide the strategy's devices, and data is the rest. "
            f"Received: axes={axes}, {len(devices)} devices"
        )
    return mesh(devices=devices, data=len(devices) // rest, **axes)


def check_kind(strategy: Any) -> None:
    """Refuses strategies that are not `TAKEN`, and several workers that have not joined yet."""
    for kind, instead in REFUSED.items():
        if isinstance(strategy, kind):
            raise ValueError(f"{instead}. Received: strategy={strategy!r}")
    if not isinstance(strategy, TAKEN):
        raise ValueError(
            "kdist takes the devices of a OneDeviceStrategy, MirroredStrategy, "
            "MultiWorkerMirroredStrategy or TPUStrategy. Build the model outside of other "
            "strategies, and give the devices with kdist.mesh. "
            f"Received: strategy={strategy!r}"
        )
    workers = workers_of(strategy)
    if workers > 1 and not has_joined():
        raise ValueError(
            "One process of kdist drives the devices of all workers. Call kdist.init() in each of "
            "them, after the strategy is made: it goes on in the first alone. "
            f"Received: a MultiWorkerMirroredStrategy of {workers} workers"
        )


def workers_of(strategy: Any) -> int:
    """How many processes a strategy is over."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 1
    cluster = strategy.cluster_resolver.cluster_spec()
    return max(1, sum(cluster.num_tasks(job) for job in cluster.jobs) if cluster else 1)


def devices_of(strategy: Any) -> list[str]:
    """The devices that a strategy trains on; of several workers all, worker after worker."""
    mine = [short_name(d) for d in strategy.extended.worker_devices]
    if (workers := workers_of(strategy)) == 1:
        return mine
    return [f"/job:{JOB}/task:{k}/device:{d.upper()}" for k in range(workers) for d in mine]


def check_devices(strategy: tf.distribute.Strategy, topology: Topology) -> None:
    """Refuses a mesh whose devices are not those of the strategy in scope."""
    check_kind(strategy)
    shown = short_name if workers_of(strategy) == 1 else _full_name
    mine = {shown(d) for d in topology.devices}
    theirs = {shown(d) for d in devices_of(strategy)}
    if mine != theirs:
        raise ValueError(
            "A model built in the scope of a strategy uses that strategy's devices. Leave the "
            "mesh out, make it over the same devices, or build the model outside of the scope. "
            f"Received: mesh over {sorted(mine)}, strategy over {sorted(theirs)}"
        )


def short_name(device: str) -> str:
    """`cpu:3` for any form of a device string."""
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type.lower()}:{spec.device_index}"


def _full_name(device: str) -> str:
    return Device.parse(device).name


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
        unmirror(variable)


def unmirror(variable: keras.Variable) -> None:
    """Replaces a mirrored variable behind a Keras variable by one `tf.Variable`.

    Of one that workers hold apart, the sums of metrics, it takes this worker's part: collectives of
    the strategy have ended.
    """
    value = keras_trainer.tf_variable(variable)
    if not isinstance(value, tf.distribute.DistributedValues):
        return
    here = value.values[0] if workers_of(value.distribute_strategy) > 1 else value
    plain = tf.Variable(tf.convert_to_tensor(here), trainable=value.trainable, name=variable.name)
    variable_internals.give_key(plain, variable_internals.key_of(value))
    keras_trainer.set_tf_variable(variable, plain)
