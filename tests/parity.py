"""Two models trained alike, one by plain Keras and one by kdist, and what must be equal.

Used by the tests of public behaviour. The equivalence suite compares many models; these compare
many ways of using one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np

TOLERANCE = 1e-9
MESHES = ({"data": 4}, {"data": 2, "model": 2})
CUTS = {
    "(.*/)?up/kernel": (None, "model"),
    "(.*/)?up/bias": ("model",),
    "(.*/)?down/kernel": ("model", None),
}


def config(axes: dict[str, int], **options: Any) -> kdist.ParallelConfig:
    """A mesh of these axes; with an inner axis, `up` and `down` are cut over it."""
    cuts = CUTS if "model" in axes else None
    return kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts, **options)


def mlp(seed: int = 1) -> keras.Model:
    """6 features to 3 values through two layers that `CUTS` names."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((6,), name="features")
    hidden = keras.layers.Dense(8, "tanh", name="up")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="down")(hidden), name="mlp")


def pair(
    axes: dict[str, int], build: Callable[[], keras.Model] = mlp, **options: Any
) -> tuple[keras.Model, keras.Model]:
    """The same model twice: plain, and parallel over a mesh."""
    plain, other = build(), build()
    return plain, kdist.parallelize(other, config(axes, **options))


def data(rows: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features of shape (rows, 6) and targets of shape (rows, 3)."""
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, 6)), random.normal(size=(rows, 3))


def assert_same_weights(plain: keras.Model, parallel: keras.Model) -> None:
    """Weights, and the optimizer's variables if both have one, agree in order and value."""
    assert [v.path for v in plain.weights] == [v.path for v in parallel.weights]
    assert_close(plain.get_weights(), parallel.get_weights())
    if plain.compiled and plain.optimizer is not None and plain.optimizer.built:
        mine, theirs = plain.optimizer.variables, parallel.optimizer.variables
        assert len(mine) == len(theirs)
        assert_close([v.numpy() for v in mine], [v.numpy() for v in theirs])


def assert_close(a: Any, b: Any) -> None:
    """Equal structures of arrays, to `TOLERANCE` relative and absolute."""
    left, right = keras.tree.flatten(a), keras.tree.flatten(b)
    assert len(left) == len(right), (len(left), len(right))
    for x, y in zip(left, right, strict=True):
        np.testing.assert_allclose(np.asarray(y), np.asarray(x), rtol=TOLERANCE, atol=TOLERANCE)


def assert_same_history(a: Any, b: Any) -> None:
    """Logs of two `fit` calls: same names, same numbers."""
    assert list(a.history) == list(b.history)
    for name in a.history:
        assert_close(a.history[name], b.history[name])


def copies(variable: keras.Variable) -> list[tuple[Any, np.ndarray]]:
    """(index, value) of every local copy of every part of a placed variable."""
    from kdist.variables import stored

    entry = stored(variable)
    assert entry is not None
    return [
        (entry.placement.shard_at(at).index, local.numpy()) for at, local in entry.locals.items()
    ]


def assert_every_copy(variable: keras.Variable, value: np.ndarray) -> None:
    """Every device holds its part of `value`."""
    for index, part in copies(variable):
        np.testing.assert_array_equal(part, value[index])
