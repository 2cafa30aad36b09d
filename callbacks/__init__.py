"""Training callbacks of kdist, imported as `kdist.callbacks`."""

from kdist.callbacks.comm_fusion import CommFusion
from kdist.callbacks.pipeline_timeline import PipelineTimeline
from kdist.callbacks.sharded_checkpoint import ShardedCheckpoint

__all__ = ["CommFusion", "PipelineTimeline", "ShardedCheckpoint"]
