"""Which layers begin and end what `sequence_parallel` cuts, and what is told of it."""

from __future__ import annotations

import warnings
from typing import Any

import kdist
from kdist.dtensor.along_sequence import ends

import keras
import numpy as np
import pytest
import tensorflow as tf

SAID = "sequence_parallel=True has no effect: no Dense, EinsumDense or Embedding layer"

UNEVEN = "it has 7 elements there, no multiple of 2"


def built(layer: keras.layers.Layer, *shape: int) -> keras.layers.Layer:
    layer.build((None, *shape))
    return layer


def einsum(equation: str, *shape: int) -> keras.layers.Layer:
    given = (None, *shape[1:])
    return built(keras.layers.EinsumDense(equation, given), *shape[:1], 8)


LAYERS: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, bool]]] = {
    "columns": (lambda: built(keras.layers.Dense(4), 6, 8), (None, "model"), (None, True)),
    "rows": (lambda: built(keras.layers.Dense(4), 6, 8), ("model", None), ("model", False)),
    "several axes": (
        lambda: built(keras.layers.Dense(4), 6, 8),
        (("model", "expert"), None),
        (("model", "expert"), False),
    ),
    "heads": (
        lambda: einsum("abc,cde->abde", 6, 6, 2, 4),
        (None, "model", None),
        (None, True),
    ),
    "width of all heads": (
        lambda: built(keras.layers.EinsumDense("abde,dec->abc", (6, 8)), 6, 2, 4),
        ("model", None, None),
        ("model", False),
    ),
    "entries": (lambda: built(keras.layers.Embedding(8, 4), 6), ("model", None), ("model", True)),
}
NONE: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "whole": (lambda: built(keras.layers.Dense(4), 6, 8), (None, None)),
    "both dims": (lambda: built(keras.layers.Dense(4), 6, 8), ("model", "expert")),
    "columns of a table": (lambda: built(keras.layers.Embedding(8, 4), 6), (None, "model")),
    "heads where the sequence is": (
        lambda: built(keras.layers.EinsumDense("ac,cbd->abd", (2, 4)), 8),
        ("model", None, None),
    ),
    "no product": (lambda: built(keras.layers.LayerNormalization(), 6, 8), (None,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_ends(name: str) -> None:
    make, dims, expected = LAYERS[name]
    (end,) = ends([make()], lambda variable: dims)
    assert (end.sums_over, end.takes_whole) == expected


@pytest.mark.parametrize("name", NONE)
def test_no_ends(name: str) -> None:
    make, dims = NONE[name]
    assert not list(ends([make()], lambda variable: dims))


def network(*shape: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = keras.Input(shape)
    y = x
    for i in range(2):
        h = keras.layers.Dense(8, "gelu", name=f"up_{i}")(keras.layers.LayerNormalization()(y))
        y = y + keras.layers.Dense(4, name=f"down_{i}")(h)
    return keras.Model(x, y)


def trained(shape: tuple[int, ...], **layouts: Any) -> tuple[keras.Model, list[str]]:
    """A model after two steps, and what was said."""
    model = network(*shape)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(model=2),
        layout_map={r".*up_\d/kernel": (None, "model"), r".*down_\d/kernel": ("model", None)}
        | layouts,
        sequence_parallel=True,
    )
    kdist.parallelize(model, config)
    model.compile("sgd", "mse")
    data = np.ones((4, *shape))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.train_on_batch(data, data)
    return model, [str(one.message) for one in caught]


@pytest.mark.parametrize(("shape", "told"), [((4,), 1), ((6, 4), 0)])
def test_nothing_to_cut_is_told_once(shape: tuple[int, ...], told: int) -> None:
    model, said = trained(shape)
    assert sum(SAID in one for one in said) == told
    assert sum(SAID in one for one in model.plan().notes) == told


def test_a_length_that_does_not_divide_is_told_once() -> None:
    _, said = trained((7, 4))
    assert sum(UNEVEN in one for one in said) == 1


def test_a_pattern_wins() -> None:
    model, said = trained((6, 4), **{r"down_\d/output": (None, None, None)})
    assert sum(SAID in one for one in said) == 1
    found = kdist.inspect(model, 4).collectives
    assert not any(one.kind == "reduce-scatter" for one in found)


@pytest.mark.parametrize("token", [0, -1])
def test_one_token_is_taken_of_what_is_gathered_once(token: int) -> None:
    """DTensor moves the cut to the rows for it, and gathers gradients of weights for that."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 4))
    x = inputs + keras.layers.Dense(4, name="down")(keras.layers.Dense(8, name="up")(inputs))
    outputs = keras.layers.Dense(2, name="head")(keras.layers.LayerNormalization()(x)[:, token])
    model = keras.Model(inputs, outputs)
    layouts: Any = {"up/kernel": (None, "model"), "up/bias": ("model",)}
    layouts["down/kernel"] = ("model", None)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(model=2), layout_map=layouts, sequence_parallel=True
    )
    kdist.parallelize(model, config)
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((4, 6, 4)), np.ones((4, 2)))
    gathered = [one for one in kdist.inspect(model, 4).collectives if one.kind == "all-gather"]
    assert [(one.shape, one.phase) for one in gathered] == [
        ((4, 6, 4), "forward"),  # the norm's result
        ((4, 6, 4), "backward"),  # of the sum that `down` ends in
    ]


class Dropping(keras.layers.Dropout):
    """Drops in predictions too."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return super().call(inputs, training=True)


def test_each_part_of_a_sequence_drops_other_features() -> None:
    inputs = keras.Input((6, 4))
    x = keras.layers.Dense(8, name="up", kernel_initializer="ones")(inputs)
    x = keras.layers.Dense(4, name="down", kernel_initializer="ones")(x)
    model = keras.Model(inputs, Dropping(0.5, seed=0)(x))
    layouts: Any = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(model=2), layout_map=layouts, sequence_parallel=True
    )
    kdist.parallelize(model, config)
    model.compile("sgd", "mse")
    dropped = model.predict(np.ones((32, 6, 4)), verbose=0) == 0
    first, second = dropped[:, :3], dropped[:, 3:]
    assert 0.4 < dropped.mean() < 0.6
    assert 0.4 < (first == second).mean() < 0.6


class RootMeanSquare(keras.layers.Layer):
    """A norm as models of their own write it, in float32."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        wide = keras.ops.cast(x, "float32")
        mean = keras.ops.mean(keras.ops.power(wide, 2), axis=-1, keepdims=True)
        return keras.ops.cast(wide * keras.ops.rsqrt(mean + 1e-6) * self.scale, self.compute_dtype)


@pytest.mark.usefixtures("float64")
def test_gradients_of_norms_stay_cut() -> None:
    """DTensor makes all that is added up whole where one reader takes all of the sum."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(16, 8)(inputs)
    for i in range(3):
        h = keras.layers.Dense(16, use_bias=False, name=f"up_{i}")(RootMeanSquare()(x))
        x = keras.layers.Dense(8, use_bias=False, name=f"down_{i}")(h) + x
    model = keras.Model(inputs, x)
    layouts: Any = {r"up_\d/kernel": (None, "model"), r"down_\d/kernel": ("model", None)}
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(model=2), layout_map=layouts, sequence_parallel=True
    )
    kdist.parallelize(model, config)
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((4, 6), np.int32), np.ones((4, 6, 8)))
    found = [one for one in kdist.inspect(model, 4).collectives if one.phase == "backward"]
    gathered = [one.layer for one in found if one.kind == "all-gather"]
    rows = ""  # of the table: they leave the mesh
    assert sorted(gathered) == [rows, "down_0", "down_1", "down_2"]


class Pair(keras.layers.Layer):
    """Two products of a layer of one's own."""

    def __init__(self) -> None:
        super().__init__(name="pair")
        self.up = keras.layers.Dense(8, "gelu", name="up")
        self.down = keras.layers.Dense(4, name="down")

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.up.build(shape)
        self.down.build((*shape[:-1], 8))


class Penalized(Pair):
    """Reads a tensor twice, of which once under a tape of its own."""

    def call(self, x: Any) -> Any:
        x = x + self.down(self.up(x))
        read = keras.ops.sum(self.up(x), axis=-1, keepdims=True)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(self.up(x) ** 2)
        return read + tape.gradient(total, x, unconnected_gradients="zero")


class Looped(Pair):
    """Calls both in the body of a loop."""

    def call(self, x: Any) -> Any:
        return keras.ops.fori_loop(0, 3, lambda _, y: y + self.down(self.up(y)), x)


class Branched(Pair):
    """Calls both in a branch."""

    def call(self, x: Any) -> Any:
        total = tf.reduce_sum(x)
        return tf.cond(total > -100.0, lambda: x + self.down(self.up(x)), lambda: x)


class OwnName(keras.layers.Dense):
    """Takes its input under another name, by which it is called."""

    def call(self, x: Any, training: bool | None = None) -> Any:
        return super().call(x)


class ByName(Pair):
    """Gives inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.up = OwnName(8, "gelu", name="up")

    def call(self, x: Any) -> Any:
        x = x + self.down(inputs=self.up(x=x))
        return x + self.down(self.up(training=True, x=x))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", [Penalized, Looped, Branched, ByName])
def test_ways_to_call_products(kind: type[Pair]) -> None:
    def run(layouts: Any) -> tuple[list[float], np.ndarray]:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6, 4))
        model = keras.Model(inputs, keras.layers.Dense(2, name="head")(kind()(inputs)))
        if layouts:
            config = kdist.ParallelConfig(
                mesh=kdist.mesh(model=2), layout_map=layouts, sequence_parallel=True
            )
            kdist.parallelize(model, config)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(4, 6, 4)), rng.normal(size=(4, 6, 2))
        return [float(model.train_on_batch(x, y)) for _ in range(3)], model.predict(x, verbose=0)

    layouts = {".*up/kernel": (None, "model"), ".*up/bias": ("model",)}
    layouts[".*down/kernel"] = ("model", None)
    for ours, plain in zip(run(layouts), run(None), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("float64")
def test_slices_between_products_take_parts_of_features() -> None:
    """A shift by a token of what is cut by its features: nothing is gathered for it."""

    def trained(along: bool) -> tuple[list[float], set[Any]]:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        x = inputs = keras.Input((6, 4))
        for i in range(2):
            h = keras.layers.Dense(8, "gelu", name=f"up_{i}")(keras.layers.LayerNormalization()(x))
            h = keras.layers.Concatenate(axis=1)([h[:, 1:], h[:, :1]])
            x = x + keras.layers.Dense(4, name=f"down_{i}")(h)
        model = keras.Model(inputs, keras.layers.Dense(2, name="head")(x))
        layouts: Any = {r"up_\d/kernel": (None, "model"), r"down_\d/kernel": ("model", None)}
        layouts[r"up_\d/bias"] = ("model",)
        config = kdist.ParallelConfig(
            mesh=kdist.mesh(data=2, model=2), layout_map=layouts, sequence_parallel=along
        )
        kdist.parallelize(model, config)
        model.compile("sgd", "mse")
        data = np.random.default_rng(0).normal(size=(4, 6, 4))
        losses = [float(model.train_on_batch(data, data[..., :2])) for _ in range(3)]
        found = kdist.inspect(model, 4).collectives
        return losses, {(one.shape, one.phase) for one in found if one.kind == "all-gather"}

    (whole, none), (along, gathered) = (trained(switch) for switch in (False, True))
    np.testing.assert_allclose(along, whole, rtol=1e-9)
    width = ((2, 6, 4), "forward"), ((2, 6, 4), "backward")
    assert (none, gathered) == (set(), {*width})
