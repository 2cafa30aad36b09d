"""`compile`, `fit`, `evaluate` and `predict` that a model's class has overridden in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.api.own_methods import Arguments

import keras
import numpy as np
import pytest

from ..parity import assert_close

pytestmark = pytest.mark.usefixtures("float64")
X = np.random.default_rng(0).normal(size=(8, 4))
Y = X[:, :1]


class Base(keras.Model):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)


class OtherDefaults(Base):
    def compile(self, optimizer: Any = "adam", loss: Any = "mae", **kwargs: Any) -> None:
        super().compile(optimizer=optimizer, loss=loss, **kwargs)


class OtherNames(Base):
    """As in the keras.io example of distillation."""

    def compile(self, optimizer: Any, metrics: Any, student_loss: Any, rate: float = 0.1) -> None:
        super().compile(optimizer=optimizer, metrics=metrics, loss=student_loss)


class LossFirst(Base):
    def compile(self, loss: Any, optimizer: Any, **kwargs: Any) -> None:
        super().compile(loss=loss, optimizer=optimizer, **kwargs)


class NoOptimizer(Base):
    def compile(self, rate: float = 0.1) -> None:
        super().compile(optimizer=keras.optimizers.SGD(rate), loss="mse")


class Compiled(Base):
    def compile(self, **kwargs: Any) -> None:
        super().compile(optimizer="sgd", loss="mse", jit_compile=True, **kwargs)


def pair(model: type[Base]) -> list[Any]:
    models: list[Any] = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        one = model()
        if parallel:
            config = kdist.ParallelConfig(mesh=kdist.mesh(data=2))
            one = kdist.parallelize(one, config)
        models.append(one)
    return models


@pytest.mark.parametrize(
    ("model", "call"),
    [
        (OtherDefaults, lambda m: m.compile()),
        (OtherDefaults, lambda m: m.compile("sgd")),
        (OtherNames, lambda m: m.compile("adam", ["mae"], "mse")),
        (OtherNames, lambda m: m.compile(student_loss="mse", metrics=None, optimizer="sgd")),
        (LossFirst, lambda m: m.compile("mse", "adam")),
        (LossFirst, lambda m: m.compile(optimizer="sgd", loss="mse", run_eagerly=False)),
        (NoOptimizer, lambda m: m.compile(0.05)),
        (NoOptimizer, lambda m: m.compile()),
        (Compiled, lambda m: m.compile()),
        (Base, lambda m: m.compile()),
        (Base, lambda m: m.compile("adam", "mse")),
    ],
)
def test_compile(model: type[Base], call: Callable[[Any], None]) -> None:
    """What it says, defaults of its own included, is what trains."""
    plain, parallel = models = pair(model)
    for one in models:
        call(one)
    assert type(plain.optimizer) is type(parallel.optimizer)
    if plain.loss is not None:
        histories = [one.fit(X, Y, epochs=3, verbose=0).history for one in models]
        assert_close(*histories)
        assert_close(*(one.get_weights() for one in models))


def test_what_compile_says_of_xla_counts() -> None:
    _, parallel = pair(Compiled)
    parallel.compile()
    assert attached(parallel).jit_compile is True


def test_an_argument_that_it_does_not_take() -> None:
    _, parallel = pair(OtherNames)
    with pytest.raises(TypeError, match="missing a required argument: 'metrics'"):
        parallel.compile("sgd")
    with pytest.raises(TypeError, match="unexpected keyword argument 'jit_compile'"):
        parallel.compile("sgd", None, "mse", jit_compile=True)


class Stars(Base):
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return super().fit(*args, **kwargs)

    def evaluate(self, *args: Any, **options: Any) -> Any:
        return super().evaluate(*args, **options)

    def predict(self, *args: Any) -> Any:
        return super().predict(*args, verbose=0)


class Options(Base):
    def fit(self, x: Any, y: Any, **fit_options: Any) -> Any:
        return super().fit(x, y, **fit_options)

    def predict(self, x: Any, *rest: Any) -> Any:
        return super().predict(x, *rest, verbose=0)


class InOne(Base):
    def fit(self, data: Any, epochs: int = 1, verbose: Any = 0) -> Any:
        return super().fit(*data, epochs=epochs, verbose=verbose)


@pytest.mark.parametrize(
    ("model", "fit"),
    [
        (Stars, lambda m: m.fit(X, Y, 4, verbose=0, epochs=2)),
        (Options, lambda m: m.fit(X, Y, batch_size=4, verbose=0)),
        (InOne, lambda m: m.fit((X, Y), epochs=2)),
    ],
)
def test_fit_evaluate_predict(model: type[Base], fit: Callable[[Any], Any]) -> None:
    models = pair(model)
    for one in models:
        one.compile("adam", "mse")
    assert_close(*(fit(one).history for one in models))
    assert_close(*(one.evaluate(X, Y, verbose=0) for one in models))
    assert_close(
        *(one.predict(X, 4) if model is not InOne else one.predict(X, verbose=0) for one in models)
    )


def test_callbacks_are_seen_behind_stars(tmp_path: Any) -> None:
    """One that saves, and says where training begins."""
    _, parallel = pair(Stars)
    parallel.compile("adam", "mse")
    saver = {"directory": tmp_path, "every_steps": 1}
    for epochs, found in ((2, [0, 1]), (3, [2])):
        callback = kdist.callbacks.ShardedCheckpoint(**saver, resume=True)
        history = parallel.fit(X, Y, epochs=epochs, verbose=0, callbacks=[callback])
        assert history.epoch[-len(found) :] == found
    assert int(parallel.optimizer.iterations) == 3


def test_arguments() -> None:
    class Own(Base):
        def fit(self, a: Any, b: Any = 2, *rest: Any, **named: Any) -> Any:
            return a, b, rest, named

        def evaluate(self, a: Any, *rest: Any, b: Any = 3) -> Any:
            return a, rest, b

    with pytest.raises(TypeError):
        Arguments(Own(), "evaluate", (), {})
    call = Arguments(Own(), "evaluate", (1, 2, 3), {"b": 4})
    assert call.call() == (1, (2, 3), 4)
    assert (call.get("b"), call.get("c"), call.takes("b"), call.takes("c")) == (
        4,
        None,
        True,
        False,
    )
    call = Arguments(Base(), "fit", (X, Y), {"verbose": 0})
    assert [*call.named] == ["x", "y", "verbose"]
    assert call.get("epochs") == 1
