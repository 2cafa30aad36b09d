"""What a configuration says of a field that it does not have: where that is said here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Collection
from typing import Any, TypeVar, cast

T = TypeVar("T")

# Where `ParallelConfig` has what another class says.
_OF_OTHERS = {
    "OptimizerConfig": "optimizer=kdist.OptimizerConfig({}=...)",
    "FusionConfig": "fusion=kdist.FusionConfig({}=...)",
    "CompressionConfig": "compression=kdist.CompressionConfig({}=...)",
    "PipelineConfig": "pipeline=kdist.PipelineConfig({}=...)",
    "RecomputeConfig": "recompute=kdist.RecomputeConfig({}=...)",
}
_MESH = "mesh=kdist.mesh({}=...)"

# Field -> what torchtitan, Megatron-Core, DeepSpeed, MindSpore and others call it.
_FOREIGN_FIELDS = {
    "level": ("zero", "zero_stage", "zero_level", "zero_optimization", "fsdp", "stage"),
    "threshold_kb": ("threshold", "parallel_optimizer_threshold"),
    "state_on": ("offload", "cpu_offload", "offload_optimizer"),
    "micro_batches": ("microbatches", "num_microbatches", "num_micro_batches", "micro_batch_num"),
    "schedule": ("pipeline_schedule", "pipeline_scheduler"),
    "size_mb": ("bucket_size", "bucket_size_mb", "bucket_cap_mb"),
    "overlap": ("overlap_comm", "overlap_grad_reduce"),
    "layout_map": ("layouts", "layout", "shardings", "sharding_rules", "rules"),
    "recompute": ("remat", "checkpointing", "activation_checkpointing", "gradient_checkpointing"),
    "enable_alltoall": ("alltoall", "all_to_all"),
    "sequence_parallel": ("sp", "enable_sequence_parallel"),
}
_FOREIGN_AXES = {
    "data": ("dp", "dp_size", "data", "data_parallel", "data_parallel_size"),
    "model": ("tp", "tp_size", "model", "tensor_parallel", "tensor_parallel_size")
    + ("tensor_model_parallel_size", "model_parallel"),
    "pipe": ("pp", "pp_size", "pipe", "pipeline_parallel", "pipeline_parallel_size")
    + ("pipeline_model_parallel_size", "pipeline_stages"),
}
_FIELDS = {other: field for field, others in _FOREIGN_FIELDS.items() for other in others}
_AXES = {other: axis for axis, others in _FOREIGN_AXES.items() for other in others}

_classes: dict[str, Collection[str]] = {}
"""Class -> its fields, of all that `explains_fields` decorates."""


def explains_fields(cls: type[T]) -> type[T]:
    """Decorates a configuration: a field that it does not have is refused with what to write.

    Example:
        >>> kdist.ParallelConfig(mesh=mesh, zero_stage=2)
        TypeError: ParallelConfig has no field 'zero_stage'. Write
        optimizer=kdist.OptimizerConfig(level=...). ...
    """
    made: Any = cls.__init__
    fields = [name for name in inspect.signature(made).parameters if name != "self"]
    _classes[cls.__name__] = fields

    @functools.wraps(made)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if name not in fields:
                raise TypeError(_refusal(cls.__name__, name, value))
        made(self, *args, **kwargs)

    cls.__init__ = cast(Any, checked)  # type: ignore[method-assign]
    return cls


def _refusal(owner: str, name: str, value: Any) -> str:
    instead = instead_of(owner, name)
    advice = f"Write {instead}. " if instead else ""
    return (
        f"{owner} has no field {name!r}. {advice}Its fields: {', '.join(_classes[owner])}. "
        f"Received: {name}={value!r}"
    )


def instead_of(owner: str, name: str) -> str:
    """What to write in the place of an unknown field; empty if nothing resembles it.

    Args:
        owner: The class that was called, decorated by `explains_fields`.
        name: The keyword that it does not have.
    """
    field = _FIELDS.get(name, name)
    if field in _classes[owner]:
        return f"{field}=..."
    if near := difflib.get_close_matches(name, _classes[owner], 1, cutoff=0.9):  # `stage`
        return f"{near[0]}=..."
    for other, written in _OF_OTHERS.items():
        if field in _classes[other]:
            at = written.format(field)
            return at if owner == "ParallelConfig" else f"ParallelConfig(..., {at})"
    if field in _classes["ParallelConfig"]:
        return f"ParallelConfig(..., {field}=...)"
    if name in _AXES:
        at = _MESH.format(_AXES[name])
        return at if owner == "ParallelConfig" else f"ParallelConfig({at}, ...)"
    close = difflib.get_close_matches(name, _classes[owner], 1)
    return f"{close[0]}=..." if close else ""
