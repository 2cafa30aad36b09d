"""Convolutions of which channels are cut, by filters and by what they take, equal one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers

from .case import CLASSES, Case, Data, Layout, labels, weights
from .harness import compare
from .matrix import level_config, product, spread
from .optimizer_zoo import OPTIMIZERS

DIMS = {"1d": 1, "2d": 2, "3d": 3}
SIDE = 6


def _convolutions(dims: int) -> Callable[[], keras.Model]:
    kind = f"{dims}D"
    forward, transposed = getattr(layers, f"Conv{kind}"), getattr(layers, f"Conv{kind}Transpose")

    def build() -> keras.Model:
        x = inputs = keras.Input((SIDE,) * dims + (3,), name="image")
        x = forward(8, 3, padding="same", activation="relu", name="up")(x)
        if dims < 3:
            x = getattr(layers, f"DepthwiseConv{kind}")(2, padding="same", name="each")(x)
        x = forward(6, 2, strides=2, name="down")(x)
        x = layers.Activation("tanh", name="tanh")(x)
        x = transposed(8, 3, strides=2, padding="same", name="larger")(x)
        x = transposed(4, 2, use_bias=False, name="last")(x)
        x = layers.Flatten(name="row")(x)
        return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name=f"window_{kind}")

    return build


def _data(dims: int) -> Callable[[int, int], Data]:
    def data(seed: int, samples: int) -> Data:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(samples, *(SIDE,) * dims, 3))
        return x, labels(rng, samples), weights(rng, samples)

    return data


def _layouts(dims: int) -> Mapping[str, Layout]:
    window: Layout = (None,) * dims
    by_filters, by_channels = (*window, None, "model"), (*window, "model", None)
    return {
        "up/kernel": by_filters,
        "up/bias": ("model",),
        **({"each/kernel": by_channels, "each/bias": ("model",)} if dims < 3 else {}),
        "down/kernel": by_channels,
        # The filters of a transposed one come before the channels that it takes.
        "larger/kernel": by_channels,
        "larger/bias": ("model",),
        "last/kernel": by_filters,
    }


def _pooled() -> keras.Model:
    x = inputs = keras.Input((SIDE, SIDE, 3), name="image")
    x = layers.Conv2D(8, 3, padding="same", activation="tanh", name="up")(x)
    x = layers.MaxPooling2D(3, 2, padding="same", name="maxima")(x)
    x = layers.DepthwiseConv2D(2, padding="same", name="each")(x)
    x = layers.UpSampling2D(2, interpolation="bilinear", name="twice")(x)
    x = layers.Conv2D(6, 2, name="down")(layers.SpatialDropout2D(0.0, name="drop")(x))
    x = layers.Conv2DTranspose(8, 3, padding="same", name="larger")(x)
    x = layers.AveragePooling2D(2, name="means")(layers.Resizing(4, 6, name="resized")(x))
    x = layers.Conv2D(4, 2, use_bias=False, name="last")(layers.ZeroPadding2D(name="edge")(x))
    x = layers.Flatten(name="row")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="window_pooled")


def _dilated() -> keras.Model:
    x = inputs = keras.Input((SIDE, SIDE, 3), name="image")
    how = {"padding": "same", "activation": "tanh"}
    x = layers.Conv2D(8, 3, dilation_rate=2, name="up", **how)(x)
    x = layers.DepthwiseConv2D(2, dilation_rate=(1, 3), name="each", **how)(x)
    x = layers.SeparableConv2D(6, 2, dilation_rate=2, name="down")(x)
    x = layers.Reshape((-1, 6), name="row")(x)
    x = layers.Conv1D(8, 3, dilation_rate=4, padding="causal", name="larger")(x)
    x = layers.Conv1D(4, 2, dilation_rate=2, use_bias=False, name="last")(x)
    x = layers.Flatten(name="flat")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="window_dilated")


def _separable() -> keras.Model:
    x = inputs = keras.Input((SIDE, SIDE, 3), name="image")
    x = layers.SeparableConv2D(8, 3, padding="same", activation="tanh", name="up")(x)
    gate = layers.GlobalAveragePooling2D(keepdims=True, name="means")(x)
    gate = layers.Conv2D(2, 1, activation="tanh", name="squeeze")(gate)
    gate = layers.Conv2D(8, 1, activation="sigmoid", name="excite")(gate)
    x = layers.Multiply(name="gated")([x, gate])
    x = layers.SeparableConv2D(6, 2, strides=2, name="down")(x)
    x = layers.Reshape((-1, 6), name="row")(x)
    x = layers.SeparableConv1D(4, 2, use_bias=False, name="last")(x)
    x = layers.Flatten(name="flat")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="window_separable")


_COLUMNS, _ROWS = (None, None, None, "model"), (None, None, "model", None)


CASES = {
    name: Case(name=f"window_{name}", build=_convolutions(n), data=_data(n), layout_map=_layouts(n))
    for name, n in DIMS.items()
}
CASES["pooled"] = Case(
    name="window_pooled",
    build=_pooled,
    data=_data(2),
    layout_map={**_layouts(2), "last/kernel": (None, None, "model", None)},
)
CASES["dilated"] = Case(
    name="window_dilated",
    build=_dilated,
    data=_data(2),
    layout_map={
        "up/kernel": _COLUMNS,
        "up/bias": ("model",),
        "each/kernel": _ROWS,
        "each/bias": ("model",),
        "down/.*_kernel": _ROWS,
        "larger/kernel": (None, None, "model"),
        "larger/bias": ("model",),
        "last/kernel": (None, "model", None),
    },
)
CASES["separable"] = Case(
    name="window_separable",
    build=_separable,
    data=_data(2),
    layout_map={
        "up/pointwise_kernel": _COLUMNS,
        "up/bias": ("model",),
        "squeeze/kernel": _ROWS,
        "excite/kernel": _COLUMNS,
        "excite/bias": ("model",),
        "down/depthwise_kernel": _ROWS,
        "down/pointwise_kernel": _ROWS,
        "last/depthwise_kernel": (None, "model", None),
        "last/pointwise_kernel": (None, "model", None),
    },
)
MESHES = {
    "model2": {"model": 2},
    "data2_model2": {"data": 2, "model": 2},
    "model2_data2": {"model": 2, "data": 2},
    "pipe2_model2": {"pipe": 2, "model": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}
MORE: Mapping[str, Any] = {
    "nothing": {},
    "recompute": {"recompute": kdist.RecomputeConfig()},
    "fusion": {"fusion": kdist.FusionConfig(mode="size", size_mb=0.001)},
    "alltoall": {"enable_alltoall": True},
}
LEVELS = ("level0", "level1", "level2", "level3")


def _config(mesh: str, level: str, more: str = "nothing") -> dict[str, Any]:
    stages = {"pipeline": kdist.PipelineConfig(micro_batches=2)} if "pipe" in mesh else {}
    return {**level_config(level), **MORE[more], **stages}


# A level slices over data.
ROWS = [
    row for row in product(CASES, MESHES, LEVELS, MORE) if "data2" in row[1] or row[2] == "level0"
]


@pytest.mark.parametrize(
    ("name", "mesh", "level", "more"),
    spread(
        ROWS,
        [
            ("2d", "data2_model2", "level3", "nothing"),
            ("1d", "pipe2_model2", "level0", "nothing"),
            ("3d", "model2", "level0", "nothing"),
            ("2d", "model2_data2", "level1", "recompute"),
            ("2d", "pipe2_data2_model2", "level2", "fusion"),
            ("1d", "data2_model2", "level2", "alltoall"),
            ("2d", "pipe2_data2_model2", "level3", "recompute"),
            ("pooled", "data2_model2", "level2", "nothing"),
            ("pooled", "pipe2_model2", "level0", "recompute"),
            ("dilated", "data2_model2", "level1", "nothing"),
            ("separable", "data2_model2", "level3", "recompute"),
            ("separable", "pipe2_data2_model2", "level1", "fusion"),
            ("3d", "pipe2_data2_model2", "level1", "nothing"),
        ],
    ),
)
def test_cut_channels_equal_one_device(
    name: str, mesh: str, level: str, more: str, engine: str
) -> None:
    compare(
        CASES[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        config=_config(mesh, level, more),
    )


# The first layer has no gradient of its input; `larger` reads a sum, which is whole.
_SUMS = {
    ("down", "forward", "all-reduce"),
    ("last", "forward", "all-reduce"),
    ("larger", "backward", "all-reduce"),
}
SENT = dict.fromkeys(CASES, _SUMS) | {
    "separable": {
        ("squeeze", "forward", "all-reduce"),
        ("excite", "backward", "all-reduce"),
        ("down", "forward", "all-reduce"),
        ("last", "forward", "all-reduce"),
        # What its filters for each channel made, which are whole.
        ("up", "backward", "all-reduce"),
        # `last` takes parts of what is whole.
        ("row", "backward", "all-gather"),
    }
}


@pytest.mark.parametrize("name", list(CASES))
def test_sums_are_all_that_is_sent(name: str) -> None:
    """Forward of what is cut by the channels taken, backward of what is cut by filters."""
    model = CASES[name].build()
    config = kdist.ParallelConfig(mesh=kdist.mesh(model=2), layout_map=CASES[name].layout_map)
    kdist.parallelize(model, config)
    model.compile("sgd", "sparse_categorical_crossentropy")
    found = kdist.inspect(model, 4)
    assert found.gathered == found.islands == found.fallbacks == ()
    inside = [(one.layer, one.phase, one.kind) for one in found.collectives]
    assert sorted(inside) == sorted(SENT[name])


class Pictures(keras.Model):
    """A model whose layers Keras does not connect."""

    def __init__(self) -> None:
        super().__init__(name="pictures")
        self.up = layers.Conv2D(8, 3, padding="same", activation="relu", name="up")
        self.down = layers.Conv2D(4, 3, name="down")
        self.pool = layers.GlobalAveragePooling2D(name="pool")
        self.head = layers.Dense(2, name="head")

    def call(self, inputs: Any) -> Any:
        return self.head(self.pool(self.down(self.up(inputs))))


def test_pictures_of_many_sizes_and_a_short_batch_in_a_subclassed_model(float64: None) -> None:
    rng = np.random.default_rng(0)
    sizes = [(12, 6, 6), (12, 8, 6), (11, 7, 9), (12, 6, 6), (9, 5, 5)]
    batches = [(rng.normal(size=(*one, 3)), rng.normal(size=(one[0], 2))) for one in sizes]
    cut = {"up/kernel": (None, None, None, "model"), "down/kernel": (None, None, "model", None)}
    weights = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        model = Pictures()
        model(batches[0][0])
        if parallel:
            mesh = kdist.mesh(data=2, model=2)
            layouts = {f".*{path}": dims for path, dims in cut.items()}
            kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, layout_map=layouts))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        for x, y in batches:
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


class Own(keras.layers.Layer):
    """Convolves by itself, each channel too."""

    def build(self, shape: Any) -> None:
        self.filters = self.add_weight(shape=(3, 3, shape[-1], 8), name="filters")
        self.each = self.add_weight(shape=(2, 2, 8, 1), name="each")

    def call(self, inputs: Any) -> Any:
        x = keras.ops.conv(inputs, self.filters, padding="same")
        return keras.ops.depthwise_conv(keras.ops.relu(x), self.each)


OWN = {"own/filters": (None, None, None, "model"), "own/each": (None, None, "model", None)}


@pytest.mark.parametrize("names", [["own/filters", "own/each"], ["own/each"]])
@pytest.mark.parametrize("sizes", [[(8, 6, 6)], [(8, 6, 6), (8, 8, 6), (7, 7, 9)]])
def test_layers_that_convolve_themselves(
    sizes: list[Any], names: list[str], float64: None, recwarn: pytest.WarningsRecorder
) -> None:
    weights = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        x = inputs = keras.Input((None, None, 3))
        x = layers.GlobalAveragePooling2D(name="pool")(Own(name="own")(x))
        model = keras.Model(inputs, layers.Dense(2, name="head")(x))
        if parallel:
            cut = {name: OWN[name] for name in names}
            kdist.parallelize(
                model, kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=cut)
            )
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", jit_compile=False)
        for n, size in enumerate(sizes):
            rng = np.random.default_rng(n)
            images, targets = rng.normal(size=(*size, 3)), rng.normal(size=(size[0], 2))
            model.fit(images, targets, batch_size=8, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    if len(names) == 2:  # what is cut between them is all that they take
        assert not [one for one in recwarn if "cannot expand" in str(one.message)]


def test_what_comes_along_a_cut_sequence_is_pooled_whole() -> None:
    """As DTensor pools it: no island for the sake of cut convolutions elsewhere."""
    x = inputs = keras.Input((12, 6))
    x = layers.Dense(16, activation="tanh", name="wide")(x)
    x = layers.MaxPooling1D(2, name="pool")(layers.Dense(6, name="narrow")(x))
    x = layers.Conv1D(8, 3, padding="same", name="up")(x)
    x = layers.Conv1D(6, 3, padding="same", name="down")(x)
    model = keras.Model(inputs, layers.GlobalMaxPooling1D(name="maxima")(x))
    layouts = kdist.layout_map_for(model, kdist.mesh(model=2))
    assert len(layouts) == 6
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(model=2), layout_map=layouts, sequence_parallel=True
    )
    kdist.parallelize(model, config).compile("sgd", "mse")
    assert kdist.inspect(model, 8).islands == ()
