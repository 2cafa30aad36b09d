"""Layout maps for models that share weights with a parallel model: those stay as they are."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import pytest

from ..parity import data, fit_all, mlp


def build() -> keras.Model:
    """Of three layers, of which the map cuts the last two: they have more weights."""
    keras.utils.set_random_seed(1)
    sizes = {"first": 4, "up": 8, "down": 3}
    dense = [keras.layers.Dense(n, "tanh", name=k) for k, n in sizes.items()]
    return keras.Sequential([keras.Input((6,)), *dense], name="net")


def behind(model: keras.Model, after: str, *sizes: int) -> keras.Model:
    """New layers behind one of another model; the first of them and that one make a pair."""
    keras.utils.set_random_seed(3)
    x = model.get_layer(after).output
    for number, size in enumerate(sizes):
        x = keras.layers.Dense(size, "tanh", name=f"new_{'abc'[number]}")(x)
    return keras.Model(model.inputs, x, name="behind")


def spread(model: keras.Model, layout_map: Any = None, **sizes: int) -> keras.Model:
    mesh = kdist.mesh(**(sizes or {"data": 2, "model": 2}))
    layout_map = kdist.layout_map_for(model, mesh) if layout_map is None else layout_map
    return kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, layout_map=layout_map))


def test_weights_of_another_model_keep_their_layouts(float64: None) -> None:
    plain, parallel = build(), spread(build())
    for model in (plain, parallel):
        model.compile("sgd", "mse")
    fit_all([plain, parallel])
    features = [behind(model, "first", 4, 8, 3) for model in (plain, parallel)]
    with pytest.warns(UserWarning, match=r"first/kernel \(another model has it as \(None, None\)"):
        spread(features[1])
    for model in features:
        model.compile(keras.optimizers.Adam(0.01), "mse")
    fit_all(features)
    fit_all([plain, parallel])


def test_nothing_to_cut_but_what_is_whole_in_another_model() -> None:
    parallel = spread(build())
    parallel.predict(data()[0], verbose=0)
    with pytest.raises(ValueError, match=r"first/kernel \(another model has it as \(None, None\)"):
        kdist.layout_map_for(behind(parallel, "first", 3), kdist.mesh(data=2, model=2))


def test_the_end_of_a_pair_fits_what_another_model_has() -> None:
    parallel = spread(build())
    parallel.predict(data()[0], verbose=0)
    layouts = kdist.layout_map_for(behind(parallel, "up", 3), kdist.mesh(data=2, model=2))
    assert layouts["new_a/kernel"] == ("model", None)
    assert (None, "model") in layouts.values()


def test_weights_that_are_whole_in_another_model_stay_whole() -> None:
    model = mlp()
    spread(model, {"up/kernel": (None, "model")}).predict(data()[0], verbose=0)
    assert kdist.layout_map_for(model, kdist.mesh(data=2, model=2)) == {
        "up/kernel": (None, "model")
    }
    # Over another mesh they are to be stored anew, so that is no model of this one's weights.
    assert "down/kernel" in kdist.layout_map_for(model, kdist.mesh(model=4))


def test_other_layouts_of_a_stored_weight_are_refused_with_both() -> None:
    parallel = spread(mlp(), {"up/kernel": (None, "model")})
    parallel.predict(data()[0], verbose=0)
    with pytest.raises(ValueError, match=r"'up/kernel', stored as \(None, 'model'\), now \('mod"):
        spread(behind(parallel, "up", 3), {"up/kernel": ("model", None)})
