"""A field that a configuration does not have is refused with the one that says it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import kdist
from kdist.config.unknown_fields import _AXES, _FIELDS, instead_of

import keras
import pytest


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        ("ParallelConfig", "zero_stage", "optimizer=kdist.OptimizerConfig(level=...)"),
        ("ParallelConfig", "micro_batches", "pipeline=kdist.PipelineConfig(micro_batches=...)"),
        ("ParallelConfig", "remat", "recompute=..."),
        ("ParallelConfig", "tp", "mesh=kdist.mesh(model=...)"),
        ("ParallelConfig", "layoutmap", "layout_map=..."),
        ("ParallelConfig", "colour", ""),
        ("OptimizerConfig", "stage", "level=..."),
        ("OptimizerConfig", "layout_map", "ParallelConfig(..., layout_map=...)"),
        ("PipelineConfig", "stage", "stages=..."),
        ("PipelineConfig", "num_microbatches", "micro_batches=..."),
        ("PipelineConfig", "pp", "ParallelConfig(mesh=kdist.mesh(pipe=...), ...)"),
        ("FusionConfig", "bucket_cap_mb", "size_mb=..."),
        (
            "FusionConfig",
            "rest",
            "ParallelConfig(..., compression=kdist.CompressionConfig(rest=...))",
        ),
    ],
)
def test_what_to_write(owner: str, name: str, instead: str) -> None:
    assert instead_of(owner, name) == instead


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (kdist.ParallelConfig, "zero"),
        (kdist.OptimizerConfig, "zero"),
        (kdist.FusionConfig, "bucket_size"),
        (kdist.CompressionConfig, "ranks"),
        (kdist.PipelineConfig, "microbatches"),
        (kdist.RecomputeConfig, "layer"),
        (kdist.PowerSGD, "ranks"),
        (kdist.StateFormatConfig, "format"),
    ],
)
def test_each_configuration_refuses_what_it_does_not_have(make: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"no field '{name}'.*Its fields: .*Received: {name}=3"):
        make(**{name: 3})


def test_every_foreign_name_leads_to_a_field() -> None:
    for name in (*_FIELDS, *_AXES):
        assert instead_of("ParallelConfig", name), name


def test_they_are_dataclasses_as_before() -> None:
    config = kdist.OptimizerConfig(level=2)
    assert dataclasses.replace(config, level=3) == kdist.OptimizerConfig(level=3)
    assert copy.deepcopy(config) == config
    assert "threshold_kb" in inspect.signature(kdist.OptimizerConfig).parameters
    with pytest.raises(TypeError, match="micro_batches"):
        kdist.PipelineConfig()  # type: ignore[call-arg]


def test_a_pipeline_model_passes_them_on() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    with pytest.raises(TypeError, match=r"Write optimizer=kdist.OptimizerConfig\(level=...\)"):
        kdist.PipelineModel(model, stages=2, micro_batches=2, zero_stage=1)
