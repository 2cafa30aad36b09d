"""Every use of Keras internals that the engine needs, in one place.

Keras has no public way to do these things in 3.15; `tests/test_private.py` fails by name when one
of them moves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank
from keras.src.models.functional import Functional
from keras.src.optimizers import base_optimizer as keras_base_optimizer
from keras.src.trainers.compile_utils import CompileLoss

__all__ = [
    "TensorFlowTrainer",
    "add_loss_values",
    "apply_mask",
    "compiled_losses",
    "get_mask",
    "replaced_losses",
    "set_mask",
    "squeeze_or_expand_to_same_rank",
]


def get_mask(tensor: Any) -> Any:
    """The Keras mask that travels on a tensor, or None."""
    return keras_backend.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a Keras mask to a tensor."""
    keras_backend.set_keras_mask(tensor, mask)


def current_value(variable: keras.Variable) -> Any:
    """The value that the running `StatelessScope` maps a variable to, or None outside of one."""
    scope = get_stateless_scope()
    return None if scope is None else scope.get_current_value(variable)


def add_loss_values(scope: keras.StatelessScope) -> list[Any]:
    """What `add_loss` and activity regularizers collected in a scope."""
    return list(scope.losses)


@contextlib.contextmanager
def override_losses(model: keras.Model, values: Sequence[Any]) -> Iterator[None]:
    """Makes `model.losses` read as `values` (used where the whole batch's loss is computed)."""
    before = model._losses_override
    model._losses_override = list(values)
    try:
        yield
    finally:
        model._losses_override = before


def regularization_losses(model: keras.Model) -> list[Any]:
    """Weight regularization penalties, one per regularized variable, in the running scope."""
    return model._get_regularization_losses()


def compiled_losses(model: keras.Model) -> list[CompileLoss.Loss]:
    """The flat list of (path, loss, weight, name) of a built `CompileLoss`; empty without one."""
    compiled = model._compile_loss
    return list(compiled._flat_losses) if compiled is not None else []


def loss_trackers(model: keras.Model) -> list[keras.metrics.Metric]:
    """The per-output loss metrics, one per compiled loss if there is more than one."""
    compiled = model._compile_loss
    return list(compiled.metrics) if compiled is not None else []


@contextlib.contextmanager
def replaced_losses(model: keras.Model, losses: Sequence[Any]) -> Iterator[None]:
    """Swaps the compiled losses, and silences their trackers, for the time of one trace."""
    compiled = model._compile_loss
    if compiled is None:
        yield
        return
    before, trackers = compiled._flat_losses, compiled._metrics
    compiled._flat_losses = [
        entry._replace(loss=loss) for entry, loss in zip(before, losses, strict=True)
    ]
    compiled._metrics = [None] * len(before)
    try:
        yield
    finally:
        compiled._flat_losses, compiled._metrics = before, trackers


def build_from_specs(model: keras.Model, specs: Any) -> None:
    """Builds layers, metrics, losses and the optimizer from the specs of one batch."""
    model._symbolic_build(data_batch=specs)


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """The metric behind `logs["loss"]`."""
    return model._loss_tracker


def compiled_metrics(model: keras.Model) -> keras.metrics.Metric | None:
    """The `CompileMetrics` container, or None."""
    return model._compile_metrics


def tf_variable(variable: keras.Variable) -> tf.Variable:
    """The `tf.Variable` behind a Keras variable."""
    return variable._value


def write(variable: keras.Variable, value: Any) -> tf.Operation | None:
    """Assigns a variable that is no view; the operation that does it, None outside of graphs."""
    target = variable._value
    op = target.assign(tf.cast(value, target.dtype), read_value=False)
    return op if isinstance(op, tf.Operation) else None


def set_tf_variable(variable: keras.Variable, value: tf.Variable | None) -> None:
    """Replaces (or drops) the `tf.Variable` behind a Keras variable."""
    variable._value = value


def autocast(variable: keras.Variable, value: Any) -> Any:
    """Applies the running autocast scope, as `Variable.value` does."""
    return variable._maybe_autocast(value)


def rename(variable: keras.Variable, like: keras.Variable) -> None:
    """Gives a local variable the path of its logical one (weight-decay rules, Muon need it)."""
    variable._path = like.path
    variable._name = like.name


def adopt_learning_rate(optimizer: Any, source: Any) -> None:
    """Makes `optimizer` read the learning rate (variable or schedule) of `source`."""
    object.__setattr__(optimizer, "_learning_rate", source._learning_rate)


@contextlib.contextmanager
def fixed_learning_rate(optimizer: Any) -> Iterator[None]:
    """Meanwhile, an optimizer reads its learning rate variable's value as of now."""
    shared = optimizer._learning_rate
    if not isinstance(shared, keras.Variable):
        yield
        return
    rate = tf.identity(shared.value)
    object.__setattr__(optimizer, "_learning_rate", lambda: rate)
    try:
        yield
    finally:
        object.__setattr__(optimizer, "_learning_rate", shared)


def iterations_variable(optimizer: Any) -> keras.Variable:
    """The raw step counter (micro-steps under gradient accumulation)."""
    return optimizer._iterations


def accumulator(optimizer: Any, variable: keras.Variable) -> keras.Variable | None:
    """The gradient accumulator of a variable, or None without accumulation."""
    if not optimizer.gradient_accumulation_steps:
        return None
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]


def weight_decay_rules(optimizer: Any) -> tuple[set, Any]:
    """What `exclude_from_weight_decay` stored: (variable keys, compiled name pattern)."""
    return (
        getattr(optimizer, "_exclude_from_weight_decay", set()),
        getattr(optimizer, "_exclude_from_weight_decay_pattern", None),
    )


def set_weight_decay_rules(optimizer: Any, keys: set, pattern: Any) -> None:
    """Carries `exclude_from_weight_decay` over to another optimizer."""
    optimizer._exclude_from_weight_decay = keys
    optimizer._exclude_from_weight_decay_pattern = pattern


def variable_key(optimizer: Any, variable: keras.Variable) -> Any:
    """The key under which an optimizer knows a variable."""
    return optimizer._var_key(variable)


def call_flat(concrete: Any, inputs: list[Any], captures: list[Any]) -> Any:
    """Calls a concrete function with captures of the caller's choice (DTensors, on a mesh)."""
    return concrete._call_flat(inputs, captures)


def is_view(variable: keras.Variable) -> bool:
    """Whether no `tf.Variable` of its own is behind a Keras variable (see `kdist.variables`)."""
    return variable._value is None


def model_strategy(model: keras.Model) -> Any:
    """The `tf.distribute.Strategy` in whose scope a model was built, or None."""
    return model._distribute_strategy


def set_model_strategy(model: keras.Model, strategy: Any) -> None:
    """Replaces the strategy that Keras's trainer would use."""
    model._distribute_strategy = strategy


def set_optimizer_strategy(optimizer: Any, strategy: Any) -> None:
    """Replaces the strategy that an optimizer would create variables with."""
    optimizer._distribution_strategy = strategy


def keep_one_copy(optimizer: Any) -> None:
    """Makes an optimizer create slots where the device in scope says, whatever strategy is there.

    On TensorFlow slots are colocated through the strategy, which has to know their references.
    """
    create = keras_base_optimizer.BaseOptimizer.add_variable_from_reference
    object.__setattr__(
        optimizer, "add_variable_from_reference", functools.partial(create, optimizer)
    )


def member_optimizer(optimizer: Any, variable: keras.Variable) -> Any:
    """The member of a `MultiOptimizer` that updates a variable."""
    if not optimizer.built:
        return optimizer._optimizer_map(variable)
    return optimizer.optimizers[optimizer._var_to_optimizer_idx[optimizer._var_key(variable)]]


def build_scope(optimizer: Any) -> Any:
    """The name scope in which Keras's first step builds an optimizer: it gives slots their paths.

    `apply` opens one; that of a `MultiOptimizer` does not.
    """
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return contextlib.nullcontext()
    return keras.name_scope(optimizer.name, caller=optimizer)


def swap_keras_variables(callback: keras.callbacks.SwapEMAWeights) -> None:
    """Makes `SwapEMAWeights` take its backend-neutral branch, which assigns Keras variables."""
    callback._tf_swap_variables = callback._backend_swap_variables
    callback._tf_finalize_ema_values = callback._backend_finalize_ema_values


def update_through_keras_variables(optimizer: Any, scatter: Callable) -> None:
    """Makes one optimizer assign through `keras.Variable`, where Keras takes the `tf.Variable`.

    For variables that are views (see `kdist.variables`): parts of one, or kept in another format.

    Args:
        optimizer: A Keras optimizer.
        scatter: `scatter(variable, method, slices) -> bool`: tries to write rows; False if the
            variable cannot take them.
    """
    own: Any = type(optimizer)

    def through(name: str) -> Callable:
        def assign(variable: Any, value: Any) -> None:
            if not isinstance(variable, keras.Variable) or not is_view(variable):
                getattr(own, name)(optimizer, variable, value)
                return
            value = tf.cast(value, variable.dtype)
            method = {"assign": "scatter_update"}.get(name, name.replace("assign", "scatter"))
            if isinstance(value, tf.IndexedSlices) and not scatter(variable, method, value):
                value = tf.convert_to_tensor(value)
            if not isinstance(value, tf.IndexedSlices):
                getattr(variable, name)(value)

        return assign

    for name in ("assign", "assign_add", "assign_sub"):
        object.__setattr__(optimizer, name, through(name))
    object.__setattr__(optimizer, "__class__", _without_strategies(own))


def own_class(optimizer: Any) -> type:
    """An optimizer's class as its author wrote it; see `update_through_keras_variables`."""
    return getattr(type(optimizer), "_kdist_own_class", type(optimizer))


_OF_STRATEGIES = (
    "_apply_weight_decay",
    "_backend_update_step",
    "_overwrite_model_variables_with_average_value",
    "_backend_increment_gradient_accumulators",
)


@functools.cache
def _without_strategies(own: type) -> type:
    """An optimizer's class with Keras's backend-neutral methods in the place of TensorFlow's.

    What the class itself overrides stays, and calls those (Nadam does).
    """
    methods = {name: getattr(keras_base_optimizer.BaseOptimizer, name) for name in _OF_STRATEGIES}
    neutral: Any = type("Neutral", (keras.optimizers.Optimizer,), methods)
    body = {"__module__": own.__module__, "__doc__": own.__doc__, "_kdist_own_class": own}
    return type(own.__name__, (own, neutral), body)


def functional_of(model: Any) -> Any:
    """The `Functional` that a Functional or built Sequential model runs, or None.

    None also for models whose `call` is not Keras's own: their graph is not what they compute.
    """
    call = getattr(type(model), "call", None)
    if isinstance(model, keras.Sequential):
        return model._functional if call is keras.Sequential.call else None
    return model if isinstance(model, Functional) and call is Functional.call else None


def nodes_in_order(functional: Any) -> list[Any]:
    """The nodes of a `Functional` in the order in which Keras runs them, without its inputs.

    Each has an `operation`, `arguments` (`args`, `kwargs`, `keras_tensors`, `fill_in`) and flat
    `outputs`.
    """
    by_depth = functional._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in nodes if not node.is_input]


def flat_layers(layer: keras.Layer) -> list[keras.Layer]:
    """A layer and all layers inside it, at any depth, itself first."""
    return list(layer._flatten_layers())


def calls_of(layer: keras.Layer) -> list[Any]:
    """The calls of a layer on symbolic tensors: nodes with `arguments` and `outputs`."""
    return list(layer._inbound_nodes)


def compute_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool
) -> Any:
    """The model's loss, through its own `compute_loss`, whatever arguments that takes."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


def flat_inputs(functional: Any, inputs: Any) -> list[Any]:
    """Inputs of a `Functional` as its call takes them: flat, as tensors, of the expected ranks.

    An optional input that is not given is None.
    """
    return list(functional._standardize_inputs(inputs))


@contextlib.contextmanager
def as_model_call(layer: keras.Layer) -> Iterator[None]:
    """Makes a layer that stands for a part of a model take inputs as they are, as a model does."""
    before = layer._convert_input_args, layer._allow_non_tensor_positional_args
    layer._convert_input_args, layer._allow_non_tensor_positional_args = False, True
    try:
        yield
    finally:
        layer._convert_input_args, layer._allow_non_tensor_positional_args = before


def takes_training(operation: Any) -> bool:
    """Whether a `Functional` passes its `training` argument on to an operation."""
    return getattr(operation, "_call_has_training_arg", False)


def pack_outputs(functional: Any, outputs: Sequence[Any]) -> Any:
    """Flat outputs of a `Functional` in the structure that its `call` returns."""
    packed = keras.tree.pack_sequence_as(functional._outputs_struct, list(outputs))
    return packed


def model_outputs(functional: Any, outputs: Sequence[Any]) -> Any:
    """What calling a `Functional` returns for flat outputs: a single one without its list."""
    packed = pack_outputs(functional, outputs)
    return packed[0] if isinstance(packed, list | tuple) and len(packed) == 1 else packed


@contextlib.contextmanager
def interpreted(functional: Any, run: Callable) -> Iterator[None]:
    """Meanwhile, a `Functional` computes its outputs by `run(functional, inputs, operation_fn)`.

    Everything around (standardized inputs, masks, autocast, the model's own losses) stays Keras's.
    """

    def through_graph(
        inputs: Any, operation_fn: Callable = lambda op: op, call_fn: Any = None
    ) -> Any:
        return run(functional, keras.tree.flatten(inputs), operation_fn)

    object.__setattr__(functional, "_run_through_graph", through_graph)
    try:
        yield
    finally:
        object.__delattr__(functional, "_run_through_graph")


def run_after(operation: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Makes an operation of the graph being traced wait for others."""
    operation._add_control_inputs([op for op in others if op is not operation])


def run_independently(operation: tf.Operation | None) -> None:
    """Takes a stateful operation of the graph being traced out of TensorFlow's automatic order.

    A `tf.function` runs everything that is stateful and has no variable (a clock, an assertion, a
    function with one inside) one after the other, in the order of the trace, on all devices.
    """
    if operation is not None:
        manager = operation.graph.experimental_acd_manager
        if manager is not None:
            manager.run_independently(operation)


ASSIGNMENTS = ("assign", "assign_add", "assign_sub")
"""The methods through which a Keras optimizer writes variables."""


def route_assignments(optimizer: Any, write: Callable[[str, Any, Any], bool]) -> None:
    """Offers every assignment of an optimizer to `write` first.

    On TensorFlow an optimizer writes to the `tf.Variable` behind a Keras variable. A variable that
    is a view has none.

    Args:
        optimizer: The one instance that is changed.
        write: Gets the name of the method, the variable and the value; returns whether it wrote.
    """

    def routed(name: str, original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def method(variable: Any, value: Any) -> None:
            if not write(name, variable, value):
                original(variable, value)

        return method

    for name in ASSIGNMENTS:
        object.__setattr__(optimizer, name, routed(name, getattr(optimizer, name)))


def decays(optimizer: Any, variable: keras.Variable) -> bool:
    """Whether an optimizer applies its weight decay to a variable."""
    return optimizer.weight_decay is not None and optimizer._use_weight_decay(variable)
