"""Vision transformers: patches by convolution, places, heads that are unstacked, views stacked."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers, ops

from .case import CLASSES, Case, Data, labels, weights
from .harness import Run, compare, compiled, precision, train_batches
from .matrix import MESHES, level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .outcome import TOLERANCES, check

SIDE, WIDTH, HEADS = 4, 8, 2
PATCHES = (SIDE // 2) ** 2


@keras.saving.register_keras_serializable("equivalence")
class Places(layers.Layer):
    """Adds a trained vector per patch to inputs of shape `(batch, rows, columns, width)`."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.place = self.add_weight(
            shape=(1, *input_shape[1:]), initializer="normal", name="place"
        )

    def call(self, inputs: Any) -> Any:
        return inputs + self.place


@keras.saving.register_keras_serializable("equivalence")
class Windows(layers.Layer):
    """Attention with one projection for queries, keys and values, and a bias for each head."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.qkv = layers.Dense(3 * WIDTH, name="qkv")
        self.qkv.build(input_shape)
        self.bias = self.add_weight(
            shape=(HEADS, PATCHES, PATCHES), initializer="normal", name="bias"
        )

    def call(self, inputs: Any) -> Any:
        x = ops.reshape(self.qkv(inputs), (-1, PATCHES, 3, HEADS, WIDTH // HEADS))
        queries, keys, values = ops.unstack(ops.transpose(x, (2, 0, 3, 1, 4)), 3)
        scores = ops.matmul(queries, ops.transpose(keys, (0, 1, 3, 2))) + self.bias
        x = ops.matmul(ops.softmax(scores), values)
        return ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (-1, PATCHES, WIDTH))


@keras.saving.register_keras_serializable("equivalence")
class Views(layers.Layer):
    """The largest of two tensors, of which one is cut and one is not."""

    def call(self, first: Any, second: Any) -> Any:
        return ops.logsumexp(ops.stack([first, second], axis=1), axis=1)


def _parts() -> list[Any]:
    return [
        layers.Conv2D(WIDTH, 2, strides=2, name="patches"),
        Places(name="places"),
        layers.Reshape((PATCHES, WIDTH), name="row"),
        Windows(name="windows"),
        layers.Dense(WIDTH, "tanh", name="up"),
        layers.LayerNormalization(name="norm"),
        Views(name="views"),
        layers.GlobalAveragePooling1D(name="pool"),
        layers.Dense(CLASSES, name="head"),
    ]


def _connected(parts: list[Any], x: Any) -> Any:
    patches, places, row, windows, up, norm, views, pool, head = parts
    x = row(places(patches(x)))
    x = views(up(windows(x)), norm(x))
    return head(pool(x))


def _functional() -> keras.Model:
    inputs = keras.Input((SIDE, SIDE, 3), name="images")  # three channels: no two devices' share
    return keras.Model(inputs, _connected(_parts(), inputs), name="patches")


@keras.saving.register_keras_serializable("equivalence")
class Subclassed(keras.Model):
    """The same as a class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.parts = _parts()

    def call(self, inputs: Any) -> Any:
        return _connected(self.parts, inputs)


def _subclassed() -> keras.Model:
    model = Subclassed(name="patches")
    model(np.zeros((1, SIDE, SIDE, 3)))
    return model


def _data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(samples, SIDE, SIDE, 3))
    return images, labels(rng, samples), weights(rng, samples)


CUTS = {
    ".*place": (None, None, None, "model"),
    ".*qkv/kernel": (None, "model"),
    ".*qkv/bias": ("model",),
    ".*windows/bias": ("model", None, None),
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*norm/output": (None, None, None),
}
CASES = {
    name: Case(name=name, build=build, data=_data, layout_map=CUTS)
    for name, build in (("functional", _functional), ("subclassed", _subclassed))
}
STAGES = {"pipe": 2, "data": 2, "model": 2}
WAYS: dict[str, dict[str, Any]] = {
    **{name: level_config(name) for name in ("level0", "level1", "level2", "level3")},
    "global": {"batch_semantics": "global"},
    "recompute": {"recompute": kdist.RecomputeConfig(layers=[".*windows"], policy="full")},
    "1f1b": {"pipeline": kdist.PipelineConfig(micro_batches=2)},
    "zero_bubble": {"pipeline": kdist.PipelineConfig(micro_batches=2, schedule="zero_bubble")},
    "stages_level3": {
        "pipeline": kdist.PipelineConfig(micro_batches=2),
        **level_config("level3"),
    },
}
ROWS = [
    (case, way)
    for case, way in product(CASES, WAYS)
    if not ("pipeline" in WAYS[way] and case == "subclassed")
]
DEFAULT = [
    ("functional", "level3"),
    ("functional", "zero_bubble"),
    ("subclassed", "level0"),
    ("functional", "global"),
    ("functional", "recompute"),
    ("functional", "stages_level3"),
]


def _axes(way: str) -> dict[str, int]:
    return STAGES if "pipeline" in WAYS[way] else dict(MESHES["data2_model2"])


@pytest.mark.parametrize(("case", "way"), spread(ROWS, DEFAULT, 0))
def test_equals_one_device(case: str, way: str) -> None:
    """Of 13 examples the last batch has five."""
    compare(CASES[case], _axes(way), optimizer=OPTIMIZERS["adam"], config=WAYS[way], samples=13)


@pytest.mark.parametrize(
    "way", [pytest.param("level0"), pytest.param("1f1b", marks=pytest.mark.wide)]
)
def test_no_operation_is_an_island(way: str) -> None:
    run = Run(
        case=CASES["functional"],
        mesh_axes=_axes(way),
        optimizer=OPTIMIZERS["sgd"],
        config=WAYS[way],
    )
    with precision("float64"):
        model = compiled(run, "kdist")
        x, y, _ = _data(0, 8)
        model.train_on_batch(x, y)
        found = kdist.inspect(model)
    assert found.islands == () and found.fallbacks == ()


@pytest.mark.wide
def test_batches_of_many_sizes() -> None:
    """From the third on, one program is for all."""
    run = Run(
        case=CASES["functional"],
        mesh_axes=MESHES["data2_model2"],
        optimizer=OPTIMIZERS["adam"],
    )
    expected, actual = (
        train_batches(run, engine, (8, 4, 6, 12, 10, 2)) for engine in ("plain", "kdist")
    )
    check(expected, actual, TOLERANCES["float64"], title="patches of many batches")


@pytest.mark.wide
@pytest.mark.parametrize("way", ["level0", "1f1b"])
def test_mixed_precision(way: str) -> None:
    compare(
        CASES["functional"],
        _axes(way),
        optimizer=OPTIMIZERS["sgd_momentum"],
        config=WAYS[way],
        dtype="mixed_bfloat16",
    )
