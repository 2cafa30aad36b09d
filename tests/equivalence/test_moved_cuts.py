"""Cuts that move from dim to dim, between layers and within them: equal to one plain device."""

from __future__ import annotations

import warnings
from typing import Any

import kdist

import keras
import numpy as np
import pytest

from .case import CLASSES, Case
from .harness import compare
from .matrix import MESHES, level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .test_own_look_ups import OVER, on
from .zoo import labels

HEADS = {
    ".*attention/(query|key|value)/kernel": (None, "model", None),
    ".*attention/(query|key|value)/bias": ("model", None),
    ".*attention/attention_output/kernel": ("model", None, None),
    "norm/output": (None, "model", None),
}


def _attention(layer: Any) -> keras.Model:
    inputs = keras.Input((8, 8), name="given")
    x = keras.layers.LayerNormalization(name="norm")(inputs)
    x = keras.layers.Add(name="sum")([layer(x, x), x])
    x = keras.layers.GlobalAveragePooling1D(name="mean")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x))


def _heads() -> keras.Model:
    return _attention(keras.layers.MultiHeadAttention(4, 2, name="attention"))


def _groups() -> keras.Model:
    return _attention(keras.layers.GroupQueryAttention(2, 4, 4, name="attention"))


def _pictures() -> keras.Model:
    """Convolutions, cut by height and by width."""
    inputs = keras.Input((8, 8, 2), name="given")
    x = keras.layers.Dense(4, name="rows")(inputs)
    x = keras.layers.Dense(4, "gelu", name="columns")(x)
    x = keras.layers.Dense(4, name="again")(x)
    x = keras.layers.Flatten(name="flat")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x))


def _norms() -> keras.Model:
    """Of which DTensor's own gradients contradict each other."""
    inputs = keras.Input((8, 8), name="given")
    x = keras.layers.Dense(8, name="down")(keras.layers.Dense(16, name="up")(inputs))
    for name in "abc":
        x = keras.layers.LayerNormalization(name=name)(x)
    x = keras.layers.GlobalAveragePooling1D(name="mean")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x))


def _of(*shape: int) -> Any:
    def data(seed: int, samples: int) -> Any:
        rng = np.random.default_rng(seed)
        return rng.normal(size=(samples, *shape)), labels(rng, samples), None

    return data


CASES = {
    "heads": Case(name="heads", build=_heads, data=_of(8, 8), layout_map=HEADS),
    "groups": Case(
        name="groups",
        build=_groups,
        data=_of(8, 8),
        layout_map={
            ".*attention/query/kernel": (None, "model", None),
            "norm/output": (None, "model", None),
        },
    ),
    "pictures": Case(
        name="pictures",
        build=_pictures,
        data=_of(8, 8, 2),
        layout_map={
            "rows/output": (None, "model", None, None),
            "columns/output": (None, None, "model", None),
            "again/output": (None, None, None, "model"),
        },
    ),
    "norms": Case(
        name="norms",
        build=_norms,
        data=_of(8, 8),
        layout_map={
            "up/kernel": (None, "model"),
            "down/kernel": ("model", None),
            "a/output": (None, None, "model"),
            "b/output": (None, "model", None),
            "c/output": (None, None, "model"),
        },
    ),
}


@pytest.mark.filterwarnings("ignore:enable_alltoall=True. DTensor cannot differentiate")
@pytest.mark.parametrize(
    ("case", "alltoall", "level", "mesh"),
    spread(
        product(
            CASES,
            (True, False),
            ("level0", "level3"),
            ("model2", "data2_model2", "pipe2_data2_model2"),
        ),
        [
            ("heads", True, "level0", "model2"),
            ("groups", True, "level0", "data2_model2"),
            ("pictures", True, "level3", "data2_model2"),
            ("norms", False, "level0", "model2"),
            ("heads", True, "level0", "pipe2_data2_model2"),
        ],
        quick=8,
    ),
)
def test_they_equal_one_device(case: str, alltoall: bool, level: str, mesh: str) -> None:
    config = on(mesh, level) if mesh in OVER else level_config(level)
    compare(
        CASES[case],
        {**MESHES, **OVER}[mesh],
        optimizer=OPTIMIZERS["adam"],
        config={**config, "enable_alltoall": alltoall},
    )


@pytest.mark.parametrize(("alltoall", "said"), [(False, []), (True, ["enable_alltoall=True"])])
def test_layers_laid_out_in_turn_stay_cut(alltoall: bool, said: list[str]) -> None:
    """Where DTensor cannot differentiate moves, cuts are gathered, and the weights are not."""
    case = CASES["norms"]
    model = case.build()
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(model=2), layout_map=case.layout_map, enable_alltoall=alltoall
    )
    kdist.parallelize(model, config).compile("sgd", "sparse_categorical_crossentropy")
    x, y, _ = case.data(0, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.train_on_batch(x, y)
    texts = [str(one.message) for one in caught if one.filename == __file__]
    assert [text.partition(":")[0] for text in texts] == said
    assert not kdist.inspect(model).fallbacks


@pytest.mark.parametrize("axes", [{"model": 2}, {"pipe": 2, "model": 2}], ids=["one", "stages"])
def test_an_operation_that_takes_a_weight_in_another_cut_is_an_island(
    axes: dict[str, int], float64: None
) -> None:
    """What lays a weight out has a name of its own: no operation of the model is blamed for it."""
    plain, model = _heads(), _heads()
    model.set_weights(plain.get_weights())
    cuts = {
        "query/kernel": ("model", None, None),
        "query/bias": (None, "model"),
        "key/kernel": (None, None, "model"),
        "key/bias": ("model", None),
        "value/kernel": (None, "model", None),
        "value/bias": (None, "model"),
    }
    stages = kdist.PipelineConfig(micro_batches=1) if "pipe" in axes else None
    layouts = {f".*attention/{name}": dims for name, dims in cuts.items()}
    mesh = kdist.mesh(**axes)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, layout_map=layouts, pipeline=stages))
    x, y, _ = _of(8, 8)(0, 8)
    for one in (plain, model):
        one.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        one.train_on_batch(x, y)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    assert not kdist.inspect(model).fallbacks


def test_a_table_that_is_never_used() -> None:
    class Holder(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.used = keras.layers.Embedding(5, 4)
            self.unused = keras.layers.Embedding(3, 4)

        def call(self, ids: Any) -> Any:
            return self.used(ids)

    inputs = keras.Input((3,), dtype="int32")
    x = keras.layers.Flatten()(Holder()(inputs))
    model = keras.Model(inputs, keras.layers.Dense(4, name="up")(x))
    layouts = {"up/kernel": (None, "model")}
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=layouts)
    kdist.parallelize(model, config).compile("sgd", "mse")
    model.train_on_batch(np.zeros((4, 3), np.int32), np.zeros((4, 4)))
