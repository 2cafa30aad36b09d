"""Layout maps that are found for convolutions: pairs of them, by channels."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers


def norm(name: str) -> dict[str, Any]:
    ends = ("gamma", "beta", "moving_mean", "moving_variance")
    return {f"{name}/{end}": ("model",) for end in ends}


FILTERS = (None, None, None, "model")
CHANNELS = (None, None, "model", None)


def axes(**sizes: int) -> Any:
    return kdist.mesh(**(sizes or {"data": 2, "model": 2}))


def convolved(x: Any, width: int, window: int, name: str, norm: bool = True, **how: Any) -> Any:
    x = layers.Conv2D(width, window, padding="same", name=name, **how)(x)
    return layers.BatchNormalization(momentum=0.7, name=f"{name}_norm")(x) if norm else x


def residual() -> keras.Model:
    """Two blocks with a shortcut, as in a ResNet."""
    x = inputs = keras.Input((6, 6, 3))
    x = convolved(x, 8, 3, "stem")
    for n in range(2):
        h = layers.ReLU(name=f"relu_{n}_1")(convolved(x, 4, 1, f"block_{n}_1"))
        h = layers.ReLU(name=f"relu_{n}_2")(convolved(h, 4, 3, f"block_{n}_2"))
        h = convolved(h, 8, 1, f"block_{n}_3")
        x = layers.ReLU(name=f"relu_{n}")(layers.Add(name=f"add_{n}")([x, h]))
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def inverted() -> keras.Model:
    """A block that is wide inside, where each channel is convolved for itself: a MobileNet's."""
    x = inputs = keras.Input((6, 6, 4))
    h = layers.ReLU(6.0, name="relu_1")(convolved(x, 16, 1, "expand", use_bias=False))
    h = layers.DepthwiseConv2D(3, padding="same", name="depthwise")(h)
    h = layers.ReLU(6.0, name="relu_2")(layers.BatchNormalization(name="depthwise_norm")(h))
    x = layers.Add(name="add")([x, convolved(h, 4, 1, "project")])
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def smaller_and_larger() -> keras.Model:
    x = inputs = keras.Input((6, 6, 4))
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu", name="down")(x)
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same", name="up")(x)
    x = layers.Flatten(name="row")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def pooled() -> keras.Model:
    """A picture's classes, as in a first tutorial; and one that is made larger again."""
    x = inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, activation="relu", name="first")(x)
    x = layers.MaxPooling2D(name="maxima")(x)
    x = layers.Conv2D(6, 3, padding="same", activation="relu", name="second")(x)
    x = layers.UpSampling2D(2, interpolation="bilinear", name="larger")(x)
    x = layers.Conv2D(8, 3, activation="relu", name="third")(layers.ZeroPadding2D(name="edge")(x))
    x = layers.GlobalAveragePooling2D(name="means")(layers.AveragePooling2D(2, name="pool")(x))
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Dropout(0.0, name="drop")(x)))


def gated() -> keras.Model:
    """A wide block with a gate for each channel, as in an EfficientNet; and separable ones."""
    x = inputs = keras.Input((6, 6, 3))
    x = layers.SeparableConv2D(8, 3, padding="same", name="stem")(x)
    x = layers.SeparableConv2D(4, 3, padding="same", name="taken")(layers.ReLU(name="relu")(x))
    h = convolved(x, 16, 1, "expand", activation="swish")
    h = layers.DepthwiseConv2D(3, padding="same", name="depthwise")(h)
    gate = layers.Reshape((1, 1, 16), name="one")(layers.GlobalAveragePooling2D(name="means")(h))
    gate = layers.Conv2D(2, 1, activation="swish", name="squeeze")(gate)
    gate = layers.Conv2D(16, 1, activation="sigmoid", name="excite")(gate)
    h = convolved(layers.Multiply(name="gated")([h, gate]), 4, 1, "project")
    x = layers.GlobalAveragePooling2D(name="pool")(layers.Add(name="add")([x, h]))
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


FOUND: dict[str, tuple[Callable[[], keras.Model], dict[str, Any]]] = {
    "residual": (
        residual,
        {
            r"block_\d+_1/kernel": FILTERS,
            r"block_\d+_1/bias": ("model",),
            **norm(r"block_\d+_1_norm"),
            r"block_\d+_2/kernel": CHANNELS,
        },
    ),
    "inverted": (
        inverted,
        {
            "expand/kernel": FILTERS,
            **norm("expand_norm"),
            "depthwise/kernel": CHANNELS,
            "depthwise/bias": ("model",),
            **norm("depthwise_norm"),
            "project/kernel": CHANNELS,
        },
    ),
    "smaller and larger": (
        smaller_and_larger,
        {"down/kernel": FILTERS, "down/bias": ("model",), "up/kernel": FILTERS},
    ),
    "pooled": (
        pooled,
        {
            "first/kernel": FILTERS,
            "first/bias": ("model",),
            "second/kernel": CHANNELS,
            "third/kernel": FILTERS,
            "third/bias": ("model",),
            "head/kernel": ("model", None),
        },
    ),
    "gated": (
        gated,
        {
            "stem/pointwise_kernel": FILTERS,
            "stem/bias": ("model",),
            "taken/depthwise_kernel": CHANNELS,
            "taken/pointwise_kernel": CHANNELS,
            "expand/kernel": FILTERS,
            "expand/bias": ("model",),
            **norm("expand_norm"),
            "depthwise/kernel": CHANNELS,
            "depthwise/bias": ("model",),
            "squeeze/kernel": CHANNELS,
            "excite/kernel": FILTERS,
            "excite/bias": ("model",),
            "project/kernel": CHANNELS,
        },
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_pairs_are_cut_by_filters_and_by_what_they_take(name: str) -> None:
    build, wanted = FOUND[name]
    assert kdist.layout_map_for(build(), axes()) == wanted


@pytest.mark.parametrize("name", FOUND)
def test_they_train_as_one_device_does_and_send_a_sum_for_each_pair(
    name: str, float64: None
) -> None:
    build, wanted = FOUND[name]
    rng = np.random.default_rng(0)
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(build())
    plain, parallel = models
    x, y = rng.normal(size=(8, *plain.input_shape[1:])), rng.normal(size=(8, 2))
    kdist.parallelize(parallel, kdist.ParallelConfig(mesh=axes(model=2), layout_map=wanted))
    for model in models:
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    for one, other in zip(plain.get_weights(), parallel.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    found = kdist.inspect(parallel)
    pairs = {"residual": 2, "pooled": 2, "gated": 3}.get(name, 1)
    assert found.count("all-reduce", phase="forward") == pairs
    assert found.count("all-gather") == 0
    assert found.gathered == found.islands == ()


def test_where_nothing_is_convolved_pooling_keeps_products_apart() -> None:
    """DTensor pools whole features there. What else there is by channel does not."""
    inputs = keras.Input((6, 4))
    for between, found in ((layers.MaxPooling1D(name="by"), 0), (layers.ReLU(name="by"), 3)):
        x = layers.Dense(8, name="up")(inputs)
        model = keras.Model(inputs, layers.Dense(4, name="down")(between(x)))
        if found:
            assert len(kdist.layout_map_for(model, axes())) == found
        else:
            with pytest.raises(ValueError, match="Nothing to cut"):
                kdist.layout_map_for(model, axes())


@pytest.mark.parametrize(
    "layer",
    [
        layers.MaxPooling2D(data_format="channels_first"),
        layers.UpSampling2D(interpolation="lanczos3"),
        layers.Resizing(4, 4, antialias=True),
    ],
    ids=["channels first", "another interpolation", "antialias"],
)
def test_what_is_not_resized_or_pooled_by_channel_keeps_them_apart(layer: keras.Layer) -> None:
    inputs = keras.Input((4, 4, 4))
    x = layer(layers.Conv2D(4, 3, padding="same", name="first")(inputs))
    model = keras.Model(inputs, layers.Conv2D(4, 1, name="second")(x))
    with pytest.raises(ValueError, match="Nothing to cut"):
        kdist.layout_map_for(model, axes())


def test_a_product_that_takes_and_gives_the_same_features_is_in_no_group() -> None:
    inputs = keras.Input((4, 4, 4))
    x = layers.Conv2D(4, 3, padding="same", name="first")(inputs)
    same = layers.Conv2D(4, 3, padding="same", name="same")(x)
    model = keras.Model(inputs, layers.Conv2D(4, 1, name="last")(layers.Add()([x, same])))
    with pytest.raises(ValueError, match="Nothing to cut"):
        kdist.layout_map_for(model, axes())


def test_a_norm_that_is_called_elsewhere_too_keeps_a_pair_apart() -> None:
    inputs = keras.Input((4, 4, 4))
    norm = layers.BatchNormalization(name="norm")
    x = norm(layers.Conv2D(4, 3, padding="same", name="first")(norm(inputs)))
    model = keras.Model(inputs, layers.Conv2D(4, 1, name="second")(x))
    with pytest.raises(ValueError, match="Nothing to cut"):
        kdist.layout_map_for(model, axes())


MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "stages": ({"pipe": 2}, {"pipeline": kdist.PipelineConfig(micro_batches=2)}),
    "stages of replicas": (
        {"pipe": 2, "data": 2},
        {
            "pipeline": kdist.PipelineConfig(micro_batches=4),
            "optimizer": kdist.OptimizerConfig(level=2, threshold_kb=0),
        },
    ),
    "replicas": ({"data": 2}, {"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0)}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_norms_of_parts_have_the_statistics_of_whole_ones(mesh: str, float64: None) -> None:
    """Of each micro-batch and replica: compared with a mesh that cuts no channels."""
    sizes, options = MESHES[mesh]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 6, 6, 4)), rng.normal(size=(20, 2))
    weights = []
    for inner in ({}, {"model": 2}):
        keras.utils.set_random_seed(0)
        model = inverted()
        config = kdist.ParallelConfig(
            mesh=kdist.mesh(**sizes, **inner),
            layout_map=FOUND["inverted"][1] if inner else {},
            **options,
        )
        kdist.parallelize(model, config)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("ResNet50", 0.61),
        ("MobileNetV2", 1.0),
        ("EfficientNetB0", 1.0),
        ("VGG16", 0.97),
        ("DenseNet121", 0.77),
        ("Xception", 0.8),
        ("InceptionV3", 0.63),
    ],
)
def test_how_much_of_known_networks_is_cut(name: str, share: float) -> None:
    """The figures of docs/tensor_parallelism.md."""
    model = getattr(keras.applications, name)(weights=None)
    found = kdist.layout_map_for(model, axes())
    sizes = {variable.path: variable.numpy().size for variable in model.weights}
    cut = sum(n for path, n in sizes.items() if any(re.search(one, path) for one in found))
    assert round(cut / sum(sizes.values()), 2) == share


def test_what_others_read_is_not_cut() -> None:
    """The first of a pair is read by a shortcut too: cut, it would be gathered there."""
    x = inputs = keras.Input((6, 6, 4))
    first = layers.Conv2D(4, 3, padding="same", name="first")(x)
    second = layers.Conv2D(4, 3, padding="same", name="second")(layers.ReLU()(first))
    model = keras.Model(inputs, layers.Add()([first, second]))
    with pytest.raises(ValueError, match="Nothing to cut was found"):
        kdist.layout_map_for(model, axes())


@pytest.mark.parametrize("of_its_own", [False, True])
@pytest.mark.parametrize("activation", ["softmax", "log_softmax", "glu"])
def test_channels_that_meet_between_two_keep_them_apart(activation: str, of_its_own: bool) -> None:
    x = inputs = keras.Input((6, 6, 4))
    if of_its_own:
        x = layers.Conv2D(8, 1, activation=activation, name="first")(x)
    else:
        x = layers.Activation(activation)(layers.Conv2D(8, 1, name="first")(x))
    model = keras.Model(inputs, layers.Conv2D(4, 1, name="second")(x))
    with pytest.raises(ValueError, match="Nothing to cut was found"):
        kdist.layout_map_for(model, axes())


@pytest.mark.parametrize(
    "how",
    [{"groups": 2}, {"data_format": "channels_first"}],
    ids=["groups", "channels first"],
)
def test_what_is_gathered_anyway_stays_whole(how: dict[str, Any]) -> None:
    x = inputs = keras.Input((4, 4, 4))
    x = layers.Conv2D(4, 1, padding="same", name="first", **how)(x)
    model = keras.Model(inputs, layers.Conv2D(4, 1, name="second", **how)(x))
    with pytest.raises(ValueError, match="Nothing to cut was found"):
        kdist.layout_map_for(model, axes())


def test_a_norm_of_one_channel_in_a_gate_is_not_spoken_of(recwarn: pytest.WarningsRecorder) -> None:
    x = inputs = keras.Input((6, 6, 4))
    gate = layers.Conv2D(1, 1, name="gate")(x)
    gate = layers.Activation("sigmoid")(layers.BatchNormalization(name="gate_norm")(gate))
    x = layers.Multiply()([layers.Conv2D(8, 1, name="first")(x), gate])
    model = keras.Model(inputs, layers.Conv2D(4, 1, name="second")(x))
    with_gate = any("gate" in path for path in kdist.layout_map_for(model, axes()))
    assert not with_gate and not recwarn.list
