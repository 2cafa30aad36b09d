"""Stages of one device each; `kdist.runtime.inner_axes` has the same for slices of several.

Where a model that DTensor cannot expand has inner axes after all, each stage runs on the first
device of its slice, on whole weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.config.without_effect import WithoutEffect
from kdist.dtensor.sharded import Sharded
from kdist.dtensor.stitching import Stitcher
from kdist.dtensor.traced import as_program
from kdist.optimizer.slice_gradients import SliceGradients
from kdist.program.model_state import ModelState
from kdist.program.state import replica_seed
from kdist.program.vjp import as_node
from kdist.runtime.recomputing import all_again
from kdist.sharding.mesh import Topology
from kdist.stages.eager_functions import EagerFunctions
from kdist.stages.functions import NO_TURNS, StageFunctions
from kdist.stages.penalties import penalty_function
from kdist.storage.sparse import LookUp
from kdist.storage.variables import Stored, stored

import keras
import tensorflow as tf


class OneDevice:
    """Runs a stage's functions on the first device of a slice.

    Args:
        state: The model's variables.
        entries: `Stored` of each of `ModelState.params`.
        topology: The mesh as programs see it.
        storage: The mesh as weights are stored on it.
        jit_compile: Compile functions with XLA.
        eager: Run op by op, for debugging.

    Attributes:
        exact: Whether a function is of one size of micro-batches.
        functions: Makes the functions of a virtual stage.
        in_storage: Per slice and device of it, the coordinate in the mesh that stores weights.
        places: Per slice, the coordinates of the devices that compute.
        draws_alike: See `kdist.stages.body.Backend`.
        idle: Axes that cut nothing, which could.
    """

    exact, draws_alike, gather_first = False, True, False
    idle: Sequence[WithoutEffect] = ()

    def __init__(
        self,
        state: ModelState,
        entries: Sequence[Stored],
        topology: Topology,
        storage: Topology,
        *,
        jit_compile: bool = False,
        eager: bool = False,
    ) -> None:
        self.state, self.entries, self.topology = state, list(entries), topology
        self.storage = storage
        self.in_storage = topology.places_in(storage)
        self._places = [one[0][0] for one in self.in_storage]
        self.places = [[(s, 0)] for s in self._places]
        self.jit_compile = jit_compile
        self.functions = EagerFunctions if eager else StageFunctions

    @property
    def storage_devices(self) -> list[list[str]]:
        """Where what slices gather is put together, on the mesh that stores weights."""
        return [[one.devices[0]] for one in self.storage.slices]

    def devices(self, s: int) -> list[str]:
        """Where slice `s` computes."""
        return [self.topology.slices[s].devices[0]]

    def tracing(self) -> contextlib.AbstractContextManager:
        """Around the trace of a stage."""
        return contextlib.nullcontext()

    def taken(self, variable: keras.Variable, value: Any) -> Any:
        """See `kdist.stages.body.Backend`."""
        return value

    def like(self, value: Any, other: Any) -> Any:
        """See `kdist.stages.body.Backend`."""
        return value

    def seen(self, outputs: Any) -> Any:
        """See `kdist.stages.body.Backend`."""
        return outputs

    def hands_on(self, tensor: Any) -> bool:
        """See `kdist.stages.body.Backend`."""
        return True

    def laid_out(self, gradient: Any, param: Any, position: int, by_batch: bool = False) -> Any:
        """See `kdist.stages.body.Backend`."""
        return gradient

    shares_memory = False
    """Whether the devices of a slice read what one of them made where it lies."""

    def part(
        self, concrete: Any, late: Sequence[int] = (), turns: Mapping[str, int] = NO_TURNS
    ) -> StageFunction:
        """A concrete function of a stage, to call with a slice and tensors.

        Args:
            concrete: The function.
            late: Of one in which forward operations run again, the inputs that these wait for.
            turns: By operation that devices of a slice sum, whose turn that is.
        """
        if not late or self.jit_compile:  # XLA orders by itself what it compiles
            return StageFunction(as_node(concrete, jit_compile=self.jit_compile))
        stitcher = Stitcher(as_program(concrete))
        all_again(stitcher, late)
        function = stitcher.stitch([""])

        def call(*inputs: Any) -> list[Any]:
            return function([[*inputs, *concrete.captured_inputs]])[1][0]

        return StageFunction(call)

    def read(self, variable: keras.Variable, s: int) -> Sharded:
        """A variable's value on a slice."""
        return Sharded((value_at(self.state, variable, self.storage, self._places[s]),))

    def gathered(self, position: int, parts: Sequence[Any]) -> Sharded:
        """A trainable variable's value, put together on each device that computes."""
        return Sharded(tuple(parts))

    def data(self, data: Any) -> Any:
        """A micro-batch as a slice takes it."""
        return data

    def everywhere(self, tensor: Any, like: Sharded) -> Any:
        """A tensor that is there once, on all devices of a slice; its size is that of `like`."""
        return tensor

    def described(self, position: int) -> Sharded | None:
        """What stands for a trainable variable whose value is not looked at."""
        return None

    def rows_at(self, position: int, k: int) -> slice | None:
        """Which rows of a table the dense gradients on device `k` have; None: all."""
        return None

    def penalties(
        self, s: int, positions: Sequence[int], params: Sequence[Sharded], scale: Any
    ) -> tuple[list[Sharded], list[Sharded]]:
        """Penalties of some trainable variables on a slice, and their scaled gradients."""
        variables = [self.state.trainable[p] for p in positions]
        function = penalty_function(variables, keras.config.floatx(), self.like)
        with tf.device(self.devices(s)[0]):
            values, gradients = function([p.parts[0] for p in params], scale)
        return [Sharded((t,)) for t in values], [Sharded((t,)) for t in gradients]

    def source(
        self, gradients: Mapping[int, Mapping[int, list[Any]]], rows: Mapping[int, LookUp]
    ) -> SliceGradients:
        """How the update reads gradients: per slice and trainable variable, one per device."""
        found = {self._places[s]: of for s, of in gradients.items()}
        return SliceGradients(found, rows, self.entries, self.storage_devices)

    def gathered_paths(self) -> list[str]:
        """None: see `InnerAxes.gathered_paths`."""
        return []


class StageFunction:
    """A function of a stage.

    Args:
        function: Takes and returns tensors.
    """

    def __init__(self, function: Callable) -> None:
        self._function = function

    def communicating(self) -> set[str]:
        """See `LoweredPart.communicating`; on one device, none."""
        return set()

    def call(self, s: int, *inputs: Any) -> list[Sharded]:
        """Calls it for slice `s`, on the device in scope; tensors may be plain ones."""
        made = self._function(*(t.parts[0] if isinstance(t, Sharded) else t for t in inputs))
        if made and not tf.executing_eagerly():
            keras_trainer.run_independently(made[0].op)
        return [Sharded((t,)) for t in made]


def value_at(state: ModelState, variable: keras.Variable, topology: Topology, s: int) -> Any:
    """A variable's whole value for slice `s`, on the device in scope."""
    one = topology.slices[s]
    if any(variable is seed for seed in state.seeds):
        return replica_seed(tf.convert_to_tensor(variable.value), one.index)
    entry = stored(variable)
    if entry is None:
        return tf.convert_to_tensor(variable.value)
    at = s if s in entry.placement.slices else entry.placement.home[one.index]
    return tf.convert_to_tensor(entry.whole_at(at))
