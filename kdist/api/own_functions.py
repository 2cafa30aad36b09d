"""`function`: a training step of one's own, in a loop of one's own, over the mesh of its models."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from kdist._compat import keras_models
from kdist._compat.function_graphs import converted
from kdist.api.attached import attached
from kdist.api.changed_weights import follow_thawed, follow_weights, moved_weights
from kdist.api.own_steps import calls_of, refuse_prefetch, refuse_settings
from kdist.api.parallelize import Parallel
from kdist.calls.layer_calls import LayerCalls
from kdist.calls.own_steps import run_over
from kdist.dtensor.retraced import CannotExpand
from kdist.runtime.by_shape import ByShape
from kdist.runtime.mesh_step import as_tensors

import keras
import tensorflow as tf

WHOSE = "kdist.function"


def function(step: Callable | keras.Model, *models: keras.Model) -> Callable:
    """Makes a step of one's own a graph over the mesh of its models, as `tf.function` does for one.

    Calls of the models' layers run over the mesh: rows of the batch on the replicas, cut weights
    over the inner axes. To a `tf.GradientTape` each is one operation of whole tensors. Optimizers
    that the step applies to the models' weights update them on the devices that own them. All else
    runs as it is written, on one device, on whole tensors. `fit` does the same with a `train_step`
    of the model's own.

    Args:
        step: A function of tensors, or structures of them; over inner axes without keywords. Left
            out, what is returned decorates one.
        *models: Parallelized models whose layers it calls. They need not be compiled.

    Returns:
        A function of the same arguments that returns the same.

    Raises:
        ValueError: No model is given; one is not parallelized, or has settings that have no meaning
            here (stages, compression, recompute by a budget, rows of tables looked up ahead).

    Example:
        >>> @kdist.function(model)  # or kdist.function(step, generator, discriminator)
        ... def step(x, y):
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        ...     gradients = tape.gradient(loss, model.trainable_variables)
        ...     model.optimizer.apply(gradients, model.trainable_variables)
        ...     return loss
        >>> loss = step(x, y)
    """
    if isinstance(step, keras.Model):
        first = step
        return lambda own: function(own, first, *models)
    if not models:
        raise ValueError(
            "kdist.function runs the layers of parallelized models over their mesh. Name the "
            f"models: kdist.function(step, model). Received: {step!r} alone"
        )
    return _Function(step, [attached(model) for model in models])


class _Function:
    """See `function`."""

    def __init__(self, step: Callable, parallels: list[Parallel]) -> None:
        for one in parallels:
            refuse_settings(one, WHOSE, trains=True)
            _refuse_verify(one)
        self._step, self._parallels = converted(step), parallels
        self._programs: list[Any] = []
        self._flags: list[Any] = []
        self._held: list[Any] = []
        self._compiled: list[Any] = []
        self._graphs: Callable | None = None
        self._plain: Callable | None = None

    def __call__(self, *data: Any, **named: Any) -> Any:
        """Runs the step."""
        with tf.init_scope():
            self._prepare(data)
        if self._graphs is None:
            return self._on_plain(*data, **named)
        if named:
            raise ValueError(
                "Over inner axes kdist.function has a graph for each shape of its arguments: pass "
                "tensors, by position, and options by functools.partial(step, ...) or a closure. "
                f"Received: keywords {sorted(named)}"
            )
        try:
            return self._graphs(as_tensors(data))
        except CannotExpand as reason:
            for one in self._parallels:
                one.fall_back(
                    f"DTensor cannot run {reason}. kdist.function runs on gathered weights instead."
                )
            self._graphs = None
            return self._on_plain(*data)

    def _prepare(self, data: Any) -> None:
        """Places weights on first use, and makes graphs anew where `compile` has moved them."""
        for one in self._parallels:
            one.prepare_own(self._step, *data)
            refuse_prefetch(one, WHOSE)
        for one in self._parallels:
            _refuse_moved(one)
            follow_weights(one, "train")
            one.prepare_own(self._step, *data)
        if self._is_up_to_date():
            return
        compiled = [one.compiled_with for one in self._parallels]
        if not self._programs or any(a is not b for a, b in zip(compiled, self._compiled)):
            self._flags = [keras_models.trainable_flags(one.model) for one in self._parallels]
            self._compiled, self._held = compiled, []
        else:
            self._held = self._flags
        with self._training():
            for one in self._parallels:
                follow_thawed(one)
        self._programs, self._plain = [one.program for one in self._parallels], None
        over = [one for one in self._parallels if one.compute.inner_size > 1]
        self._graphs = None
        if over:
            calls = [calls_of(one, one.compute.inner_size > 1) for one in self._parallels]
            parts, devices = over[0].compute.data_size, over[0].compute.devices
            run = self._runs(calls)
            self._graphs = ByShape(lambda data: run(*data), parts, devices, over[0].warn_once)

    def _is_up_to_date(self) -> bool:
        """Whether there are graphs, of the programs that the models have now."""
        now = [one.program for one in self._parallels]
        return bool(self._programs) and all(a is b for a, b in zip(now, self._programs))

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        """Meanwhile, graphs made anew because of another function train what they trained before.

        That is what trained when the step was first called, or first after `compile`.
        """
        with contextlib.ExitStack() as stack:
            for flags in self._held:
                stack.enter_context(keras_models.trainable_as(flags))
            yield

    def _runs(self, calls: list[LayerCalls]) -> Callable:
        """The step, with calls over the mesh."""
        updates = [one.own_updates for one in self._parallels]
        applying = [functools.partial(one.applying, updates) for one in updates]

        def run(*data: Any, **named: Any) -> Any:
            with self._training():
                return run_over(calls, applying, lambda *data: self._step(*data, **named), *data)

        return run

    def _on_plain(self, *data: Any, **named: Any) -> Any:
        """Runs the step on one device per slice."""
        if self._plain is None:
            calls = [calls_of(one, over=False) for one in self._parallels]
            self._plain = tf.function(self._runs(calls), autograph=False, reduce_retracing=True)
        return self._plain(*data, **named)


def _refuse_moved(parallel: Parallel) -> None:
    """Refuses trained weights that are not where the model has placed them.

    Raises:
        ValueError: Another model has moved some.
    """
    if moved := moved_weights(parallel, parallel.trained):
        raise ValueError(
            "At level 3 each model stores weights as its own OptimizerConfig says, and the last "
            "one moves those that it shares. Give models that share weights one config, or a "
            "level up to 2. "
            f"Received: model={parallel.model.name!r} in kdist.function, moved={moved[:8]}"
        )


def _refuse_verify(parallel: Parallel) -> None:
    """Refuses to verify a step that no model has.

    Raises:
        ValueError: It is asked for.
    """
    if parallel.config.verify is not None:
        raise ValueError(
            "A step of kdist.function is none of a model's, so there is no first batch to verify. "
            "Leave verify out, and compare a step with that of a plain copy. Received: "
            f"{type(parallel.model).__name__} with verify={parallel.config.verify!r}"
        )
