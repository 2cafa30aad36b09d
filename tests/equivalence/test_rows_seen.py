"""Real models are told apart: where rows of a batch stay apart nothing is said, else by name.

The rows of KerasHub and `keras.applications` are long; see `test_kerashub.py` for KerasHub.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.rows.model import study_model
from kdist.rows.model_study import ModelStudy

import keras
import numpy as np
import pytest

from .case import Case
from .zoo import ZOO

TOKENS = np.arange(2 * 8, dtype="int32").reshape(2, 8)
SIZES = {"vocabulary_size": 32, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}


def studied(model: keras.Model, x: Any) -> ModelStudy:
    return study_model(model, x, training=True, loss_from_layers="mean")


@pytest.mark.parametrize("case", ZOO, ids=[case.name for case in ZOO])
def test_the_zoo_is_silent(case: Case) -> None:
    study = studied(case.build(), case.data(0, 4)[0])
    assert study.warning() == ""
    norms = {"resnet": "stem_norm, body_norm", "narrow": "expand_norm"}.get(case.name)
    assert case.has_batchnorm == bool(norms)
    assert study.lines() == [f"batch statistics of each replica's rows: {norms}"] * bool(norms)


def hub_inputs(*names: str) -> dict[str, np.ndarray]:
    values = {"token_ids": TOKENS, "padding_mask": TOKENS > 3, "segment_ids": TOKENS % 2}
    return {name: values[name].astype("int32") for name in names}


def gpt2(hub: Any) -> tuple[keras.Model, Any]:
    model = hub.models.GPT2Backbone(num_heads=2, max_sequence_length=8, **SIZES)
    return model, hub_inputs("token_ids", "padding_mask")


def bert(hub: Any) -> tuple[keras.Model, Any]:
    model = hub.models.BertBackbone(num_heads=2, max_sequence_length=8, **SIZES)
    return model, hub_inputs("token_ids", "padding_mask", "segment_ids")


def llama(hub: Any) -> tuple[keras.Model, Any]:
    model = hub.models.LlamaBackbone(num_query_heads=2, num_key_value_heads=2, **SIZES)
    return model, hub_inputs("token_ids", "padding_mask")


@pytest.mark.long
@pytest.mark.parametrize("build", [gpt2, bert, llama], ids=["gpt2", "bert", "llama"])
def test_kerashub_is_silent(build: Callable) -> None:
    import keras_hub

    assert studied(*build(keras_hub)).lines() == []


def mixtral(hub: Any) -> tuple[keras.Model, Any]:
    model = hub.models.MixtralBackbone(
        num_query_heads=2, num_key_value_heads=2, num_experts=4, top_k=2, **SIZES
    )
    return model, hub_inputs("token_ids", "padding_mask")


def qwen_moe(hub: Any) -> tuple[keras.Model, Any]:
    model = hub.models.QwenMoeBackbone(
        num_query_heads=2,
        num_key_value_heads=2,
        moe_intermediate_dim=8,
        shared_expert_intermediate_dim=8,
        num_experts=4,
        top_k=2,
        **SIZES,
    )
    return model, hub_inputs("token_ids", "padding_mask")


@pytest.mark.long
@pytest.mark.parametrize(
    ("build", "layer"),
    [(mixtral, "mixtral_sparse_moe_block"), (qwen_moe, "qwen_sparse_moe_block")],
    ids=["mixtral", "qwen_moe"],
)
def test_the_routers_of_kerashub_are_told(build: Callable, layer: str) -> None:
    import keras_hub

    study = studied(*build(keras_hub))
    losses = [f for f in study.findings if f.what == "a value given to add_loss"]
    assert len(losses) == 2 and len(study.findings) == 2
    for finding in losses:
        assert finding.where.operation == "Sum, then Maximum"  # the load over what the mask keeps
        assert layer in finding.where.layer


APPLICATIONS = {
    "MobileNetV2": 32,
    "ResNet50": 32,
    "DenseNet121": 32,
    "EfficientNetB0": 32,
    "ConvNeXtTiny": 32,
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "size"), APPLICATIONS.items(), ids=APPLICATIONS.keys())
def test_applications_are_silent_but_for_batch_normalization(name: str, size: int) -> None:
    build = getattr(keras.applications, name)
    model = build(weights=None, include_top=False, pooling="avg", input_shape=(size, size, 3))
    study = studied(model, np.zeros((2, size, size, 3), "float32"))
    assert (study.findings, study.mixings, study.failed) == ((), (), "")
    layers = [n.path for n in model.layers if isinstance(n, keras.layers.BatchNormalization)]
    assert sorted(study.statistics) == sorted(layers)
    assert len(study.lines()) == (1 if layers else 0)
