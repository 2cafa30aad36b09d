"""`PipelineModel`: `parallelize` for a pipeline alone, under a name of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kdist.api.parallelize import parallelize
from kdist.config.parallel import ParallelConfig
from kdist.config.pipeline import PipelineConfig
from kdist.pipeline.schedule import Schedule
from kdist.sharding.mesh import mesh

import keras


def PipelineModel(
    model: keras.Model,
    stages: int,
    micro_batches: int,
    schedule: str | os.PathLike[str] | Schedule = "auto",
    *,
    chunks: int | None = None,
    assignment: Literal["auto"] | Mapping[str, int] | Sequence[Sequence[keras.Layer]] = "auto",
    costs: Literal["estimate", "measured"] = "estimate",
    data: int = 1,
    **options: Any,
) -> keras.Model:
    """Makes a model train, evaluate and predict as a pipeline.

    The same as `kdist.parallelize` with a mesh of `pipe` and `data`; see `kdist.PipelineConfig`.
    The same idea is MindSpore's `PipelineCell(net, micro_size)`.

    Args:
        model: A Functional or Sequential model, or any model with `assignment` as lists of layers.
        stages: Number of stages, each on a device of its own (per replica).
        micro_batches: Micro-batches per step and replica.
        schedule: See `PipelineConfig.schedule`.
        chunks: See `PipelineConfig.chunks`.
        assignment: See `PipelineConfig.stages`.
        costs: See `PipelineConfig.costs`.
        data: Number of replicas.
        **options: Further fields of `ParallelConfig`.

    Returns:
        The same model object.

    Raises:
        ValueError, TypeError: For what `PipelineConfig`, `ParallelConfig` and `parallelize` refuse.

    Example:
        >>> model = kdist.PipelineModel(build_model(), stages=2, micro_batches=8)
        >>> model.compile("adam", "mse")
        >>> model.fit(x, y)
    """
    if fixed := {"mesh", "pipeline"} & set(options):
        raise ValueError(
            "PipelineModel takes the fields of kdist.ParallelConfig other than mesh and pipeline, "
            "which it makes. For a mesh of your own use kdist.parallelize. "
            f"Received: {sorted(fixed)}"
        )
    pipeline = PipelineConfig(
        micro_batches=micro_batches,
        schedule=schedule,
        stages=assignment,
        chunks=chunks,
        costs=costs,
    )
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise ValueError(f"stages is an integer from 1 on. Received: stages={stages!r}")
    made = mesh(pipe=stages, data=data)
    return parallelize(model, ParallelConfig(mesh=made, pipeline=pipeline, **options))
