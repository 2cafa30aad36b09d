"""Models with operations that DTensor cannot expand: one device's numbers, weights cut throughout.

Each model has such an operation between layers whose weights are cut. Only what goes into the
operation is gathered: what `kdist.inspect` counts for islands is all that it finds gathered.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import kdist
from kdist.graphs import executed
from kdist.graphs.executed import PRODUCTS

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from ..equivalence.matrix import product, spread

# Columns, then rows, and again: without an operation between the first two, nothing is gathered.
CUT = {
    ".*(up|wide)/kernel": (None, "model"),
    ".*(up|wide)/bias": ("model",),
    ".*(down|head)/kernel": ("model", None),
}
WIDTH, FEATURES, BATCH = 8, 5, 12
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(3 * BATCH, FEATURES)), RNG.normal(size=(3 * BATCH, 2))


@keras.saving.register_keras_serializable("test_islands")
class Applied(layers.Layer):
    """An operation as a layer."""

    def __init__(self, operation: Callable, **options: Any) -> None:
        super().__init__(**options)
        self.operation = operation

    def call(self, x: Any) -> Any:
        return self.operation(x)


@keras.saving.register_keras_serializable("test_islands")
class Chosen(layers.Layer):
    """Branches that compute, by a weight."""

    def build(self, shape: Any) -> None:
        self.gate = self.add_weight(shape=(), initializer="ones", trainable=False, name="gate")

    def call(self, x: Any) -> Any:
        return ops.cond(self.gate > 0, lambda: ops.sin(x) * x, lambda: x * x * x)


def applied(operation: Callable) -> Callable:
    return lambda x: Applied(operation, name="island")(x)


def recurrent(make: Callable) -> Callable:
    return lambda x: make()(layers.Reshape((4, 2))(x))


def filtered(make: Callable, *shape: int) -> Callable:
    return lambda x: make()(layers.Reshape(shape or (2, 2, 2))(x))


def scanned(x: Any) -> Any:
    steps = ops.transpose(x, (1, 0))
    total, _ = ops.scan(lambda c, v: (ops.tanh(c + v), c), ops.zeros_like(steps[0]), steps)
    return ops.expand_dims(total, -1) + x


def rotated(x: Any) -> Any:
    """Pairs of features turned by angles, as rotary embeddings do."""
    first, second = ops.split(x, 2, axis=-1)
    angles = ops.arange(WIDTH // 2, dtype=x.dtype)[None, :]
    turned = ops.concatenate([-second, first], axis=-1)
    return x * ops.cos(ops.tile(angles, (1, 2))) + turned * ops.sin(ops.tile(angles, (1, 2)))


def routed(x: Any) -> Any:
    """Experts mixed by the two best scores of each row, as in a mixture of experts."""
    scores, chosen = ops.top_k(ops.softmax(x[:, :4]), 2)
    weights = ops.sum(ops.one_hot(chosen, 4, dtype=x.dtype) * scores[..., None], axis=1)
    return x * ops.repeat(weights, 2, axis=-1)


def masked(x: Any) -> Any:
    """Attention of the features of a row to those before them, the mask made by new axes."""
    places = ops.arange(WIDTH)
    bias = ops.where(places[:, None] >= places[None, :], 0.0, -1e9)[None]
    scores = ops.cast(bias, x.dtype) + x[:, :, None] * x[:, None, :]
    return ops.matmul(ops.softmax(scores), x[..., None])[..., 0]


def python(x: Any) -> Any:
    made = tf.numpy_function(np.sin, [tf.stop_gradient(x)], x.dtype)
    return x + tf.ensure_shape(made, x.shape)


# What is in the place of the operation; the type of the first operation of the islands, if any.
CASES: dict[str, tuple[Callable, str | None]] = {
    "new axis": (applied(lambda x: (x[..., None, :] * 2.0)[:, 0]), None),
    "sort": (applied(lambda x: ops.sort(x, axis=-1)), None),
    "argsort": (applied(lambda x: x * ops.cast(ops.argsort(x, axis=-1), x.dtype)), "TopKV2"),
    "rotary": (applied(rotated), "Split"),
    "routed": (applied(routed), None),
    "masked": (applied(masked), None),
    "cond": (lambda x: Chosen(name="island")(x), "StatelessIf"),
    "scan": (applied(scanned), "StatelessWhile"),
    "python": (applied(python), "PyFunc"),
    "grouped": (
        lambda x: layers.Conv1D(8, 2, groups=2, padding="same")(layers.Reshape((2, 4))(x)),
        "PartitionedCall",
    ),
    "depthwise": (filtered(lambda: layers.DepthwiseConv2D((2, 1), padding="same")), None),
    "separable": (filtered(lambda: layers.SeparableConv2D(2, (2, 1))), None),
    "transposed": (filtered(lambda: layers.Conv2DTranspose(2, (2, 1))), None),
    "depthwise 1d": (filtered(lambda: layers.DepthwiseConv1D(2), 4, 2), None),
    "separable 1d": (filtered(lambda: layers.SeparableConv1D(2, 2), 4, 2), None),
    "transposed 1d": (filtered(lambda: layers.Conv1DTranspose(2, 2), 4, 2), None),
    "transposed 3d": (filtered(lambda: layers.Conv3DTranspose(2, (2, 1, 1)), 2, 1, 2, 2), None),
    "lstm": (recurrent(lambda: layers.LSTM(8, name="island")), "StatelessWhile"),
    "gru": (recurrent(lambda: layers.GRU(8, name="island")), "StatelessWhile"),
    "bidirectional": (
        recurrent(
            lambda: layers.Bidirectional(layers.LSTM(4, name="island", return_sequences=True))
        ),
        "StatelessWhile",
    ),
}
DIVIDED_BY_DTENSOR = ("rotary", "routed", "masked", "grouped", "gru", "bidirectional")
"""What has operations besides for which others gather: slices, convolutions, sums over parts."""
PIPE = {"pipe": 2, "data": 2, "model": 2}
WAYS: dict[str, dict[str, Any]] = {
    "data2_model2": {},
    "level1": {"optimizer": kdist.OptimizerConfig(level=1, threshold_kb=0)},
    "global": {"batch_semantics": "global"},
    "pipe2_data2_model2": {"pipeline": kdist.PipelineConfig(micro_batches=2)},
    "zero_bubble": {"pipeline": kdist.PipelineConfig(micro_batches=2, schedule="zero_bubble")},
}
DEFAULT = [
    ("new axis", "data2_model2"),
    ("depthwise", "data2_model2"),
    ("separable", "data2_model2"),
    ("transposed", "data2_model2"),
    ("depthwise 1d", "data2_model2"),
    ("separable 1d", "data2_model2"),
    ("transposed 1d", "data2_model2"),
    ("transposed 3d", "data2_model2"),
    ("rotary", "data2_model2"),
    ("lstm", "data2_model2"),
    ("python", "level1"),
    ("argsort", "global"),
    ("cond", "pipe2_data2_model2"),
]


def build(middle: Callable) -> keras.Model:
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((FEATURES,))
    x = layers.Dense(WIDTH, "tanh", name="up")(x)
    x = layers.Flatten()(middle(x))
    x = layers.Dense(WIDTH, name="down")(x)
    x = layers.Dense(WIDTH, "tanh", name="wide")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def pair(name: str, way: str) -> tuple[keras.Model, keras.Model]:
    """The model on one device, and over a mesh; compiled."""
    plain, model = build(CASES[name][0]), build(CASES[name][0])
    model.set_weights(plain.get_weights())
    axes = PIPE if "pipeline" in WAYS[way] else {"data": 2, "model": 2}
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=CUT, **WAYS[way])
    kdist.parallelize(model, config)
    for one in (plain, model):
        one.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return plain, model


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "way"), spread(product(CASES, WAYS), DEFAULT))
def test_trains_as_one_device_and_gathers_nothing_else(name: str, way: str) -> None:
    plain, model = pair(name, way)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    expected = plain.fit(X, Y, **options).history
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = model.fit(X, Y, **options).history
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-9)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        model.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=1e-9
    )
    np.testing.assert_allclose(
        model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-9, atol=1e-12
    )

    inspection = kdist.inspect(model)
    assert inspection.fallbacks == ()
    assert inspection.gathered == ()
    kind = CASES[name][1]
    said = [str(one.message) for one in caught if "gathered operands" in str(one.message)]
    gathered = [one for one in inspection.collectives if one.kind == "all-gather"]
    if name != "masked":  # it moves cuts from dim to dim, so gradients are gathered first
        assert not {one.shape for one in gathered} & {tuple(v.shape) for v in model.weights}
    if kind is None:
        may = way == "global" or name in ("routed", "masked")
        assert may or not inspection.islands and not said
        return
    assert kind in {island.operations[0][0] for island in inspection.islands}
    assert len(said) == 1 and kind in said[0] and "everything else stays cut" in said[0]
    assert any("everything else stays cut" in note for note in model.plan().notes)
    assert f"on gathered operands: {inspection.islands[0]}" in str(inspection)
    # What islands read is gathered, and nothing else is: here all else is elementwise, or a
    # product by columns and then by rows.
    if way != "global" and name not in DIVIDED_BY_DTENSOR:
        assert sum(c.bytes for c in gathered) == sum(i.bytes for i in inspection.islands) > 0


@pytest.mark.usefixtures("float64")
def test_each_device_multiplies_its_part_and_loops_the_whole() -> None:
    _, model = pair("lstm", "data2_model2")
    step = executed.largest(executed.watch(lambda: model.train_on_batch(X[:BATCH], Y[:BATCH])))
    devices = set(model.plan().topology.devices)
    assert {n.device for n in step.nodes if n.op == "LoopCond"} == devices
    # A device makes its part of a kernel's gradient; but of the kernel's that reads the island's
    # result, which it has whole, it makes all and takes its part.
    outside = [n for n in step.select(PRODUCTS) if "island/" not in f"{n.call}/{n.name}"]
    half, shapes = WIDTH // 2, {n.shape for n in outside}
    assert {(FEATURES, half), (WIDTH, half)} <= shapes and (FEATURES, WIDTH) not in shapes
    assert {"down_1" in n.name for n in outside if n.shape == (WIDTH, WIDTH)} == {True}


def test_a_backward_pass_in_halves_hands_on_no_sizes() -> None:
    """DTensor would not know along which dims a bias's gradient is summed, and take it whole."""
    x = inputs = keras.Input((4, FEATURES))
    x = layers.Dense(WIDTH, "tanh", name="up")(x)
    x = layers.Dense(WIDTH, name="down")(x)
    x = layers.MultiHeadAttention(2, 4, name="mixed")(x, x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    mesh = kdist.mesh(pipe=2, model=2)
    staged = kdist.PipelineConfig(micro_batches=2, schedule="zero_bubble")
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, layout_map=CUT, pipeline=staged))
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((4, 4, FEATURES)), np.ones((4, 4, 2)))
    assert kdist.inspect(model).islands == ()


@pytest.mark.usefixtures("float64")
def test_inspect_says_what_an_island_costs() -> None:
    """An LSTM of 4 steps of 2 features, and what is around it, by hand."""
    _, model = pair("lstm", "data2_model2")
    model.train_on_batch(X[:BATCH], Y[:BATCH])
    (island,) = kdist.inspect(model).islands
    assert island.layer == "island"
    rows = BATCH // 2
    # The input and the gradient of the result, in float64; its weights are not cut.
    assert island.bytes == 2 * rows * WIDTH * 8
    step = 2 * rows * (2 * 4 * WIDTH + WIDTH * 4 * WIDTH)  # one step's two products
    assert island.flops == 4 * 3 * step  # and twice as much in the backward pass
    around = 2 * rows * (FEATURES * WIDTH + 2 * WIDTH * WIDTH + WIDTH * 2)
    backward = 2 * around - 2 * rows * FEATURES * WIDTH  # no gradient of the input
    np.testing.assert_allclose(island.share, island.flops / (island.flops + around + backward))
    assert f"{island.share:.0%} of the step's FLOPs not divided" in str(island)


def test_an_island_of_cut_weights_gathers_these_too(float64: None) -> None:
    """A recurrent cell's kernel is cut at rest, and whole where it is used."""
    plain, model = build(CASES["lstm"][0]), build(CASES["lstm"][0])
    model.set_weights(plain.get_weights())
    cuts = {**CUT, ".*lstm_cell/kernel": (None, "model")}
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=cuts)
    kdist.parallelize(model, config)
    for one in (plain, model):
        one.compile(keras.optimizers.Adam(0.01), "mse")
        one.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    inspection = kdist.inspect(model)
    (kernel,) = (v for v in model.weights if v.path.endswith("lstm_cell/kernel"))
    assert inspection.gathered == (kernel.path,) and inspection.fallbacks == ()
    sizes = [one.bytes for one in inspection.collectives if one.kind == "all-gather"]
    assert int(np.prod(kernel.shape)) * 8 in sizes


def test_filters_in_groups_that_are_cut_are_an_island_of_their_stage(float64: None) -> None:
    """XLA compiles them, so sizes of what they give are said; what follows is no island for it."""
    plain, model = build(CASES["grouped"][0]), build(CASES["grouped"][0])
    model.set_weights(plain.get_weights())
    cuts = {**CUT, r".*conv1d(_\d+)?/kernel": (None, None, "model")}
    mesh, stages = kdist.mesh(pipe=2, model=2), kdist.PipelineConfig(micro_batches=1)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, layout_map=cuts, pipeline=stages))
    for one in (plain, model):
        one.compile(keras.optimizers.Adam(0.01), "mse")
        one.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    kinds = {kind for one in kdist.inspect(model).islands for kind, _ in one.operations}
    assert "PartitionedCall" in kinds and not kinds & {"BiasAdd", "MatMul", "Tanh"}
