"""Keras internals of optimizers."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kdist._compat.keras_trainer import KEY, is_view, tf_variable

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as tensorflow_optimizer
from keras.src.optimizers import base_optimizer as keras_base_optimizer


@contextlib.contextmanager
def steps_through(
    optimizer: Any, step: Callable[[Callable, Any, Any, Any], None]
) -> Iterator[None]:
    """Meanwhile, an optimizer updates each variable by calling `step`.

    Args:
        optimizer: A Keras optimizer.
        step: Gets the optimizer's own `update_step`, or that of a block around this one, and what
            that would have been called with.
    """
    around = vars(optimizer).get("update_step")
    object.__setattr__(optimizer, "update_step", functools.partial(step, optimizer.update_step))
    try:
        yield
    finally:
        if around is None:
            object.__delattr__(optimizer, "update_step")
        else:
            object.__setattr__(optimizer, "update_step", around)


def index_of(optimizer: Any, variable: Any) -> int:
    """Position of a variable, as an optimizer hands it to `update_step`, among its variables."""
    return optimizer._get_variable_index(variable)


def positions(optimizer: Any, variables: Sequence[keras.Variable]) -> list[int]:
    """Where a built optimizer keeps the state of each of some variables.

    Raises:
        ValueError: It was built for others.
    """
    known = {id(v): n for n, v in enumerate(optimizer._trainable_variables)}
    unknown = [v.path for v in variables if id(v) not in known]
    if unknown:
        raise ValueError(
            "The optimizer was built for other variables: of another model, for some of this one "
            "(by a train_step of one's own that applies it to those), or before layers were made "
            "trainable. Compile with a new optimizer. Received: "
            f"{type(optimizer).__name__} {optimizer.name!r}, without state for {unknown}"
        )
    return [known[id(v)] for v in variables]


def handle(variable: keras.Variable) -> Any:
    """The resource behind a variable."""
    return tf_variable(variable).handle


def iterations_variable(optimizer: Any) -> keras.Variable:
    """The raw step counter (micro-steps under gradient accumulation)."""
    return optimizer._iterations


ACCUMULATORS = "_accumulated_gradients"
"""The attribute of an optimizer that holds the sums of its gradients, see `families`."""


def accumulator(optimizer: Any, variable: keras.Variable) -> keras.Variable | None:
    """The gradient accumulator of a variable, or None without accumulation."""
    if not optimizer.gradient_accumulation_steps:
        return None
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]


def exclude_from_decay(optimizer: Any, variables: Iterable[keras.Variable]) -> None:
    """Makes an optimizer apply its weight decay to all but some variables."""
    optimizer._exclude_from_weight_decay = {variable_key(optimizer, v) for v in variables}
    optimizer._exclude_from_weight_decay_pattern = None
    optimizer._exclude_from_weight_decay_cache = {}  # what was asked before is no more


def carry_decay_rules(optimizer: Any, source: Any) -> None:
    """Excludes from an optimizer's weight decay what another's excludes; configs leave it out."""
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(source, name):
            setattr(optimizer, name, getattr(source, name))


def variable_key(optimizer: Any, variable: keras.Variable) -> Any:
    """The key under which an optimizer knows a variable.

    Keras takes it from the variable's value, and to read a view is to put its parts together.
    """
    known = variable.__dict__.get(KEY) if isinstance(variable, keras.Variable) else None
    return type(optimizer)._var_key(optimizer, variable) if known is None else known


@contextlib.contextmanager
def built_without_values() -> Iterator[None]:
    """Meanwhile, building an optimizer reads no view, neither for its key nor for its device.

    Keras would put a view's parts together for each. It puts a slot where its variable is, which
    says nothing of a view; slots of views become views themselves.
    """
    own: Any = tensorflow_optimizer.TFOptimizer
    of_keras = {name: getattr(own, name) for name in ("_var_key", "add_variable_from_reference")}

    def key(self: Any, variable: Any) -> Any:
        known = getattr(variable, "__dict__", {}).get(KEY)
        return of_keras["_var_key"](self, variable) if known is None else known

    def create(self: Any, reference_variable: Any, *given: Any, **options: Any) -> Any:
        view = KEY in getattr(reference_variable, "__dict__", {})
        base = keras_base_optimizer.BaseOptimizer.add_variable_from_reference
        make = base if view else of_keras["add_variable_from_reference"]
        return make(self, reference_variable, *given, **options)

    own._var_key = key
    own.add_variable_from_reference = create
    try:
        yield
    finally:
        for name, method in of_keras.items():
            setattr(own, name, method)


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
    return optimizer.optimizers[optimizer._var_to_optimizer_idx[variable_key(optimizer, variable)]]


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

    For views (see `kdist.storage.variables`): parts of a variable, or kept in another format. And
    for all: a strategy's sum over the one replica, which Keras makes, would let no variable be
    updated before the gradients of all have come.

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
    object.__setattr__(optimizer, "_var_key", functools.partial(variable_key, optimizer))
    object.__setattr__(optimizer, "__class__", _without_strategies(own))


def attributes_of_keras(optimizer: Any) -> frozenset[str]:
    """Names of the attributes that Keras's classes give an optimizer, built or not.

    Of a user's class the others are settings and state of the user's own.
    """
    kinds = [one for one in type(optimizer).__mro__ if one.__module__.split(".")[0] == "keras"]
    return next(filter(None, map(_attributes, kinds)))


@functools.cache
def _attributes(kind: Any) -> frozenset[str]:
    """What a built instance of a class has; nothing for one that wraps others.

    In a thread of its own: scopes of strategies and graphs, which are a thread's, are not around.
    """

    def found() -> frozenset[str]:
        with contextlib.suppress(TypeError):
            plain = kind(learning_rate=0.1)
            plain.build([keras.Variable(0.0)])
            decay = ("_exclude_from_weight_decay" + end for end in ("", "_pattern", "_cache"))
            more = ("_accumulated_gradients", "_model_variables_moving_average", *decay)
            return frozenset(vars(plain)).union(more)
        return frozenset()

    with ThreadPoolExecutor(1) as apart:
        return apart.submit(found).result()


def own_class(optimizer: Any) -> type:
    """An optimizer's class as its author wrote it; see `update_through_keras_variables`."""
    return getattr(type(optimizer), "_kdist_own_class", type(optimizer))


def _update_each(
    optimizer: Any, gradients: Any, variables: Sequence[Any], learning_rate: Any
) -> None:
    """`_backend_update_step`; optimizers of users' own get the variables that Keras hands them."""
    for gradient, variable in zip(gradients, variables):
        given = variable if is_view(variable) else variable.value
        optimizer.update_step(gradient, given, learning_rate)


_OF_STRATEGIES = (
    "_apply_weight_decay",
    "_overwrite_model_variables_with_average_value",
    "_backend_increment_gradient_accumulators",
)


@functools.cache
def _without_strategies(own: type) -> type:
    """An optimizer's class with Keras's backend-neutral methods in the place of TensorFlow's.

    What the class itself overrides stays, and calls those (Nadam does).
    """
    methods = {name: getattr(keras_base_optimizer.BaseOptimizer, name) for name in _OF_STRATEGIES}
    methods["_backend_update_step"] = _update_each
    neutral: Any = type("Neutral", (keras.optimizers.Optimizer,), methods)
    body = {"__module__": own.__module__, "__doc__": own.__doc__, "_kdist_own_class": own}
    return type(own.__name__, (own, neutral), body)


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
    """Whether an optimizer applies its weight decay to a variable.

    Keras searches the patterns of `exclude_from_weight_decay(var_names=...)` in the name of the
    `tf.Variable`, which begins with the layer's; a variable kept in parts has no such name.
    """
    known = types.SimpleNamespace(
        name=f"{variable.path}:0", _unique_id=variable_key(optimizer, variable)
    )
    return decays_given(optimizer, known)


def decays_given(optimizer: Any, variable: Any) -> bool:
    """The same for a variable as `update_step` is given it."""
    return optimizer.weight_decay is not None and optimizer._use_weight_decay(variable)


def apply_nothing(optimizer: Any) -> None:
    """What `apply` does besides its updates: averages of weights and step counts move on.

    Keras does it whenever some variable has a gradient.
    """
    optimizer._backend_apply_gradients([], [])
    optimizer._iterations.assign_add(1)


def updated_by(optimizer: Any) -> list[keras.Variable]:
    """The weights that an optimizer was built for."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return list(getattr(optimizer, "_trainable_variables", ()))


def decay_and_count(optimizer: Any, variables: list[keras.Variable]) -> None:
    """What `apply` does to the weights, and to its own state, that needs no gradient."""
    steps = optimizer.gradient_accumulation_steps
    if steps:
        # What rows have accumulated is read behind this step's, which do not come.
        if getattr(optimizer, "accumulates_rows", False):
            return

        def due() -> None:
            optimizer._apply_weight_decay(variables)
            optimizer._backend_reset_gradient_accumulators()

        # The branch that updates does so before its gradients come; the count is behind them.
        count = tf.convert_to_tensor(optimizer._iterations.value) + 1
        tf.cond(count % steps == 0, due, lambda: None)
        return
    optimizer._apply_weight_decay(variables)
    # Averages of weights are made of what the gradients give.
    if optimizer.use_ema:
        optimizer._iterations.assign_add(1)
    else:
        apply_nothing(optimizer)


def families(optimizer: Any) -> dict[str, list]:
    """Per-variable state of an optimizer: attribute name -> one variable (or None) per variable."""
    variables = getattr(optimizer, "_trainable_variables", [])
    trainable, count, found = {id(v) for v in variables}, len(variables), {}
    for name, value in vars(optimizer).items():
        if name in ("_variables", "_trainable_variables") or not isinstance(value, list):
            continue
        slots = [v for v in value if isinstance(v, keras.Variable)]
        complete = all(v is None or isinstance(v, keras.Variable) for v in value)
        if len(value) == count and slots and complete and id(slots[0]) not in trainable:
            found[name] = list(value)
    return found


def scalars(optimizer: Any) -> dict[str, keras.Variable]:
    """State of an optimizer that belongs to no variable (step counter, Nadam's product)."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, keras.Variable) and name != "_learning_rate"
    }


def clip_by(optimizer: Any, clip: Callable[[Sequence[Any]], list[Any]]) -> None:
    """Has an optimizer clip all gradients of a step by a function."""
    object.__setattr__(optimizer, "_clip_gradients", clip)


def accumulate(optimizer: Any, gradients: Sequence[Any], sums: Sequence[Any]) -> None:
    """Adds gradients to their accumulators, as Keras does in a step that does not update."""
    optimizer._backend_increment_gradient_accumulators(gradients, sums)


def update(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Updates variables by gradients that are clipped already, and does nothing else."""
    optimizer._backend_update_step(gradients, variables, optimizer.learning_rate)
