"""One block of KerasHub's families, some of which DTensor alone cannot expand, cut over `model`.

Long, as all rows with KerasHub: see `test_kerashub`.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from kdist.api.attached import attached

import keras
import pytest

from .case import Case, Data
from .harness import Run, compiled, precision, train
from .optimizer_zoo import OPTIMIZERS
from .outcome import FLOAT32, check
from .test_kerashub import TOKENS, VOCABULARY, _hub, _text

pytestmark = pytest.mark.long

SIZES = {"vocabulary_size": VOCABULARY, "num_layers": 1, "hidden_dim": 16}
GROUPED = {"num_query_heads": 4, "num_key_value_heads": 2, **SIZES}
EXPERTS = {"num_experts": 4, "top_k": 2, "intermediate_dim": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": (
        "FalconBackbone",
        {"num_attention_heads": 2, "intermediate_dim": 32, **SIZES},
    ),
    "gpt_oss": ("GptOssBackbone", {"head_dim": 8, "sliding_window": 4, **EXPERTS, **GROUPED}),
    "mixtral": ("MixtralBackbone", {**EXPERTS, **GROUPED}),
    "mistral": ("MistralBackbone", {"intermediate_dim": 32, "sliding_window": 4, **GROUPED}),
    "qwen": ("QwenBackbone", {"intermediate_dim": 32, **GROUPED}),
    "gemma": ("GemmaBackbone", {"head_dim": 8, "intermediate_dim": 32, **GROUPED}),
    "opt": (
        "OPTBackbone",
        {
            "num_heads": 4,
            "intermediate_dim": 32,
            "max_sequence_length": TOKENS,
            "dropout": 0.0,
            **SIZES,
        },
    ),
}
LAYOUT: dict[str, Any] = {
    ".*(query|key|value).*/kernel": (None, "model", None),
    ".*/(feedforward_(intermediate|gate)_dense|ffw_gating(_2)?)/kernel": (None, "model"),
    ".*/(feedforward_output_dense|ffw_linear)/kernel": ("model", None),
    ".*/experts/.*(?<!bias)": ("model", None, None),
    ".*token_embedding/embeddings": ("model", None),
}


def layout_of(model: keras.Model) -> dict[str, Any]:
    """The patterns that a family has weights for."""
    paths = [(v.path, len(v.shape)) for v in model.weights]
    return {
        pattern: dims
        for pattern, dims in LAYOUT.items()
        if any(re.fullmatch(pattern, path) and rank == len(dims) for path, rank in paths)
    }


def case(name: str) -> Case:
    def build() -> keras.Model:
        maker, sizes = FAMILIES[name]
        backbone = getattr(_hub(), maker)(**sizes)
        names = ("token_ids", "padding_mask")
        inputs = {one: keras.Input((TOKENS,), dtype="int32", name=one) for one in names}
        logits = backbone.token_embedding(backbone(inputs), reverse=True)
        return keras.Model(inputs, logits)

    def data(seed: int, samples: int) -> Data:
        x, y, _ = _text(seed, samples)
        return x, y, None

    return Case(
        name=name,
        build=build,
        data=data,
        metrics=list,
        layout_map=layout_of(build()),
        zero_gradient_paths=(".*/key.*/bias",),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_stays_cut_and_equals_one_device(name: str, engine: str) -> None:
    # The penalty of Mixtral's router is a mean over all rows.
    config = {"indivisible": "replicate"}
    if name == "mixtral":
        config["batch_semantics"] = "global"
    run = Run(
        case=case(name),
        mesh_axes={"data": 2, "model": 2},
        optimizer=OPTIMIZERS["sgd_momentum"],
        dtype="float32",
        config=config,
    )
    check(train(run, "plain"), train(run, engine), FLOAT32, title=f"{name} [{engine}]")
    with precision(run.dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: keras.Model = compiled(run, engine)
        x, y, _ = run.case.data(0, 8)
        model.train_on_batch(x, y)
    assert attached(model).fallbacks == []
