"""The steps of a pipelined model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.program.batch import SplitBatch
from kdist.program.state import combine
from kdist.runtime.runner_contract import StagesRunner
from kdist.runtime.step import Step
from kdist.storage.variables import stored

import tensorflow as tf


class PipelineStep(Step):
    """Train, test and predict steps over stages."""

    runner: StagesRunner

    def _parts(self, batch: SplitBatch) -> Sequence[Sequence[Any]]:
        return self.runner.micro_batches(batch).parts

    def _combine(
        self, updated: Sequence[int], values: Sequence[Sequence[Any]], batch: SplitBatch
    ) -> None:
        """Writes state back where the stage is that has it, not by way of the first device."""
        state = self.program.state
        for j, position in enumerate(updated):
            entry = stored(state.written[position])
            at = 0 if entry is None else entry.placement.home[0]
            with tf.device(self.parallel.topology.slices[at].devices[0]):
                combine(state, [position], [[replica[j]] for replica in values], batch)
