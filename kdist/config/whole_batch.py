"""Models that compute over the whole batch, and what that excludes.

Where replicas compute apart, a layer that couples rows (a contrastive loss, a mean over the batch)
sees the rows of its replica. To see all, the data axis moves inside DTensor, as an inner axis that
cuts the batch (`Topology.with_data_inside`): one program over all devices computes what one device
would. There are no replicas then, so what they would share or exchange cannot be asked for.
"""

from __future__ import annotations

import dataclasses

from kdist.config.compression import CompressionConfig
from kdist.config.fusion import FusionConfig
from kdist.config.optimizer import OptimizerConfig
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

    def refuse(
        self,
        *,
        optimizer: OptimizerConfig,
        fusion: FusionConfig,
        compression: CompressionConfig | None,
        pipeline: PipelineConfig | None,
        fusion_ids: bool = False,
    ) -> None:
        """Refuses what replicas would share or exchange.

        Args:
            optimizer: Optimizer parallelism, of the configuration or of the compiled optimizer.
            fusion: How gradients travel together.
            compression: How gradients travel.
            pipeline: Stages, which see one micro-batch at a time.
            fusion_ids: Whether `kdist.set_comm_fusion` gave weights of the model an id.

        Raises:
            ValueError: For the first of them that is not its default.
        """
        inside = (
            "the data axis is inside DTensor, which cuts the batch and sums the gradients itself, "
            "so there are no replicas"
        )
        if optimizer.level > 0:
            rule = f"{inside} that could share optimizer state"
            self._refuse(rule, "optimizer level 0", f"optimizer={optimizer!r}")
        if fusion != FusionConfig():
            rule = f"{inside} between which gradients travel together"
            self._refuse(rule, "the default fusion", f"fusion={fusion!r}")
        if fusion_ids:
            rule = f"{inside} between which gradients travel together"
            self._refuse(rule, "no kdist.set_comm_fusion", "weights with fusion ids")
        if compression is not None:
            rule = f"{inside} between which gradients travel"
            self._refuse(rule, "no compression", f"compression={compression!r}")
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
