"""What a pipeline's stages run on, as those who execute them use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kdist.config.without_effect import WithoutEffect
from kdist.dtensor.sharded import Sharded
from kdist.optimizer.slice_gradients import SliceGradients
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Coordinate
from kdist.stages.body import Backend
from kdist.storage.sparse import LookUp

import keras


class StageBackend(Backend, Protocol):
    """`OneDevice` of each slice, or all its `InnerAxes`."""

    topology: Topology
    storage: Topology

    @property
    def idle(self) -> Sequence[WithoutEffect]:
        """Layouts that cut nothing where they are."""

    @property
    def exact(self) -> bool:
        """Whether a function is of one size of micro-batches."""

    @property
    def storage_devices(self) -> Sequence[Sequence[str]]:
        """Where what slices gather is put together, on the mesh that stores weights."""

    @property
    def in_storage(self) -> Sequence[Sequence[Coordinate]]:
        """Per slice and device of it, the coordinate in the mesh that stores weights."""

    @property
    def places(self) -> Sequence[Sequence[Coordinate]]:
        """Per slice, the coordinates of the devices that compute."""

    def read(self, variable: keras.Variable, s: int) -> Sharded:
        """A variable's value on a slice."""

    def gathered(self, position: int, parts: Sequence[Any]) -> Sharded:
        """A trainable variable's value, put together on each device that computes."""

    def data(self, data: Any) -> Any:
        """A micro-batch as a slice takes it."""

    def everywhere(self, tensor: Any, like: Sharded) -> Any:
        """A tensor that is there once, on all devices of a slice; its size is that of `like`."""

    def described(self, position: int) -> Sharded | None:
        """What stands for a trainable variable whose value is not looked at."""

    def rows_at(self, position: int, k: int) -> slice | None:
        """Which rows of a table the dense gradients on device `k` have; None: all."""

    def penalties(
        self, s: int, positions: Sequence[int], params: Sequence[Sharded], scale: Any
    ) -> tuple[list[Sharded], list[Sharded]]:
        """Penalties of some trainable variables on a slice, and their scaled gradients."""

    def source(
        self, gradients: Mapping[int, Mapping[int, list[Any]]], rows: Mapping[int, LookUp]
    ) -> SliceGradients:
        """How the update reads gradients: per slice and trainable variable, one per device."""

    def gathered_paths(self) -> list[str]:
        """Weights that are made whole before use because an operation cannot take parts."""
