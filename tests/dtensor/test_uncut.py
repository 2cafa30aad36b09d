"""Declared cuts of dims that do not divide: the tensor stays whole there, and kdist says so."""

from __future__ import annotations

import warnings
from typing import Any

import kdist

import keras
import numpy as np
import pytest

ROWS_CUT = "the cut of dim 0 of input 0 of layer 'products/rows' into 4 parts over 'model'"


def two_products(axes: dict[str, int], **options: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    rows = keras.layers.Dense(8, use_bias=False, name="rows")
    columns = keras.layers.Dense(8, use_bias=False, name="columns")
    kdist.shard(rows, in_strategy=((4, 1), (1, 1)))
    kdist.shard(columns, in_strategy=((1, 1), (1, 4)))
    model = keras.Sequential([keras.Input((4,)), rows, columns], name="products")
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map={}, **options)
    kdist.parallelize(model, config)
    model.compile("sgd", "mse")
    return model


def step(model: keras.Model, rows: int, times: int = 1) -> list[str]:
    """Trains on some rows; returns what is said of cuts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            model.train_on_batch(np.ones((rows, 4)), np.ones((rows, 8)))
    return [str(w.message) for w in caught if "the cut of dim" in str(w.message)]


def test_a_cut_that_divides_is_made_and_nothing_is_said() -> None:
    model = two_products({"model": 4})
    assert step(model, 8) == []
    inspection = kdist.inspect(model)
    assert inspection.count("all-gather") == 1
    assert "the cut of dim" not in str(inspection)


@pytest.mark.parametrize(
    ("axes", "options", "rows", "size"),
    [
        ({"model": 4}, {}, 6, 6),
        ({"data": 2, "model": 4}, {}, 12, 6),
        ({"pipe": 2, "model": 4}, {"pipeline": kdist.PipelineConfig(micro_batches=2)}, 6, 3),
    ],
    ids=["a slice's rows", "each replica's rows", "micro-batches"],
)
def test_one_that_does_not_is_told_once(axes: Any, options: Any, rows: int, size: int) -> None:
    model = two_products(axes, **options)
    (said,) = step(model, rows, times=2)
    assert said.startswith(ROWS_CUT)
    assert f"it has {size} elements there, no multiple of 4, so every device has all" in said
    assert said in model.plan().notes
    inspection = kdist.inspect(model)
    assert said in str(inspection)
    # Told with the truth: there is nothing to gather.
    assert inspection.count("all-gather") == 0
    assert step(model, rows) == []


def test_another_size_of_the_batch_is_told_of_too() -> None:
    model = two_products({"model": 4})
    assert step(model, 8) == []
    assert len(step(model, 6)) == 1
    (said,) = step(model, 5)
    assert "it has 6, 5 elements there" in said
    assert said in model.plan().notes


def test_many_sizes_are_one_note() -> None:
    """As in a loop that makes text a word at a time: each length was a warning, and a note."""
    x = keras.Input((None, 4))
    hidden = kdist.shard(keras.layers.Dense(4, name="up")(x), out_strategy=(None, "model", None))
    model = keras.Model(x, keras.layers.Dense(4, name="down")(hidden))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(model=2)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (3, 5, 7, 9):
            model.predict_on_batch(np.ones((2, length, 4)))
    assert len([w for w in caught if "the cut of dim" in str(w.message)]) == 2
    (note,) = [note for note in model.plan().notes if "the cut of dim" in note]
    assert "it has 3, 5, 7, 9 elements there" in note


def test_a_relayout_in_the_graph_is_told_of_by_its_name() -> None:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(6, name="up")(inputs)
    cut = kdist.layers.Relayout((None, "model"), name="cut")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(8, name="down")(cut))
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(model=4), layout_map={"down/kernel": (None, "model")}
    )
    kdist.parallelize(model, config)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="dim 1 of the output of layer 'cut' into 4 parts.*6 ele"):
        model.train_on_batch(np.ones((4, 6)), np.ones((4, 8)))
