"""Recompute in steps of one's own: equal numbers, less kept, and what runs again counted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import kdist
from kdist.calls.functions import CallFunctions
from kdist.graphs import executed

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from .step_parts import IDS, MESHES, Own, batch, same

pytestmark = pytest.mark.usefixtures("float64")

CUTS = {
    r"(.*/)?up/kernel": (None, "model"),
    r"(.*/)?up/bias": ("model",),
    r"(.*/)?down/kernel": ("model", None),
}
WIDTH, DEPTH = 8, 3


class Block(layers.Layer):
    """A norm, and two products between which an activation and a mask lie."""

    def __init__(self, name: str, rate: float, statistics: bool) -> None:
        super().__init__(name=name)
        self.norm = (
            layers.BatchNormalization(momentum=0.7, synchronized=True, name="norm")
            if statistics
            else layers.LayerNormalization(name="norm")
        )
        self.up = layers.Dense(4 * WIDTH, "gelu", name="up")
        self.drop = layers.Dropout(rate, seed=4, name="drop")
        self.down = layers.Dense(WIDTH, name="down")

    def call(self, x: Any, training: bool = False) -> Any:
        h = self.drop(self.up(self.norm(x)), training=training)
        return x + self.down(h)


class Apart(Own):
    """Calls the blocks one by one, and not the model."""

    def loss_of(self, x: Any, y: Any) -> Any:
        for layer in self.layers[1:]:
            x = layer(x, training=True) if isinstance(layer, Block) else layer(x)
        return ops.mean((x - y) ** 2)


def deep(kind: type = Own, rate: float = 0.3, statistics: bool = False) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = first = keras.Input((6,))
    x = layers.Dense(WIDTH, name="first")(x)
    for i in range(DEPTH):
        x = Block(f"block_{i}", rate, statistics)(x)
    return kind(first, layers.Dense(3, name="head")(x))


def over(axes: dict[str, int], model: keras.Model, again: Any = None, **options: Any) -> Any:
    cuts = CUTS if "model" in axes else {}
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes), layout_map=cuts, recompute=again, **options
    )
    return kdist.parallelize(model, config)


def train(model: keras.Model) -> dict[str, int]:
    """Compiles and trains; products of a step that is executed then, forward and backward."""
    model.compile(keras.optimizers.Adam(0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(*batch(), batch_size=8, epochs=2, verbose=0, shuffle=False)
        step = executed.largest(executed.watch(lambda: model.train_on_batch(*batch())))
    return dict(step.count(executed.PRODUCTS))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CallFunctions]]:
    """The functions that calls have been traced to."""
    found: list[CallFunctions] = []
    begin = CallFunctions.__init__

    def kept(self: CallFunctions, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(CallFunctions, "__init__", kept)
    yield found


def nbytes(functions: CallFunctions) -> int:
    """What a call keeps for its backward pass, of a row."""
    kept = [s for s in functions.vjp.saved if s.dtype != tf.variant]
    return sum(math.prod(n or 1 for n in s.shape) * s.dtype.size for s in kept)


PLANS = {
    "full": kdist.RecomputeConfig(layers=[r"block_\d"]),
    "selective": kdist.RecomputeConfig(layers=[r"block_\d"], policy="selective"),
    "local": kdist.RecomputeConfig(layers=[r"block_\d"], mp_comm_recompute=False),
}


CASES = [(axes, plan) for axes in MESHES for plan in PLANS if plan != "local" or "model" in axes]


@pytest.mark.parametrize("kind", [Own, pytest.param(Apart, marks=pytest.mark.wide)])
@pytest.mark.parametrize(("axes", "plan"), CASES, ids=str)
def test_numbers_are_the_same_and_less_is_kept(
    axes: dict[str, int], plan: str, kind: type, made: list[CallFunctions]
) -> None:
    """With dropout, against the same mesh without recompute; masks depend on the layout."""
    statistics = "model" in axes  # over data alone they would make an inner axis of it
    one = over(axes, deep(kind, statistics=statistics))
    other = over(axes, deep(kind, statistics=statistics), PLANS[plan])
    products = train(one)
    kept = sum(map(nbytes, made))
    made.clear()
    repeated = train(other)
    same([one, other])
    assert sum(map(nbytes, made)) < 0.8 * kept
    # The last product of a block makes what leaves it; a selective block repeats none.
    more = 0 if plan == "selective" else DEPTH
    assert repeated == {device: n + more for device, n in products.items()}


def flat() -> keras.Model:
    keras.utils.set_random_seed(0)
    first = keras.Input((6,))
    hidden = layers.Dense(32, "gelu", name="up")(first)
    return Own(first, layers.Dense(3, name="down")(layers.Dropout(0.3, seed=4)(hidden)))


def scoped() -> keras.Model:
    with keras.RematScope(mode="full"):
        return flat()


class Wrapping(layers.Layer):
    """Wraps a function of its own in `keras.remat`."""

    def __init__(self, remat: bool) -> None:
        super().__init__(name="wrapping")
        self.up = layers.Dense(4 * WIDTH, "gelu", name="up")
        self.down = layers.Dense(WIDTH, name="down")
        self.held = keras.remat(self.feed_forward) if remat else self.feed_forward

    def feed_forward(self, x: Any) -> Any:
        return self.down(self.up(x))

    def call(self, x: Any) -> Any:
        return x + self.held(x)


def wrapping(remat: bool = True) -> keras.Model:
    keras.utils.set_random_seed(0)
    first = keras.Input((6,))
    x = Wrapping(remat)(layers.Dense(WIDTH, name="first")(first))
    return Own(first, layers.Dense(3, name="head")(x))


DECLARED: dict[str, tuple[Any, Any]] = {
    "keras.RematScope": (flat, scoped),
    "keras.remat": (lambda: wrapping(False), wrapping),
}


@pytest.mark.parametrize("how", DECLARED)
@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_declarations_of_kerass_own(
    axes: dict[str, int], how: str, made: list[CallFunctions]
) -> None:
    models, kept, products = [], [], []
    for build in DECLARED[how]:
        made.clear()
        models.append(over(axes, build()))
        products.append(train(models[-1]))
        kept.append(sum(map(nbytes, made)))
    same(models)
    assert kept[1] < kept[0]
    assert all(products[1][device] > n for device, n in products[0].items())


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "level 3": ({"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0)}, {}),
    "op by op": ({}, {"run_eagerly": True}),
    "two steps": ({}, {"steps_per_execution": 2}),
    "XLA": ({}, {"jit_compile": True}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_ways_to_run_steps(axes: dict[str, int], way: str, made: list[CallFunctions]) -> None:
    """Against one plain device; the last batch is smaller."""
    config, options = WAYS[way]
    models = [deep(rate=0.0) for _ in range(2)]
    over(axes, models[1], PLANS["full"], **config)
    for model in models:
        model.compile(keras.optimizers.Adam(0.01), **options)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model.fit(*batch(), batch_size=6, epochs=2, verbose=0, shuffle=False)
    same(models)
    said = any("recompute of" in str(one.message) for one in told)
    assert said == (way == "op by op")  # where it has no effect
    assert any(one.repeats for one in made) == (not said)


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_a_loop_of_ones_own(axes: dict[str, int], made: list[CallFunctions]) -> None:
    models = [deep(rate=0.0) for _ in range(2)]
    over(axes, models[1])
    for i in range(DEPTH):
        kdist.recompute(models[1].get_layer(f"block_{i}"))
    for model in models:
        optimizer = keras.optimizers.Adam(0.01)

        def step(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer) -> None:
            with tf.GradientTape() as tape:
                loss = model.loss_of(x, y)
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)

        run = step if model is models[0] else kdist.function(step, model)
        for rows in (16, 8, 12, 6):
            run(*(tf.constant(one[:rows]) for one in batch()))
    same(models)
    assert any(one.repeats for one in made)


def test_a_budget_is_refused() -> None:
    again = kdist.RecomputeConfig(layers=[r"block_\d"], policy="budget", budget_mb=1.0)
    model = over({"data": 2}, deep(), again)
    model.compile("sgd")
    words = r"(?s)goes without recompute by a budget.*policy=\"full\" and \"selective\" hold.*Own"
    with pytest.raises(ValueError, match=words):
        model.fit(*batch(), verbose=0)


def test_a_block_without_anything_inside_is_told_of() -> None:
    model = over({"data": 2}, deep(Apart), kdist.RecomputeConfig(layers=["first"]))
    model.compile("sgd")
    with pytest.warns(UserWarning, match="computes nothing again in this step.*from first"):
        model.fit(*batch(), verbose=0)


class Sloped(Own):
    """Asks for a gradient of a gradient."""

    def loss_of(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = self(x, training=False)
        return ops.mean((found - y) ** 2) + ops.mean(tape.gradient(found, x) ** 2)


@pytest.mark.parametrize("layers_again", [r"block_\d+", ".*"])
def test_what_is_differentiated_again_keeps_all_and_says_so(layers_again: str) -> None:
    models = [deep(Sloped) for _ in range(2)]
    over({"data": 2}, models[1], kdist.RecomputeConfig(layers=[layers_again]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for model in models:
            model.compile(keras.optimizers.Adam(0.01))
            model.fit(*batch(), batch_size=8, verbose=0, shuffle=False)
    same(models)
    told = [str(one.message) for one in said if "recompute" in str(one.message)]
    assert len(told) == 1 and "per replica" in told[0], told
    assert told[0].endswith("recompute computes nothing in it again")
