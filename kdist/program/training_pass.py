"""What a forward and backward pass over the mesh gave, as one device would have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdist.program.batch import SplitBatch, join
from kdist.program.loss_parts import added_up, collected, compiled_names, merged
from kdist.program.step_result import SliceResult

import keras


@dataclasses.dataclass(frozen=True)
class TrainingPass:
    """A pass in training mode; nothing was updated but the state of layers.

    Attributes:
        loss: The loss, a scalar.
        gradients: One whole gradient, or None, per trainable variable.
        batch: The batch, cut over the replicas.
        results: What each slice gave.
    """

    loss: Any
    gradients: list[Any]
    batch: SplitBatch
    results: Sequence[SliceResult]

    def outputs(self) -> Any:
        """The replicas' outputs, rows in the order of the batch; None where they were not kept."""
        outputs = [r.outputs for r in self.results]
        return None if any(one is None for one in outputs) else join(outputs, self.batch.counts)

    def loss_parts(self, model: keras.Model) -> dict[str, Any]:
        """Each part of the loss, added up over the replicas; see `kdist.program.loss_parts`.

        Args:
            model: The model of the pass.
        """
        names = compiled_names(model)
        terms = [collected(zip(names, r.terms)) for r in self.results]
        return added_up(merged([*terms, *(r.loss_parts for r in self.results)]))
