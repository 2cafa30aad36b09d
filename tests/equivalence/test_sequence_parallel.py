"""Tensors between layers cut along the sequence: sums are scattered, and values gathered.

Patterns of the layout map say it, as in Keras, `<layer path>/output`; or `sequence_parallel=True`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kdist

import pytest

from .attention_models import ENCODER, GPT, GPT_TIED, POST_NORM
from .case import Layout
from .features import BY_NAME as FEATURES
from .harness import compare
from .matrix import LEVELS, MESHES, level_config, product, spread
from .optimizer_zoo import OPTIMIZERS

ALONG: Mapping[str, Layout] = {
    ".*(positions|attention|down)/output": (None, "model", None),
    ".*norm/output": (None, None, None),
}
WAYS = ("patterns", "switch")
CASES = {case.name: case for case in (GPT, GPT_TIED, ENCODER, POST_NORM)}


def again(**how: Any) -> dict[str, Any]:
    return {"recompute": kdist.RecomputeConfig(**how)}


CONFIGS: dict[str, dict[str, Any]] = {
    **{name: level_config(name) for name in LEVELS},
    "alltoall": {"enable_alltoall": True},
    "selective": again(policy="selective"),
    "full": again(layers=[".*down", ".*norm"], policy="full"),
    "comm_kept": again(layers=[".*down", ".*norm"], policy="full", mp_comm_recompute=False),
}
DEFAULT = [
    ("switch", "gpt", "level0", "data2_model2"),
    ("patterns", "encoder", "level3", "data2_model2"),
    ("switch", "gpt_tied", "selective", "model2"),
    ("switch", "post_norm", "comm_kept", "data2_model2"),
    ("patterns", "gpt", "full", "data2_model2"),
]
ROWS = product(WAYS, CASES, CONFIGS, ("model2", "data2_model2"))


STAGES: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline": kdist.PipelineConfig(micro_batches=2)},
    "zero_bubble": {"pipeline": kdist.PipelineConfig(micro_batches=2, schedule="zero_bubble")},
    "level3": {"pipeline": kdist.PipelineConfig(micro_batches=2), **level_config("level3")},
    "selective": {
        "pipeline": kdist.PipelineConfig(micro_batches=2),
        **again(policy="selective"),
    },
}
STAGE_MESHES: dict[str, dict[str, int]] = {
    "pipe2_model2": {"pipe": 2, "model": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}
STAGE_DEFAULT = [
    ("patterns", "gpt", "1f1b", "pipe2_model2"),
    ("switch", "encoder", "zero_bubble", "pipe2_data2_model2"),
]
STAGE_ROWS = product(WAYS, ("gpt", "encoder"), STAGES, STAGE_MESHES)


def compared(name: str, axes: Mapping[str, int], *, by: str = "patterns", **options: Any) -> None:
    case = CASES[name]
    layouts = {**case.layout_map, **(ALONG if by == "patterns" else {})}
    if by == "switch":
        options["config"] = {**options.get("config", {}), "sequence_parallel": True}
    compare(case, axes, optimizer=OPTIMIZERS["adam"], layout_map=layouts, **options)


@pytest.mark.parametrize(("by", "case", "config", "mesh"), spread(ROWS, DEFAULT))
def test_equals_one_device(by: str, case: str, config: str, mesh: str) -> None:
    compared(case, MESHES[mesh], by=by, config=CONFIGS[config])


@pytest.mark.parametrize(("by", "case", "config", "mesh"), spread(STAGE_ROWS, STAGE_DEFAULT, 1))
def test_stages(by: str, case: str, config: str, mesh: str) -> None:
    compared(case, STAGE_MESHES[mesh], by=by, config=STAGES[config])


@pytest.mark.wide
@pytest.mark.parametrize("feature", ["gradient_accumulation", "global_clipnorm", "sample_weight"])
def test_with_other_features(feature: str) -> None:
    compared("encoder", MESHES["data2_model2"], by="switch", features=[FEATURES[feature]])


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {"compile": {"jit_compile": True}},
        {"dtype": "mixed_bfloat16"},
        {"config": {"batch_semantics": "global"}},
        {"samples": 11, "source": "dataset"},
    ],
    ids=str,
)
def test_ways(options: dict[str, Any]) -> None:
    """Compiled by XLA, in half precision, over the whole batch, and with a small last batch."""
    compared("gpt", MESHES["data2_model2"], by="switch", epochs=1, **options)


@pytest.mark.wide
def test_a_length_that_the_axis_does_not_divide_is_not_cut() -> None:
    """Six tokens over four devices; the rows of the last batch, too."""
    with pytest.warns(UserWarning, match="it has 6 elements there, no multiple of 4"):
        compared("gpt", MESHES["data2_model4"], by="switch", samples=11, epochs=1)
