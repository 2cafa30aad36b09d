"""Multi-query attention under maps that cut query, key and value alike: a key head stays whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers

from .attention_models import GPT
from .case import TOKENS, WIDTH
from .harness import Run, build, compare, compiled, precision
from .matrix import product, spread
from .optimizer_zoo import OPTIMIZERS

HIDDEN = 9
VOCABULARY = 18
HYBRID = {"data": 2, "model": 2}


def multi_query() -> keras.Model:
    """Four heads of queries share one of keys and values, as in Gemma 2B."""
    x = inputs = keras.Input((TOKENS,), dtype="int32", name="tokens")
    tokens = layers.ReversibleEmbedding(
        VOCABULARY, WIDTH, embeddings_initializer="normal", name="token_embedding"
    )
    x = tokens(x)
    for i in range(2):
        name = f"decoder_block_{i}"
        h = layers.LayerNormalization(name=f"{name}_norm")(x)
        attention = layers.GroupQueryAttention(2, 4, 1, name=f"{name}_attention")
        x = layers.Add(name=f"{name}_add")([x, attention(h, h, use_causal_mask=True)])
        h = layers.Dense(HIDDEN, activation="gelu", name=f"{name}_ffw_gating")(x)
        x = layers.Add(name=f"{name}_ffw_add")(
            [x, layers.Dense(WIDTH, name=f"{name}_ffw_linear")(h)]
        )
    return keras.Model(inputs, tokens(x, reverse=True), name="multi_query")


def get_layout_map(mesh: Any) -> keras.distribution.LayoutMap:
    """Written as KerasHub writes them: one pattern for query, key and value, both axes used."""
    data, model = mesh.axis_names[0], mesh.axis_names[-1]
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["token_embedding/embeddings"] = (model, data)
    layout_map["decoder_block.*attention.*(query|key|value)/kernel"] = (data, model, None)
    layout_map["decoder_block.*attention.*(query|key|value)/bias"] = (model, None)
    layout_map["decoder_block.*attention_output/kernel"] = (model, None, data)
    layout_map["decoder_block.*ffw_gating/kernel"] = (data, model)
    layout_map["decoder_block.*ffw_gating/bias"] = (data,)
    layout_map["decoder_block.*ffw_linear/kernel"] = (model, data)
    return layout_map


def several_axes(mesh: Any) -> dict[str, Any]:
    """The same, with a dim that both axes cut, which Keras's own map has no form for."""
    return {**get_layout_map(mesh), "token_embedding/embeddings": (("model", "data"), None)}


CASE = dataclasses.replace(
    GPT,
    name="multi_query",
    build=multi_query,
    layout_map={},
    zero_gradient_paths=(".*attention/key/bias",),
)
MESHES: Mapping[str, Mapping[str, int]] = {
    "data2_model2": HYBRID,
    "data2_model4": {"data": 2, "model": 4},
    "data4_model2": {"data": 4, "model": 2},
}


@pytest.mark.parametrize(
    ("mesh", "level"), spread(product(MESHES, (0, 1, 3)), [("data2_model2", 0)])
)
def test_a_multi_query_model_equals_one_device(mesh: str, level: int, engine: str) -> None:
    compare(
        CASE,
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        layout_map=several_axes,
        config={
            "indivisible": "replicate",
            "optimizer": kdist.OptimizerConfig(level=level, threshold_kb=0),
        },
    )


def test_it_runs_over_dtensor() -> None:
    """The comparison above is not one of gathered weights."""
    with precision("float64"):
        model = build(CASE)
        mesh = kdist.mesh(**HYBRID)
        config = kdist.ParallelConfig(
            mesh=mesh, layout_map=several_axes(mesh), indivisible="replicate"
        )
        kdist.parallelize(model, config)
        model.compile("sgd", CASE.loss("sum_over_batch_size"))
        x, y, _ = CASE.data(0, 8)
        model.train_on_batch(x, y)
    inspection = kdist.inspect(model)
    assert inspection.fallbacks == ()
    assert inspection.count("all-reduce", phase="forward") >= 2


def test_what_is_left_whole_is_in_the_plan() -> None:
    run = Run(
        case=CASE,
        mesh_axes=HYBRID,
        optimizer=OPTIMIZERS["sgd"],
        layout_map=several_axes,
        config={"indivisible": "replicate"},
    )
    with precision("float64"):
        model = compiled(run, "kdist")
    plan = model.plan()
    expected = ["dim 0 of 'token_embedding/embeddings' is whole: its 18 elements do not divide by "]
    expected[0] += "model=2 x data=2"
    for i in range(2):
        block = f"decoder_block_{i}"
        for name in ("key", "value"):
            what = f"'{block}_attention/{name}/"
            expected.append(
                f"dim 1 of {what}kernel' is whole: its 1 elements do not divide by model=2"
            )
            expected.append(
                f"dim 0 of {what}bias' is whole: its 1 elements do not divide by model=2"
            )
        for dim, name, axis in (
            (1, "gating/kernel", "model"),
            (0, "gating/bias", "data"),
            (0, "linear/kernel", "model"),
        ):
            what = f"dim {dim} of '{block}_ffw_{name}' is whole: "
            expected.append(f"{what}its 9 elements do not divide by {axis}=2")
    assert sorted(note for note in plan.notes if " is whole: " in note) == sorted(expected)
    parts = {w.path: w.shards[0].shape for w in plan.weights}
    assert parts["token_embedding/embeddings"] == (VOCABULARY, WIDTH)
    # Only the dim that does not divide is whole: the data axis still cuts the other.
    assert parts["decoder_block_0_attention/query/kernel"] == (WIDTH // 2, 2, 2)
    assert parts["decoder_block_0_attention/key/kernel"] == (WIDTH // 2, 1, 2)
    assert parts["decoder_block_0_ffw_gating/kernel"] == (WIDTH // 2, HIDDEN)


def test_by_default_it_is_an_error_that_names_the_way_out() -> None:
    with precision("float64"):
        model = build(CASE)
        config = kdist.ParallelConfig(
            mesh=(mesh := kdist.mesh(**HYBRID)), layout_map=get_layout_map(mesh)
        )
        with pytest.raises(ValueError, match=r"indivisible='replicate'.*Received: layout="):
            kdist.parallelize(model, config)
        replicate = dataclasses.replace(config, indivisible="replicate")
        assert kdist.parallelize(model, replicate) is model


def test_weights_that_shard_declares_are_left_whole_too() -> None:
    layer = layers.Dense(3, name="up")
    kdist.shard(layer, in_strategy=((1, 1), (1, 2)))
    model = keras.Sequential([keras.Input((4,)), layer])
    config = kdist.ParallelConfig(mesh=kdist.mesh(model=2), indivisible="replicate")
    kdist.parallelize(model, config)
    (note,) = (n for n in model.plan().notes if " is whole: " in n)
    assert note.endswith("its 3 elements do not divide by model=2")
    assert np.shape(model.predict(np.ones((2, 4)), verbose=0)) == (2, 3)


def test_a_layout_of_another_rank_stays_an_error() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="up")])
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(model=2), layout_map={".*up/kernel": ("model",)}, indivisible="replicate"
    )
    with pytest.raises(ValueError, match="1 entries and the tensor 2 dims"):
        kdist.parallelize(model, config)
