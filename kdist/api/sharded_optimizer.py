"""`kdist.ShardedOptimizer`: a Keras optimizer whose state is spread over the replicas."""

from __future__ import annotations

import dataclasses
from typing import Any

from kdist.api.mirrored import MirroredUpdate
from kdist.api.mirrored import strategy_of as mirrored_strategy
from kdist.config.optimizer import OptimizerConfig
from kdist.config.settings import Setting
from kdist.config.state_format import StateFormatConfig
from kdist.optimizer.wrappers import unwrap

import keras

parallel_optimizer: Setting[bool] = Setting("kdist.set_parallel_optimizer")
"""What `set_parallel_optimizer` said."""


def set_parallel_optimizer(target: Any, value: bool) -> Any:
    """Says whether a parameter, or those of a layer, take part in optimizer parallelism.

    The same idea is MindSpore's `Parameter.parallel_optimizer`. Takes effect with the next
    `compile`; of several calls that reach a parameter the last one counts.

    Args:
        target: A layer (all layers inside included), a model, or a `keras.Variable`.
        value: False keeps the parameters whole; True spreads also those below the threshold.

    Returns:
        The target.

    Raises:
        ValueError: For another target or value.

    Example:
        >>> kdist.set_parallel_optimizer(model.get_layer("head"), False)
        >>> model.compile(kdist.ShardedOptimizer("adam", level=2, threshold_kb=1), "mse")
    """
    if not isinstance(value, bool):
        raise ValueError(f"set_parallel_optimizer takes True or False. Received: value={value!r}")
    parallel_optimizer.set(target, value)
    return target


def config_for(optimizer: Any, given: OptimizerConfig) -> OptimizerConfig:
    """The settings that count: those of a `ShardedOptimizer`, or of the configuration.

    Raises:
        ValueError: Both say something, and not the same.
    """
    own = unwrap(optimizer).config
    if own is None:
        return given
    if given not in (own, OptimizerConfig()):
        raise ValueError(
            "The ParallelConfig and the ShardedOptimizer ask for different optimizer parallelism. "
            f"Leave one of them out. Received: optimizer={given!r} and {own!r}"
        )
    return own


def _refuse_second_scale(inner: Any) -> None:
    """Refuses a `LossScaleOptimizer` around a `ShardedOptimizer` with such a one inside.

    Gradients would be divided twice, and losses multiplied once.
    """
    found = unwrap(inner)
    if found.loss_scale is not None:
        raise ValueError(
            "Losses are scaled once. Leave the LossScaleOptimizer inside of ShardedOptimizer and "
            "call compile(auto_scale_loss=False), which keeps Keras from putting another one "
            "around it under mixed_float16; or put it around: "
            f"LossScaleOptimizer(ShardedOptimizer({type(found.inner).__name__}(...))). Received: a "
            "LossScaleOptimizer around a ShardedOptimizer with a LossScaleOptimizer inside"
        )


def _delegated(name: str) -> property:
    """An attribute that is the inner optimizer's."""

    def read(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def write(self: Any, value: Any) -> None:
        if "inner_optimizer" in self.__dict__:
            setattr(self.inner_optimizer, name, value)

    return property(read, write)


@keras.saving.register_keras_serializable(package="kdist")
class ShardedOptimizer(keras.optimizers.Optimizer):
    """A Keras optimizer whose state, gradients and parameters are spread over the replicas.

    Under `kdist.parallelize` it says the same as `ParallelConfig(optimizer=OptimizerConfig(...))`.
    For a model made in a `tf.distribute.MirroredStrategy` scope and trained by Keras alone, level 1
    deals optimizer state to the replicas, by whole parameters (see docs/mirrored.md). Learning
    rate, schedules, callbacks, saving and loading work through it as with the optimizer inside. On
    a single device there is nothing to spread, and it is that optimizer.

    Args:
        inner_optimizer: A Keras optimizer, or its name.
        level: See `OptimizerConfig`; here 1 by default, and not 0.
        threshold_kb: See `OptimizerConfig`.
        gradient_accumulation_shard: See `OptimizerConfig`.
        partition: See `OptimizerConfig`.
        keep_gathered: See `OptimizerConfig`.
        state_format: See `OptimizerConfig`; also as a dict of its fields.
        state_on: See `OptimizerConfig`.
        name: Name of the wrapper.

    Raises:
        ValueError: For what `OptimizerConfig` refuses, and for another optimizer. When a
            `LossScaleOptimizer` is put around it, also by `compile` under mixed_float16: for one
            inside.

    Example:
        >>> model = kdist.parallelize(build_model(), kdist.ParallelConfig(mesh=kdist.mesh(data=8)))
        >>> model.compile(kdist.ShardedOptimizer(keras.optimizers.Adam(1e-3), level=2), "mse")
    """

    def __init__(
        self,
        inner_optimizer: Any,
        *,
        level: int = 1,
        threshold_kb: float = 64,
        gradient_accumulation_shard: bool = False,
        partition: Any = "auto",
        keep_gathered: bool = False,
        state_format: StateFormatConfig | dict[str, Any] | None = None,
        state_on: Any = "device",
        name: str | None = None,
    ) -> None:
        inner = keras.optimizers.get(inner_optimizer)
        if inner is None or unwrap(inner).config is not None:
            raise ValueError(
                "A ShardedOptimizer takes a Keras optimizer, not another ShardedOptimizer. "
                f"Received: inner_optimizer={inner_optimizer!r}"
            )
        super().__init__(learning_rate=0.0, name=name)
        if state_format is None or isinstance(state_format, dict):
            state_format = StateFormatConfig(**state_format or {})
        self.kdist_config = OptimizerConfig(
            level=level,
            threshold_kb=threshold_kb,
            gradient_accumulation_shard=gradient_accumulation_shard,
            partition=partition,
            keep_gathered=keep_gathered,
            state_format=state_format,
            state_on=state_on,
        )
        self.inner_optimizer = inner
        # Not an attribute that Keras or TensorFlow would track.
        object.__setattr__(self, "_mirrored", None)

    def __setattr__(self, name: str, value: Any) -> None:
        # A LossScaleOptimizer clears what it wraps of a scale. A property's own code would not see
        # that: Keras does not call it where the value is the same.
        if name == "loss_scale_factor":
            _refuse_second_scale(self.__dict__.get("inner_optimizer"))
        super().__setattr__(name, value)

    clipnorm = _delegated("clipnorm")
    clipvalue = _delegated("clipvalue")
    global_clipnorm = _delegated("global_clipnorm")
    weight_decay = _delegated("weight_decay")
    use_ema = _delegated("use_ema")
    ema_momentum = _delegated("ema_momentum")
    ema_overwrite_frequency = _delegated("ema_overwrite_frequency")
    loss_scale_factor = _delegated("loss_scale_factor")
    gradient_accumulation_steps = _delegated("gradient_accumulation_steps")
    learning_rate = _delegated("learning_rate")

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of updates."""
        return self.inner_optimizer.iterations

    @property
    def variables(self) -> list[keras.Variable]:
        """The inner optimizer's variables."""
        return self.inner_optimizer.variables

    def build(self, variables: Any) -> None:
        """Builds the inner optimizer; its state on the owners of mirrored variables."""
        strategy = mirrored_strategy(variables)
        if strategy is None or self.kdist_config.level == 0:
            self.build_inner(variables)
        elif self._mirrored is None:
            wanted = parallel_optimizer.of(variables)
            update = MirroredUpdate(self, list(variables), self.kdist_config, wanted, strategy)
            object.__setattr__(self, "_mirrored", update)
        self.built = True

    def build_inner(self, variables: Any) -> None:
        """Builds the inner optimizer as Keras does."""
        if not self.inner_optimizer.built:
            with keras.name_scope(self.inner_optimizer.name, caller=self.inner_optimizer):
                self.inner_optimizer.build(variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Updates like the inner optimizer; under `kdist.parallelize` the engine updates."""
        if self.kdist_config.state_format.encodes:
            raise ValueError(
                "Moments are kept in 16 bits by models that went through kdist.parallelize. Pass "
                "the model through it, or leave state_format out. "
                f"Received: state_format={self.kdist_config.state_format!r}"
            )
        if self.kdist_config.state_on == "host":
            raise ValueError(
                "Optimizer state is on the host of models that went through kdist.parallelize. "
                "Pass the model through it, or leave state_on out. Received: state_on='host'"
            )
        if trainable_variables is not None and not self.built:
            self.build(trainable_variables)
        if self._mirrored is not None:
            return self._mirrored.merge(grads, trainable_variables)
        if trainable_variables is None:
            return self.inner_optimizer.apply(grads)
        return self.inner_optimizer.apply_gradients(zip(grads, trainable_variables, strict=True))

    def state_bytes(self) -> dict[str, int]:
        """Bytes of optimizer state per device, under a `tf.distribute.MirroredStrategy`.

        Raises:
            ValueError: There is no such strategy, or nothing has been built yet.

        Example:
            >>> strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> with strategy.scope():
            ...     model = build_model()
            ...     model.compile(kdist.ShardedOptimizer("adam"), "mse")
            >>> model.fit(x, y)
            >>> sorted(model.optimizer.state_bytes())
            ['/device:CPU:0', '/device:CPU:1']
        """
        if self._mirrored is None:
            raise ValueError(
                "state_bytes is for models made in a tf.distribute.MirroredStrategy scope, once "
                "built. Of a parallelized model, kdist.inspect(model) tells. "
                f"Received: {self.name!r}, built={self.built}"
            )
        return self._mirrored.state_bytes()

    def scale_loss(self, loss: Any) -> Any:
        """See `keras.optimizers.Optimizer.scale_loss`."""
        return self.inner_optimizer.scale_loss(loss)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """See `keras.optimizers.Optimizer.exclude_from_weight_decay`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: Any) -> None:
        """See `keras.optimizers.Optimizer.finalize_variable_values`."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """The inner optimizer and the settings."""
        config = self.kdist_config
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "level": config.level,
            "threshold_kb": config.threshold_kb,
            "gradient_accumulation_shard": config.gradient_accumulation_shard,
            "partition": config.partition,
            "keep_gathered": config.keep_gathered,
            "state_format": dataclasses.asdict(config.state_format),
            "state_on": config.state_on,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> ShardedOptimizer:
        """The reverse of `get_config`."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(inner, **config)
