"""Local optimizers: one Keras optimizer per device, over the variables that device updates.

The optimizer that the user compiled stays the logical one: its learning rate is shared by all, and
its slot variables become views of the local ones (`kdist.optimizer.logical_slots`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

from kdist._compat import keras_applied, keras_optimizers, keras_trainer, learning_rates
from kdist._compat.keras_applied import SEE_ALL
from kdist.graphs.instantiation import optimized_as_ever
from kdist.layers.lazy import Lazy
from kdist.optimizer.absent import Live, passed_over
from kdist.optimizer.settings import carry_settings, for_all_weights, share_variables
from kdist.optimizer.shared_steps import SharedSteps
from kdist.storage.row_views import RowView, scattered
from kdist.storage.variables import backing_of

import keras
import tensorflow as tf

ELEMENTWISE = (
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
    "ScheduleFreeAdamW",
)
"""Keras optimizers whose update of an element looks at that element alone."""


ALL_IN_ONE = "OptimizerConfig(state_on='host'), which updates all in one place"
"""Where an optimizer sees all weights together."""

ROW_WISE = ("SGD", "RMSprop", "Adadelta", "Adagrad")
"""Keras optimizers that, given rows of a table, write these rows of it and no others.

Without momentum. The averages of RMSprop and Adadelta fall in all rows, but these slots are not
sent anywhere.
"""


def leaf_optimizers(
    optimizer: Any, variables: Sequence[keras.Variable]
) -> list[tuple[Any, list[int]]]:
    """The optimizers that do math, each with the positions of the variables it updates.

    One entry for an ordinary optimizer; one per member for a `MultiOptimizer`.
    """
    if not isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return [(optimizer, list(range(len(variables))))]
    groups: dict[int, tuple[Any, list[int]]] = {}
    for i, variable in enumerate(variables):
        leaf = keras_optimizers.member_optimizer(optimizer, variable)
        groups.setdefault(id(leaf), (leaf, []))[1].append(i)
    return list(groups.values())


def needs_whole(optimizer: Any, variable: keras.Variable) -> bool:
    """True if the update of `variable` must see the whole tensor, not a shard of it.

    So for optimizers that use norms, factors or matrix products of the tensor (Lamb, Adafactor,
    Muon, and any class Keras does not ship), for per-variable `clipnorm`, and for constraints.
    """
    constrained = variable.constraint is not None
    return not is_elementwise(optimizer) or bool(optimizer.clipnorm) or constrained


def is_elementwise(optimizer: Any) -> bool:
    """True for an optimizer whose update of an element is known to look at that element alone."""
    if isinstance(optimizer, Lazy):
        return True
    name = type(optimizer).__name__
    shipped = type(optimizer) is getattr(keras.optimizers, name, None)
    return shipped and name in ELEMENTWISE


def shares_steps(optimizer: Any) -> bool:
    """Whether parameters that are alike share a trace: a lazy update reads and writes rows."""
    return is_elementwise(optimizer) and not isinstance(optimizer, Lazy)


def is_linear(optimizer: Any) -> bool:
    """True if an update adds gradients up, so that rows of a table may be summed before it.

    Keras squares, and clips, the rows of a gradient one by one, also where they are of one row. A
    lazy optimizer sums them itself.
    """
    if isinstance(optimizer, Lazy):
        return True
    clips = optimizer.clipvalue or optimizer.clipnorm or optimizer.global_clipnorm
    return type(optimizer) is keras.optimizers.SGD and not clips


def changes_rows_only(optimizer: Any, variable: keras.Variable) -> bool:
    """True if an update of a table from rows leaves all its other rows as they are, to the bit.

    What looks at, or writes, all rows says no: momentum, decay of weights or of their averages
    into them, accumulated gradients, clipping by a norm, constraints. A lazy optimizer writes other
    rows only where averages are written into them.
    """
    if isinstance(optimizer, Lazy):
        more = optimizer.gradient_accumulation_steps or optimizer.ema_overwrite_frequency
        return not needs_whole(optimizer, variable) and not more
    name = type(optimizer).__name__
    if name not in ROW_WISE or needs_whole(optimizer, variable):
        return False
    return not (
        getattr(optimizer, "momentum", 0)
        or optimizer.global_clipnorm
        or optimizer.gradient_accumulation_steps
        or optimizer.ema_overwrite_frequency
        or keras_optimizers.decays(optimizer, variable)
    )


def sees_some_alone(optimizer: Any, devices: int) -> str | None:
    """What the user should know of a class of which each device has one, for some of the weights.

    Args:
        optimizer: A leaf optimizer.
        devices: How many devices update weights by it.
    """
    name, kind = type(optimizer).__name__, keras_optimizers.own_class(optimizer)
    if devices < 2 or kind.__module__.split(".")[0] in ("keras", "kdist"):
        return None
    found = []
    if theirs := keras_applied.own_methods(optimizer, SEE_ALL):
        found.append(
            f"overrides {' and '.join(theirs)}: each of {devices} devices calls that with the "
            "gradients that it updates weights by. If it looks at all gradients together, as a "
            f"norm over them does, set {ALL_IN_ONE}"
        )
    if names := for_all_weights(optimizer):
        found.append(
            f"has {' and '.join(map(repr, names))} besides what it keeps of each weight: each of "
            f"{devices} devices has an optimizer of its own, which numbers the weights that it "
            "updates from 0 and sees no others. If the update of one weight writes what that of "
            f"another reads, or looks up a weight's entry by its number, set {ALL_IN_ONE}"
        )
    return f"optimizer {name!r} {'. It '.join(found)}" if found else None


def refuse_assigned_methods(optimizer: Any) -> None:
    """Refuses an optimizer of which a method was replaced on the object.

    Raises:
        ValueError: Naming the method.
    """
    if found := keras_applied.methods_of_object(optimizer):
        name = type(optimizer).__name__
        raise ValueError(
            "Each device updates its weights by an optimizer of its own, made from the class and "
            "the configuration: a method that is assigned to an object is not in it. Write a "
            f"subclass of {name} that has {found[0]}. Received: {name} {optimizer.name!r}, to "
            f"which {found[0]} was assigned"
        )


def clone(optimizer: Any) -> Any:
    """A fresh optimizer with the same settings that reads the same learning rate.

    `get_config` leaves out `exclude_from_weight_decay`, cannot express every schedule, and in a
    user's class often leaves out more: these are carried over directly.

    Raises:
        ValueError: A user's class cannot be made from its configuration, or a method was assigned
            to the object.
    """
    refuse_assigned_methods(optimizer)
    config = learning_rates.config_without_rate(optimizer)
    try:
        copy = type(optimizer).from_config(config)
    except TypeError as error:
        own = type(optimizer).__name__
        raise ValueError(
            "Each device updates its weights by an optimizer of its own, made by "
            f"{own}.from_config({own}.get_config()). Let __init__ take what Keras's optimizers "
            "take (**kwargs, handed on to super().__init__), or override get_config and "
            f"from_config. Received: {own}, with config {config}: {error}"
        ) from error
    carry_settings(copy, optimizer)
    share_variables(copy, optimizer)
    learning_rates.adopt_learning_rate(copy, optimizer)
    keras_optimizers.keep_one_copy(copy)
    return copy


class LocalOptimizer:
    """A device's optimizer and the local variables it updates.

    Attributes:
        device: TensorFlow device string.
        optimizer: The Keras optimizer that lives there.
        positions: Position of each unit in the update plan.
        variables: The local Keras variable of each unit.
        steps: The traces of its updates, those of other devices' copies too.
    """

    def __init__(
        self,
        logical: Any,
        device: str,
        positions: list[int],
        variables: list[keras.Variable],
        logical_variables: list[keras.Variable],
        steps: SharedSteps | None = None,
    ) -> None:
        self.steps = steps or SharedSteps(shares_steps(logical))
        self.device = device
        self.positions = positions
        self.variables = variables
        with tf.device(device):
            self.optimizer = clone(logical)
            self._learning_rate = learning_rates.LearningRate(self.optimizer)
            self._carry_weight_decay_rules(logical, logical_variables)
            keras_optimizers.update_through_keras_variables(self.optimizer, scatter_rows)
            if isinstance(self.optimizer, Lazy):
                read = functools.partial(read_rows, self.optimizer)
                object.__setattr__(self.optimizer, "read_rows", read)
            self.optimizer.build(variables)

    def _carry_weight_decay_rules(self, logical: Any, whole: list[keras.Variable]) -> None:
        excluded = [
            local
            for local, variable in zip(self.variables, whole)
            if not keras_optimizers.decays(logical, variable)
        ]
        keras_optimizers.exclude_from_decay(self.optimizer, excluded)

    def apply(
        self, gradients: list[Any], variables: list[keras.Variable], live: Live | None = None
    ) -> None:
        """Updates variables, of those numbered in `live` these elements; in the device's scope.

        The learning rate is fetched, or computed, once. (Keras reads it anew for every variable.)
        """
        with self._fixed_learning_rate():
            if variables:
                with (
                    self.steps.used_by(self.optimizer, self.variables),
                    passed_over(self.optimizer, self.variables, live or {}),
                ):
                    self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            else:
                keras_optimizers.apply_nothing(self.optimizer)

    def without_gradients(self, variables: list[keras.Variable]) -> None:
        """Does what an update does that needs no gradient; call it in the device's scope."""
        with self._fixed_learning_rate():
            keras_optimizers.decay_and_count(self.optimizer, variables)

    def _fixed_learning_rate(self) -> contextlib.AbstractContextManager[None]:
        with optimized_as_ever():
            rate = self._learning_rate()
        return learning_rates.fixed_learning_rate(self.optimizer, rate)

    def iterations(self) -> keras.Variable:
        """The raw step counter of this device."""
        return keras_optimizers.iterations_variable(self.optimizer)


def scatter_rows(variable: keras.Variable, method: str, slices: tf.IndexedSlices) -> bool:
    """Writes rows to a view on rows; False if the variable is another kind of view."""
    backing = backing_of(variable)
    if not isinstance(backing, RowView):
        return False
    if (mapped := keras_trainer.current_value(variable)) is not None:
        variable.assign(scattered(mapped, method, slices))
    else:
        backing.scatter(method, slices)
    return True


def read_rows(optimizer: Lazy, variable: Any, indices: Any) -> Any:
    """Rows of a variable; of a view on rows, from where these lie."""
    backing = backing_of(variable)
    if isinstance(backing, RowView):
        return backing.gather(indices)
    return Lazy.read_rows(optimizer, variable, indices)
