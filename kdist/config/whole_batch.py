"""Models that compute over the whole batch: why, and what that excludes.

Where replicas compute apart, a layer that couples rows (a contrastive loss, a mean over the batch)
sees the rows of its replica. To see all, the data axis moves inside DTensor, as an inner axis that
cuts the batch (`Topology.with_data_inside`): one program over all devices computes what one device
would. It hands out gradients before they are summed over the data axis
(`kdist.dtensor.partial_sums`), so weights and updates are those of replicas.
"""

from __future__ import annotations

import dataclasses

from kdist.config.pipeline import PipelineConfig


@dataclasses.dataclass(frozen=True)
class WholeBatch:
    """Why a model computes over the whole batch.

    Attributes:
        cause: What was asked for.
        instead: What to ask for to have replicas.
    """

    cause: str
    instead: str

    @property
    def note(self) -> str:
        """What that means for the mesh."""
        return (
            f"{self.cause} computes over the whole batch: the data axis is inside DTensor, as an "
            "inner axis that cuts the batch"
        )

    def refuse(self, pipeline: PipelineConfig | None) -> None:
        """Refuses what computes over a part of the batch at a time.

        Args:
            pipeline: Stages, which see one micro-batch at a time.

        Raises:
            ValueError: For stages.
        """
        if pipeline is not None:
            rule = "a stage of a pipeline sees one micro-batch at a time"
            self._refuse(rule, "a mesh without `pipe`", f"pipeline={pipeline!r}")

    def _refuse(self, rule: str, without: str, received: str) -> None:
        raise ValueError(
            f"{self.cause} computes over the whole batch: {rule}. Use {self.instead}, or "
            f"{without}. Received: {received}"
        )


GLOBAL = WholeBatch("batch_semantics='global'", "batch_semantics='replica'")
SYNCHRONIZED = WholeBatch(
    "BatchNormalization(synchronized=True)", "BatchNormalization(synchronized=False)"
)
