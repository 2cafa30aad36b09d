"""Which layers begin and end what `sequence_parallel` cuts, and what is told of it."""

from __future__ import annotations

import warnings
from typing import Any

import kdist
from kdist.dtensor.along_sequence import ends

import keras
import numpy as np
import pytest

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
