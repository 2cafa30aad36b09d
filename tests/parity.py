"""Two models trained alike, one by plain Keras and one by kdist, and what must be equal.

Used by the tests of public behaviour. The equivalence suite compares many models; these compare
many ways of using one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import kdist

import keras
import numpy as np
import pytest

from .equivalence.outcome import check_arrays

MESHES = ({"data": 4}, {"data": 2, "model": 2})
NAMES = ("plain", "data", "inner")
"""Of the models that `everywhere` makes."""
both_meshes = pytest.mark.parametrize("axes", MESHES, ids=NAMES[1:])
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


def everywhere(
    build: Callable[[], keras.Model] = mlp, **options: Any
) -> tuple[keras.Model, keras.Model, keras.Model]:
    """The same model three times, as `NAMES` says: one plain model is enough for both meshes."""
    plain = build()
    on_data, inner = (kdist.parallelize(build(), config(axes, **options)) for axes in MESHES)
    return plain, on_data, inner


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """What the fixture `float64` does, for models that several tests share."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def data(rows: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features of shape (rows, 6) and targets of shape (rows, 3)."""
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, 6)), random.normal(size=(rows, 3))


def compile_all(models: Sequence[keras.Model], **options: Any) -> None:
    """Compiles each with an optimizer of its own, made by `optimizer()`."""
    for model in models:
        settings: dict[str, Any] = {"loss": "mse", "metrics": ["mae"], **options}
        make = settings.pop("optimizer", lambda: keras.optimizers.Adam(0.01))
        model.compile(make(), **settings)


def fit_all(
    models: Sequence[keras.Model], make: Callable[[], Any] = data, **options: Any
) -> list[Any]:
    """Trains all on fresh arguments from `make()`; compares logs and weights with the first's."""
    settings = {"verbose": 0, "shuffle": False, **options}
    histories = []
    for model in models:
        args = make()
        args = args if isinstance(args, tuple) else (args,)
        histories.append(model.fit(*args, **settings))
    assert_same_history(*histories)
    assert_same_weights(*models)
    return histories


def assert_same_weights(plain: keras.Model, *others: keras.Model) -> None:
    """Weights, and the optimizer's variables if there are any, agree in order and value."""
    for other in others:
        assert [v.path for v in plain.weights] == [v.path for v in other.weights]
        _check_variables("weights", plain.weights, other.weights)
        if plain.compiled and plain.optimizer is not None and plain.optimizer.built:
            _check_variables("slots", plain.optimizer.variables, other.optimizer.variables)


def _check_variables(
    part: str, expected: Sequence[keras.Variable], actual: Sequence[keras.Variable]
) -> None:
    """Compares by position: what Keras numbers (`adam_1`) is not named alike."""
    names = [f"{i}/{v.path}" for i, v in enumerate(expected)]
    both = [[np.asarray(v.numpy()) for v in one] for one in (expected, actual)]
    check_arrays(part, *(dict(zip(names, arrays, strict=True)) for arrays in both))


def assert_close(expected: Any, *others: Any) -> None:
    """Equal structures of arrays, each to 1e-9 of its scale; see `equivalence/outcome.py`."""
    left = _numbered(expected)
    for number, other in enumerate(others, 1):
        right = _numbered(other)
        assert len(left) == len(right), (len(left), len(right))
        check_arrays("value", left, right, f"argument {number} differs from the first")


def _numbered(values: Any) -> dict[str, np.ndarray]:
    """The leaves of a structure by position; of any dtype, since logs come as Python's numbers."""
    leaves = keras.tree.flatten(values)
    return {str(i): np.asarray(leaf).astype("float64") for i, leaf in enumerate(leaves)}


def assert_same_history(first: Any, *others: Any) -> None:
    """Logs of `fit` calls: same names, same numbers."""
    for other in others:
        assert list(first.history) == list(other.history)
    for name in first.history:
        assert_close(first.history[name], *[other.history[name] for other in others])


def copies(variable: keras.Variable) -> list[tuple[Any, np.ndarray]]:
    """(index, value) of every local copy of every part of a placed variable."""
    from kdist.storage.variables import stored

    entry = stored(variable)
    assert entry is not None
    return [
        (entry.placement.shard_at(at).index, local.numpy()) for at, local in entry.locals.items()
    ]


def assert_every_copy(variable: keras.Variable, value: np.ndarray) -> None:
    """Every device holds its part of `value`."""
    for index, part in copies(variable):
        np.testing.assert_array_equal(part, value[index])
