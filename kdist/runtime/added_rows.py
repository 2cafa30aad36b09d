"""Gradients of a table that stays on the devices, from all micro-batches of a pipeline's stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist.optimizer.slice_gradients import as_gradient
from kdist.storage.sparse import add, in_order, joined

import tensorflow as tf

if TYPE_CHECKING:
    from kdist.runtime.pipeline_runner import PipelineRunner


class AddedRows:
    """Adds the micro-batches' rows.

    Args:
        runner: The pipeline's runner.
        functions: Of each virtual stage.
    """

    def __init__(self, runner: PipelineRunner, functions: Sequence[Any]) -> None:
        self.runner, self.functions = runner, functions

    def __call__(
        self, s: int, position: int, k: int, users: Mapping[int, Sequence[Any]]
    ) -> list[Any]:
        """Rows of all micro-batches on a device; dense, of what it has, if others are dense.

        Args:
            s: The slice.
            position: Of the table.
            k: The device.
            users: By virtual stage, the rows of each micro-batch.
        """
        placement = self.runner.entries[position].placement
        stage, totals = self.runner.topology.slices[s].stage, []
        for virtual, rows in users.items():
            look_up = self.functions[virtual].look_ups()[position]
            there = [as_gradient((r.values.parts[k], r.indices.parts[k]), placement) for r in rows]
            pieces = zip(*(look_up.pieces(one, stage) for one in there), strict=True)
            added = [add([t for t, _ in one], one[0][1].by_batch, look_up.merged) for one in pieces]
            totals.append((joined(added), look_up))
        part = self.runner.backend.rows_at(position, k)
        if part is None or position in self.runner.program.trained.rows:
            return in_order(totals, stage) if len(totals) > 1 else [totals[0][0]]
        return [tf.convert_to_tensor(total)[part] for total, _ in totals]
