"""What users declared on the layers of a model, for its twin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kdist.api.sharded_optimizer import parallel_optimizer
from kdist.config.fusion import comm_fusion
from kdist.config.parallel import ParallelConfig
from kdist.config.recompute import recompute_setting
from kdist.config.settings import Setting
from kdist.config.shard import declarations, declare
from kdist.config.tables import host_setting, split_setting
from kdist.stages.stages import stage_setting

import keras

SETTINGS: tuple[Setting, ...] = (
    comm_fusion,
    host_setting,
    parallel_optimizer,
    recompute_setting,
    split_setting,
    stage_setting,
)


def copy_declarations(model: keras.Model, pair: Callable[[Any], Any]) -> None:
    """Declares on a twin what `shard`, `set_stage` and the other settings said of a model.

    Args:
        model: The model.
        pair: Its layers and variables to the twin's; None for others.
    """
    for layer, declaration in declarations(model):
        declare(pair(layer), declaration)
    for setting in SETTINGS:
        for target, value in setting.given():
            again = pair(target)
            if again is not None:
                setting.set(again, value)


def config_for(config: ParallelConfig, pair: Callable[[Any], Any]) -> ParallelConfig:
    """A model's configuration, for its twin: stages are lists of the twin's layers."""
    pipeline = config.pipeline
    if pipeline is not None and isinstance(pipeline.stages, tuple):
        lists = tuple(tuple(pair(layer) for layer in row) for row in pipeline.stages)
        pipeline = dataclasses.replace(pipeline, stages=lists)
    return dataclasses.replace(config, pipeline=pipeline, verify=None)
