"""One trace of an optimizer's arithmetic for all parameters that are alike, on all devices.

A large model updates few shapes many times: those of a layer's weights, once for each layer and, if
the update is spread over the replicas, once for each replica. The update of a parameter is a
function that graphs call with the parameter, its slots and its gradient, as other programs of
kdist are: traced once, and prepared once on each device.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from kdist._compat import dtensor_internals, function_graphs, keras_optimizers, variable_internals
from kdist._compat.keras_trainer import KEY
from kdist.sharding.placement import Index
from kdist.storage.row_views import RowsBacking, part_shape
from kdist.storage.sparse import is_sparse
from kdist.storage.variables import backing_of

import keras
import tensorflow as tf
from tensorflow.core.framework import function_pb2

_names = (f"kdist_update_{i}" for i in itertools.count())


class SharedSteps:
    """The traces of one optimizer that the user compiled, for its local copies.

    Args:
        share: Whether its updates of parameters that are alike are the same arithmetic. An
            optimizer that Keras does not ship may go by a parameter's name.

    Attributes:
        traces: What has been traced, by what parameters that share it have in common.
    """

    def __init__(self, share: bool) -> None:
        self._share = share
        self.traces: dict[Hashable, _Trace] = {}

    @contextlib.contextmanager
    def used_by(self, optimizer: Any, variables: Sequence[keras.Variable]) -> Iterator[None]:
        """Meanwhile, a local optimizer updates its variables by these traces where it can.

        Args:
            optimizer: A built copy of the optimizer.
            variables: What it was built on.
        """
        if not self._share or tf.executing_eagerly():
            yield
            return
        local = _Local(optimizer, variables)

        def step(plain: Callable, gradient: Any, variable: Any, rate: Any) -> None:
            state = local.state_of(variable)
            if state is None or (is_sparse(gradient) and state.writes_rows):
                plain(gradient, variable, rate)
                return
            given = [(one.shape, one.dtype) for one in _tensors(gradient)]
            key = (*state.key, given, rate.dtype)
            if (trace := self.traces.get(repr(key))) is None:
                trace = self.traces[repr(key)] = _Trace(plain, state, gradient, rate)
            trace(state, gradient, rate)

        with keras_optimizers.steps_through(optimizer, step):
            yield


class _State:
    """What the update of one variable reads and writes.

    A view on parts of other variables is read inside, from where these begin; unless its value has
    been put together already.

    Attributes:
        variable: The variable.
        argument: What Keras hands to `update_step` for it.
        handles: Of variables that are updated, or read, where they are, by name.
        values: Variables whose values are handed over, by name: those that updates only read, and
            a view that is known.
        parts: If a view is read inside, those of its backing.
        is_view: Whether the new value is returned, not written.
        writes_rows: Whether rows that change are to be written where they lie.
        key: States with equal keys share a trace.
    """

    def __init__(
        self,
        variable: keras.Variable,
        argument: Any,
        slots: dict[str, keras.Variable],
        shared: dict[str, keras.Variable],
    ) -> None:
        self.variable, self.argument = variable, argument
        backing = backing_of(variable)
        self.is_view = backing is not None
        self.writes_rows = self.is_view and not backing.held
        self.parts: list[tuple[keras.Variable, Index | None]] = []
        if self.is_view and not backing.is_known:
            self.parts = backing.parts
        read = {f"part {i}": one for i, (one, _) in enumerate(self.parts)}
        own = read if self.is_view else {"variable": variable}
        self.handles = {
            name: keras_optimizers.handle(one) for name, one in {**own, **slots}.items()
        }
        known = {"variable": variable} if self.is_view and not self.parts else {}
        self.values = {**shared, **known}
        everything = {**shared, **slots, **read, "variable": variable}
        shapes = tuple(None if i is None else part_shape(v, i) for v, i in self.parts)
        alike = tuple((n, tuple(v.shape), v.dtype) for n, v in everything.items())
        self.key = (*alike, shapes, self.is_view)

    @property
    def starts(self) -> list[Any]:
        """Where the parts that are read inside begin, dim by dim, on the device in scope."""
        begins = [one.start for _, index in self.parts for one in index or ()]
        return [tf.constant(begins, tf.int32)] * bool(self.parts)

    def read(self, starts: Any) -> Any:
        """The value of the view, inside a trace."""
        pieces, dim = [], 0
        for local, index in self.parts:
            value = tf.convert_to_tensor(local.value)
            if index is not None:
                rest = [0] * (len(value.shape) - len(index))
                begin = tf.concat([starts[dim : dim + len(index)], rest], 0)
                value = tf.slice(value, begin, part_shape(local, index))
                dim += len(index)
            pieces.append(value)
        return backing_of(self.variable).joined(pieces)


class _Local:
    """A local optimizer's variables."""

    def __init__(self, optimizer: Any, variables: Sequence[keras.Variable]) -> None:
        self.optimizer, self.variables = optimizer, list(variables)
        self._families = keras_optimizers.families(optimizer)
        self._scalars = keras_optimizers.scalars(optimizer)

    def state_of(self, argument: Any) -> _State | None:
        """What an update reads and writes; None if some of it is in another format."""
        number = keras_optimizers.index_of(self.optimizer, argument)
        found = {name: one[number] for name, one in self._families.items()}
        slots = {name: slot for name, slot in found.items() if slot is not None}
        variable = self.variables[number]
        backing = backing_of(variable)
        plain = backing is None or isinstance(backing, RowsBacking)
        if not plain or any(backing_of(slot) is not None for slot in slots.values()):
            return None
        return _State(variable, argument, slots, self._scalars)


class _Trace:
    """The update of one variable as a function of its state, its gradient and the learning rate."""

    def __init__(self, plain: Callable, state: _State, gradient: Any, rate: Any) -> None:
        count, dense = len(_tensors(gradient)), tuple(state.variable.shape)

        def update(*given: Any) -> list[Any]:
            found = given[0]
            if count > 1:
                shape = tf.constant(dense, given[1].dtype)
                found = tf.IndexedSlices(given[0], given[1], shape)
            rate, *values = given[count:]
            mapped = list(zip(state.values.values(), values))
            if state.parts:
                mapped.append((state.variable, tf.identity(state.read(values[-1]))))
            for variable, value in mapped:
                if variable is state.variable:
                    variable_internals.give_key(value, variable.__dict__[KEY])
            with keras.StatelessScope(state_mapping=mapped) as scope:
                plain(found, state.argument, rate)
            return [scope.get_current_value(state.variable)] if state.is_view else []

        with tf.init_scope():
            specs = [tf.TensorSpec(one.shape, one.dtype) for one in _tensors(gradient)]
            rest = [rate, *(one.value for one in state.values.values()), *state.starts]
            concrete = tf.function(update, autograph=False).get_concrete_function(
                *specs, *(tf.TensorSpec(one.shape, one.dtype) for one in rest)
            )
        names = {id(handle): name for name, handle in state.handles.items()}
        self._captured = [names[id(handle)] for handle in concrete.captured_inputs]
        self._dtypes = [one.dtype for one in concrete.outputs]
        definition = function_pb2.FunctionDef()
        definition.CopyFrom(concrete.function_def)
        definition.signature.name = next(_names)
        # Nor does TensorFlow make a variant of its own for each call that hands over a constant,
        # and prepare them all: the rows that a call reads are one.
        for name, value in {**function_graphs.of_one_device(), "_nospecialize": True}.items():
            definition.attr[name].b = value
        self._registered = dtensor_internals.Registered(definition, concrete)

    def __call__(self, state: _State, gradient: Any, rate: Any) -> None:
        """Updates a variable, on the device in scope."""
        values = [tf.convert_to_tensor(one.value) for one in state.values.values()]
        handles = [state.handles[name] for name in self._captured]
        given = [*_tensors(gradient), rate, *values, *state.starts, *handles]
        _, results = self._registered.call(given, self._dtypes)
        if state.is_view:
            results[0].set_shape(state.variable.shape)
            state.variable.assign(results[0])


def _tensors(gradient: Any) -> list[Any]:
    """What a gradient consists of."""
    return [gradient.values, gradient.indices] if is_sparse(gradient) else [gradient]
