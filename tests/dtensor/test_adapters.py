"""Factors of LoRA are cut like what they adapt: nothing of the size of that travels."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.api.attached import attached

import keras
import numpy as np
import pytest

WIDTH, HEADS, HEAD, RANK, WORDS, ROWS = 16, 4, 8, 2, 12, 4
FLOAT = 4


def two_products(name: str) -> list[keras.layers.Layer]:
    if name == "dense":
        up = keras.layers.Dense(64, "tanh", use_bias=False, name="up")
        return [up, keras.layers.Dense(WIDTH, use_bias=False, name="down")]
    up = keras.layers.EinsumDense(
        "abc,chd->abhd", (None, HEADS, HEAD), activation="tanh", name="up"
    )
    return [up, keras.layers.EinsumDense("abhd,hdc->abc", (None, WIDTH), name="down")]


CUTS: dict[str, dict[str, Any]] = {
    "dense": {"up/kernel": (None, "model"), "down/kernel": ("model", None)},
    "einsum": {"up/kernel": (None, "model", None), "down/kernel": ("model", None, None)},
}
LAYOUTS: dict[str, dict[str, tuple[str | None, ...]]] = {
    "dense": {
        "up/lora_kernel_a": (None, None),
        "up/lora_kernel_b": (None, "model"),
        "down/lora_kernel_a": ("model", None),
        "down/lora_kernel_b": (None, None),
    },
    "einsum": {
        "up/lora_kernel_a": (None, "model", None),
        "up/lora_kernel_b": (None, None),
        "down/lora_kernel_a": ("model", None, None),
        "down/lora_kernel_b": (None, None),
    },
}


def adapted(name: str, layout_map: dict[str, Any], **axes: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((6, WIDTH))
    layers = two_products(name)
    for layer in layers:
        x = layer(x)
    for layer in layers:
        layer.enable_lora(RANK)
    model = keras.Model(inputs, x)
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layout_map)
    kdist.parallelize(model, config).compile("sgd", "mse")
    return model


def placed(model: keras.Model) -> dict[str, tuple[str | None, ...]]:
    return {one.path: one.layout.dims for one in model.plan().weights if "lora" in one.path}


@pytest.mark.parametrize("name", CUTS)
def test_only_sums_of_the_size_of_factors_travel(name: str) -> None:
    model = adapted(name, CUTS[name], model=4)
    assert placed(model) == LAYOUTS[name]
    found = kdist.inspect(model, ROWS).collectives
    assert {one.kind for one in found} == {"all-reduce"}
    activations = ROWS * 6 * WIDTH * FLOAT
    assert [one.bytes for one in found if one.phase == "forward"] == [activations]
    # Of the factor that is summed over the cut dim; the other one's gradient stays where it is.
    of_up = RANK * (WIDTH if name == "dense" else HEAD) * FLOAT
    back = sorted(one.bytes for one in found if one.phase == "backward")
    assert back == sorted([of_up, RANK * WIDTH * FLOAT])


def test_a_map_that_names_them_counts() -> None:
    whole = {".*/lora_kernel_.": (None, None)}
    model = adapted("dense", {**CUTS["dense"], **whole}, model=2)
    assert set(placed(model).values()) == {(None, None)}


def test_the_data_axis_cuts_what_it_is_told_to() -> None:
    layouts = {"up/kernel": (("model", "data"), None)}
    model = adapted("dense", layouts, data=2, model=2)
    assert placed(model)["up/lora_kernel_a"] == ("model", None)


def test_tables_too_but_no_convolutions() -> None:
    ids = keras.Input((6,), dtype="int32")
    words = keras.layers.Embedding(WORDS, WIDTH, name="words")
    filters = keras.layers.Conv1D(8, 3, name="filters")
    model = keras.Model(ids, filters(words(ids)))
    words.enable_lora(RANK)
    filters.enable_lora(RANK)
    layouts = {"words/embeddings": ("model", None), "filters/kernel": (None, None, "model")}
    config = kdist.ParallelConfig(mesh=kdist.mesh(model=2), layout_map=layouts)
    kdist.parallelize(model, config).compile("sgd", "mse")
    assert placed(model) == {
        "words/lora_embeddings_a": ("model", None),
        "words/lora_embeddings_b": (None, None),
        "filters/lora_kernel_a": (None, None, None),
        "filters/lora_kernel_b": (None, None),
    }


def test_factors_that_come_later_follow() -> None:
    """`enable_lora` after the model was parallelized, and trained."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((WIDTH,))
    layers = two_products("dense")
    for layer in layers:
        x = layer(x)
    model = keras.Model(inputs, x)
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=CUTS["dense"])
    kdist.parallelize(model, config).compile("sgd", "mse")
    batch = np.ones((ROWS, WIDTH), np.float32)
    model.train_on_batch(batch, batch)
    for layer in layers:
        layer.enable_lora(RANK)
    model.compile("sgd", "mse")
    model.train_on_batch(batch, batch)
    assert placed(model) == LAYOUTS["dense"]
    assert not attached(model).fallbacks
