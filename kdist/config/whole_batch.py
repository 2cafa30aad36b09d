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

    def note(self, pipeline: PipelineConfig | None) -> str:
        """What that means for the mesh, and for stages."""
        several = pipeline is not None and pipeline.micro_batches > 1
        rows = "all replicas' rows of a micro-batch" if several else "the whole batch"
        return (
            f"{self.cause} computes over {rows}: the data axis is inside DTensor, as an inner axis "
            "that cuts the batch"
        )

    def refuse(self, pipeline: PipelineConfig | None) -> None:
        """Refuses what computes over a part of the batch at a time.

        Args:
            pipeline: Stages, which see one micro-batch at a time.

        Raises:
            ValueError: For stages and several micro-batches.
        """
        if pipeline is not None and pipeline.micro_batches > 1:
            raise ValueError(
                f"{self.cause} computes over the whole batch, and a stage of a pipeline sees one "
                f"micro-batch at a time. Use {self.instead}, or one micro-batch: "
                f"PipelineConfig(micro_batches=1). Received: pipeline={pipeline!r}"
            )


GLOBAL = WholeBatch("batch_semantics='global'", "batch_semantics='replica'")
SYNCHRONIZED = WholeBatch(
    "BatchNormalization(synchronized=True)", "BatchNormalization(synchronized=False)"
)
