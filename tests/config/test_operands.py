"""`kdist.shard` of operators, and strategies of several inputs and outputs of a layer."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import kdist
from kdist.api.inspection import Inspection
from kdist.config.operands import ShardedOperator
from kdist.layers.relayout import Relayout

import keras
import numpy as np
import pytest

from ..parity import assert_close

MODEL = {"model": 4}
# (rows, middle) by (middle, columns): the middle is cut, so the product is a sum over devices.
SUMMED = {"in_strategy": ((1, 1, 4), (1, 4, 1))}
product = kdist.shard(keras.ops.matmul, **SUMMED)


def functional() -> keras.Model:
    """Features (8, 8) times their own projection: products of two activations."""
    keras.utils.set_random_seed(0)
    x = keras.Input((8, 8))
    other = keras.layers.Dense(8, "tanh", name="other")(x)
    return keras.Model(x, keras.layers.Dense(2, name="head")(product(x, x2=other)))


@keras.saving.register_keras_serializable("test_operands")
class Product(keras.layers.Layer):
    """A product with a weight of its own, by an operator; each device has some of its columns."""

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(shape[-1], 8), name="w")

    def call(self, x: Any) -> Any:
        multiply = kdist.shard(
            keras.ops.matmul, in_strategy=((1, 1, 1), (1, 4)), out_strategy=(1, 1, 4)
        )
        return multiply(x, self.w)


def subclassed() -> keras.Model:
    keras.utils.set_random_seed(0)
    x = keras.Input((8, 8))
    return keras.Model(x, keras.layers.Dense(2, name="head")(Product(name="product")(x)))


@keras.saving.register_keras_serializable("test_operands")
class Both(keras.layers.Layer):
    """Two tensors to two tensors."""

    def call(self, pair: Any) -> Any:
        return keras.ops.sin(pair[0]), keras.ops.cos(pair[1])


def several(**strategies: Any) -> keras.Model:
    """A layer with two inputs, in a list, and two outputs."""
    keras.utils.set_random_seed(0)
    x = keras.Input((8, 8))
    both = kdist.shard(Both(name="both"), **strategies)
    one, two = both([keras.layers.Dense(8, name="a")(x), keras.layers.Dense(8, name="b")(x)])
    return keras.Model(x, keras.layers.Dense(2, name="head")(keras.ops.concatenate([one, two], 1)))


def trained(
    build: Callable[[], keras.Model], axes: dict[str, int], batch: int = 8, **options: Any
) -> keras.Model:
    """Trains two batches on one device and on a mesh, and compares."""
    x = np.random.default_rng(0).normal(size=(batch, 8, 8))
    plain, parallel = build(), build()
    kdist.parallelize(parallel, kdist.ParallelConfig(mesh=kdist.mesh(**axes), **options))
    losses = []
    for model in (plain, parallel):
        model.compile("adam", "mse")
        rows = model.output_shape[1]
        losses.append([float(model.train_on_batch(x, np.ones((batch, rows, 2)))) for _ in range(2)])
    assert_close(*losses)
    assert_close(plain.get_weights(), parallel.get_weights())
    return parallel


def looked_at(build: Callable[[], keras.Model], axes: dict[str, int] = MODEL) -> Inspection:
    inspection = kdist.inspect(trained(build, axes))
    assert not inspection.fallbacks
    return inspection


# -- operators -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
def test_an_operator_of_a_functional_model_is_cut() -> None:
    found = looked_at(functional)
    reduced = [c for c in found.collectives if c.kind == "all-reduce" and c.phase == "forward"]
    assert [c.shape for c in reduced] == [(8, 8, 8)]


@pytest.mark.usefixtures("float64")
def test_an_operator_inside_a_layer_is_cut() -> None:
    found = looked_at(subclassed)
    # The columns of the product are the rows that the head sums over.
    assert found.count("all-reduce", "head", "forward") == 1
    assert found.count("all-reduce", phase="forward") == 1
    assert found.count("all-gather", phase="forward") == 0


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2},
        {"pipe": 2, "model": 4},
        pytest.param({"data": 2, "model": 4}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_an_operator_computes_the_same_on_every_mesh(axes: dict[str, int]) -> None:
    options = {"pipeline": kdist.PipelineConfig(micro_batches=2)} if "pipe" in axes else {}
    trained(functional, axes, **options)


def test_without_a_mesh_an_operator_is_itself() -> None:
    a, b = np.ones((2, 3, 4), "float32"), np.ones((2, 4, 5), "float32")
    np.testing.assert_array_equal(product(a, x2=b), np.matmul(a, b))


@pytest.mark.parametrize(
    "copier",
    [
        keras.models.clone_model,
        lambda model: type(model).from_config(model.get_config()),
        lambda model: pickle.loads(pickle.dumps(model)),
    ],
    ids=["clone_model", "from_config", "pickle"],
)
def test_copies_of_a_functional_model_keep_the_strategies(copier: Any) -> None:
    copied = copier(functional())
    assert [one.layout for one in copied.layers if isinstance(one, Relayout)] == [
        (1, 1, 4),
        (1, 4, 1),
    ]


@pytest.mark.parametrize("build", [functional, pytest.param(subclassed, marks=pytest.mark.long)])
def test_operators_survive_saving(build: Any, tmp_path: Any) -> None:
    model, x = build(), np.random.default_rng(0).normal(size=(4, 8, 8)).astype("float32")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5)
    kdist.parallelize(loaded, kdist.ParallelConfig(mesh=kdist.mesh(**MODEL)))
    loaded.compile("sgd", "mse")
    loaded.train_on_batch(x, np.ones((4, 8, 2)))
    assert kdist.inspect(loaded).count("all-reduce", phase="forward") == 1


def test_an_operator_of_a_list_and_its_results() -> None:
    split = kdist.shard(keras.ops.split, in_strategy=("data", None), out_strategy=((2, 1), (1, 2)))
    assert isinstance(split, ShardedOperator)
    x = keras.Input((4,))
    joined = kdist.shard(keras.ops.concatenate, in_strategy=((1, 2), (1, 2)))
    model = keras.Model(x, joined(split(x, 2, axis=1), axis=1))
    value = np.arange(8, dtype="float32").reshape(2, 4)
    np.testing.assert_array_equal(model(value), value)
    layouts = [one.layout for one in model.layers if isinstance(one, Relayout)]
    assert layouts == [("data", None), (2, 1), (1, 2), (1, 2), (1, 2)]


def test_an_operator_is_refused_what_it_has_not() -> None:
    with pytest.raises(ValueError, match="An operator has no weights.*Received: weights="):
        kdist.shard(keras.ops.matmul, weights={"kernel": (None, "model")})
    one = kdist.shard(keras.ops.sin, in_strategy=((1, 2), (1, 2)))
    with pytest.raises(ValueError, match="Operator 'sin' has 1 input in this call and 2 strat"):
        one(keras.Input((4,)))
    with pytest.raises(ValueError, match="input 0 of operator 'matmul' has 3 entries and the tens"):
        product(np.ones((2, 2)), np.ones((2, 2)))
    with pytest.raises(ValueError, match="input 1 of operator 'matmul' is a constant"):
        product(keras.Input((8, 8)), np.ones((1, 8, 8)))
    two = kdist.shard(keras.ops.sin, out_strategy=((1, 2), (1, 2)))
    with pytest.raises(ValueError, match="has 1 output in this call and 2 strategies"):
        two(keras.Input((4,)))


# -- several inputs and outputs of a layer -------------------------------------------------------


@pytest.mark.usefixtures("float64")
def test_each_input_and_output_of_a_layer_has_its_strategy() -> None:
    rows, columns = ("model", None, None), (None, None, "model")
    found = looked_at(lambda: several(in_strategy=(rows, columns), out_strategy=(rows, columns)))
    # Gradients of `a` are sums over rows on different devices; of `b` each device has columns.
    assert found.count("all-reduce", "a", "backward") == 2, found
    assert found.count("all-reduce", "b", "backward") == 0, found


def test_more_strategies_than_a_call_has_tensors() -> None:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.both = kdist.shard(Both(), out_strategy=((1, 2, 1),) * 3)

        def call(self, x: Any) -> Any:
            return self.both([x, x])[0]

    model = Net()
    model(np.zeros((4, 8, 8)))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(model=2)))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="has 2 outputs in this call and 3 strategies"):
        model.predict(np.zeros((4, 8, 8)), verbose=0)
