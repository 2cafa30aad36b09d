"""Steps over inner axes on batches whose rows are taken where they are read, by each process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from kdist.dtensor.retraced import Settled
from kdist.graphs.instantiation import prepared_cheaply
from kdist.runtime.by_shape import ALONE
from kdist.runtime.taken import Taken, alive, ending_together
from kdist.runtime.worker_data import WorkerDataset


class InPlace:
    """A step as graphs, one for each shape of the batches of a dataset.

    Most data has one shape, and one more at its end. Batches of further shapes are for the graphs
    of `kdist.runtime.by_shape`, which serve many, and take a batch that process 0 has.

    Args:
        step: `step(batch, known_size)`, of a `SplitBatch`.
        devices: Those that compute.
    """

    def __init__(self, step: Callable, devices: Sequence[str]) -> None:
        self._step, self._devices = step, list(devices)
        self._made: weakref.WeakKeyDictionary[WorkerDataset, dict[Any, Callable]] = (
            weakref.WeakKeyDictionary()
        )

    def graph(self, taken: Taken, known_size: bool) -> Callable[[], Any] | None:
        """What runs the step on a batch; None where there is no graph for it.

        Args:
            taken: The batch.
            known_size: Whether Keras on one device would know the batch's size while tracing.
        """
        made, shapes = self._made.setdefault(taken.dataset, {}), taken.shapes
        key = shapes, known_size
        if key not in made:
            if not shapes or len(made) == ALONE:
                return None
            made[key] = self._of(taken.dataset, shapes, known_size)

        def run() -> Any:
            with prepared_cheaply(self._devices), ending_together():
                return made[key](taken.first, taken.others)

        return run

    def _of(self, dataset: WorkerDataset, shapes: Sequence[Any], known_size: bool) -> Callable:
        there = weakref.ref(dataset)

        def step(first: Any, others: Sequence[Any]) -> Any:
            batch = alive(there).taken(first.get_value(), others, shapes)
            return self._step(batch, known_size)

        return Settled(step)
