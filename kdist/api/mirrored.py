"""`ShardedOptimizer` under a plain `tf.distribute.MirroredStrategy`, with Keras's own `fit`.

The strategy keeps a copy of every parameter on each of its devices. Here whole parameters are dealt
to the replicas, balanced by bytes: gradients are summed on the owner, a Keras optimizer that lives
there updates its parameters, and new values go to the other copies. Optimizer state exists on the
owner only: ZeRO's first stage (Rajbhandari et al. 2019, arXiv:1910.02054), by whole parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdist._compat import keras_optimizers, keras_trainer, mirrored_internals
from kdist.api import mirrored_scope
from kdist.config.optimizer import OptimizerConfig
from kdist.display.warn import warn
from kdist.optimizer.local import scatter_rows
from kdist.optimizer.slice_gradients import SliceGradients
from kdist.optimizer.update import DistributedUpdate
from kdist.optimizer.wrappers import whole_updates
from kdist.plan.partition import Spread, spread
from kdist.sharding.layout import WeightLayout
from kdist.sharding.mesh import Topology
from kdist.sharding.placement import Placement, place
from kdist.storage.sparse import LookUp, is_sparse
from kdist.storage.variables import Stored, make_local

import keras
import tensorflow as tf


def strategy_of(variables: Sequence[keras.Variable]) -> tf.distribute.Strategy | None:
    """The strategy that keeps several copies of variables, None if nothing does.

    Raises:
        ValueError: It is of another kind than `MirroredStrategy`.
    """
    for variable in variables:
        strategy = mirrored_internals.strategy_of(keras_trainer.tf_variable(variable))
        if strategy is not None and strategy.num_replicas_in_sync > 1:
            mirrored_scope.check_kind(strategy)
            return strategy
    return None


def check_config(config: OptimizerConfig) -> None:
    """Refuses what has no meaning under a strategy that keeps all parameters everywhere."""
    if config.level > 1:
        raise ValueError(
            "Under tf.distribute.MirroredStrategy the strategy keeps gradients and parameters "
            "whole; only optimizer state can be spread. Use level=1, or kdist.parallelize for "
            f"levels 2 and 3. Received: level={config.level}"
        )
    if config.partition == "slice":
        raise ValueError(
            "Under tf.distribute.MirroredStrategy whole parameters are dealt to replicas. Use "
            "partition='parameter' or 'auto', or kdist.parallelize to cut parameters. "
            "Received: partition='slice'"
        )


class MirroredCopies(Stored):
    """The copies that a strategy keeps of a variable, as `Stored`.

    Args:
        variable: The mirrored variable.
        placement: Whole, everywhere.
        topology: The strategy's devices.
    """

    def __init__(self, variable: keras.Variable, placement: Placement, topology: Topology) -> None:
        self.variable = variable
        self.placement = placement
        self.topology = topology
        self.masters: list[tuple[str, keras.Variable]] = []
        self.updaters: list[Any] = []
        copies = mirrored_internals.copies(keras_trainer.tf_variable(variable))
        self.unborn = None
        self._locals = {(r, 0): make_local(variable, copy) for r, copy in enumerate(copies)}


class MirroredUpdate(DistributedUpdate):
    """Updates mirrored parameters, each on one device.

    Args:
        optimizer: The `ShardedOptimizer`; what is inside is built here.
        variables: The trainable variables.
        config: Its settings.
        wanted: Per variable, what `kdist.set_parallel_optimizer` said.
        strategy: The strategy that mirrors the variables.

    Raises:
        ValueError: For settings without meaning here, and for variables that are not mirrored.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[keras.Variable],
        config: OptimizerConfig,
        wanted: Sequence[bool | None],
        strategy: tf.distribute.Strategy,
    ) -> None:
        check_config(config)
        self.strategy = strategy
        topology = mirrored_scope.config_from(strategy).topology
        for variable in variables:
            if not mirrored_internals.copies(keras_trainer.tf_variable(variable)):
                raise ValueError(
                    "All trainable variables must be made in the strategy's scope. "
                    f"Received: variable={variable.path!r}, which has one copy"
                )
        with mirrored_internals.plain_variables():
            # As Keras builds it, in host memory for a moment: then state moves to the owners.
            with tf.device("/CPU:0"):
                optimizer.build_inner(variables)
            dealt = _deal(optimizer, variables, config, wanted, topology)
            entries = [MirroredCopies(v, p, topology) for v, p in zip(variables, dealt.placements)]
            super().__init__(optimizer, entries, topology, dealt.units, dealt.keys, config)
        self._position = {id(v): i for i, v in enumerate(variables)}
        self._leave_strategy()

    def _leave_strategy(self) -> None:
        """Keras's optimizers ask the strategy in scope to update all copies; these have one."""
        for group in self.jobs.local:
            for one in group:
                keras_optimizers.update_through_keras_variables(one.optimizer, scatter_rows)

    def _keep_apart(self, variables: set[int]) -> None:
        with mirrored_internals.plain_variables():
            super()._keep_apart(variables)
        self._leave_strategy()

    def _build_sums(self, dense: set[int]) -> None:
        with mirrored_internals.plain_variables():
            super()._build_sums(dense)

    def merge(self, gradients: Sequence[Any], variables: Sequence[keras.Variable] | None) -> None:
        """Updates from what one replica computed; all replicas call it, in `strategy.run`.

        Args:
            gradients: One, or None, per variable.
            variables: All trainable ones by default.

        Raises:
            ValueError: Called elsewhere, or for variables that it was not built with.
        """
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.strategy is not self.strategy:
            raise ValueError(
                "A ShardedOptimizer over mirrored variables is applied by every replica: in "
                "Keras's fit, or in a function that strategy.run calls. "
                f"Received: a call with {tf.distribute.get_strategy()!r} in scope"
            )
        replica.merge_call(self._apply_merged, args=(list(gradients), self._places(variables)))

    def _places(self, variables: Sequence[keras.Variable] | None) -> tuple[int, ...]:
        if variables is None:
            return tuple(range(len(self._position)))
        unknown = [v.path for v in variables if id(v) not in self._position]
        if unknown:
            raise ValueError(
                "The optimizer updates the variables that it was built with. Make a new one for "
                f"others. Received: variables={unknown}"
            )
        return tuple(self._position[id(v)] for v in variables)

    def _apply_merged(
        self, strategy: tf.distribute.Strategy, gradients: list[Any], places: tuple[int, ...]
    ) -> None:
        found = {v: g for v, g in zip(places, gradients) if g is not None}
        if not found:
            raise ValueError(
                "No trainable variable gets a gradient from the loss. Check that the loss depends "
                f"on them. Received: gradients={gradients}"
            )
        entries = self.jobs.entries
        if missing := [entries[v].variable.path for v in places if v not in found]:
            warn(f"No gradient reaches {missing}; they stay as they are.")
        connected = sorted(found)
        parts = [strategy.experimental_local_results(found[v]) for v in connected]
        rows = {v: LookUp() for v, part in zip(connected, parts) if is_sparse(part[0])}
        devices = [one.devices[:1] for one in self.jobs.topology.slices]
        results = {
            s: {v: [g] for v, g in zip(connected, part)}
            for s, part in enumerate(zip(*parts, strict=True))
        }
        source = SliceGradients(results, rows, entries, devices)
        self.apply(self.begin(source, connected))

    def state_bytes(self) -> dict[str, int]:
        """Bytes of optimizer state per device."""
        from kdist.report.memory import nbytes

        found = dict.fromkeys(self.jobs.topology.devices, 0)
        for group in self.jobs.local:
            for one in group:
                found[one.device] += sum(map(nbytes, one.optimizer.variables))
        for sums in self.sums.values():
            for copies in sums.sums.values():
                for (s, k), local in copies.items():
                    found[sums.devices[s][k]] += nbytes(local)
        return found


def _deal(
    optimizer: Any,
    variables: Sequence[keras.Variable],
    config: OptimizerConfig,
    wanted: Sequence[bool | None],
    topology: Topology,
) -> Spread:
    """Who updates which variable."""
    placements = [
        place(
            v.path,
            v.shape,
            tf.as_dtype(v.dtype).size,
            WeightLayout.replicated(len(v.shape)),
            topology,
        )
        for v in variables
    ]
    whole = whole_updates(optimizer, variables)
    by_parameter = dataclasses.replace(config, partition="parameter")
    return spread(placements, whole, wanted, by_parameter, topology)
