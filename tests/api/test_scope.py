"""`kdist.scope`: weights born as parts, with the values of a plain build."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import kdist
from kdist.api.attached import attached, parallel_of
from kdist.storage import recipes, unborn

import keras
import numpy as np
import pytest
import tensorflow as tf

CUT = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
SHARDS = kdist.OptimizerConfig(level=3, threshold_kb=0)
KINDS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one": ({"data": 1}, {}),
    "replicas": ({"data": 2}, {}),
    "level3": ({"data": 4}, {"optimizer": SHARDS}),
    "inner": ({"data": 2, "model": 2}, {"layout_map": CUT}),
    "inner3": ({"data": 2, "model": 2}, {"layout_map": CUT, "optimizer": SHARDS}),
    "pipeline": (
        {"pipe": 2, "model": 2},
        {"layout_map": CUT, "pipeline": kdist.PipelineConfig(micro_batches=2)},
    ),
}


def build() -> keras.Model:
    keras.utils.set_random_seed(4)
    tokens = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(12, 8, name="table")(tokens)
    x = keras.layers.Dense(16, "gelu", kernel_initializer="he_normal", name="up")(x)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Dense(8, kernel_initializer="orthogonal", name="down")(x)
    return keras.Model(tokens, keras.layers.Flatten()(x))


def config(kind: str) -> kdist.ParallelConfig:
    axes, options = KINDS[kind]
    return kdist.ParallelConfig(mesh=kdist.mesh(**axes), **options)


def born(kind: str) -> keras.Model:
    with kdist.scope(config(kind)):
        model = build()
    return model


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 12, (8, 5)).astype("int32"), rng.normal(size=(8, 40)).astype("float32")


def entries(model: keras.Model) -> list[Any]:
    return list(attached(model).entries.values())


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "CHUNK", 64)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_a_plain_build(kind: str, small_chunks: None) -> None:
    plain, model = build(), compiled(born(kind))
    assert all(entry.unborn is not None for entry in entries(model))
    for a, b in zip(plain.weights, model.weights, strict=True):
        assert a.path.split("/")[1:] == b.path.split("/")[1:] and a.trainable == b.trainable
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    for entry in entries(model):
        for part in entry.stored_parts():
            held, whole = part.target.numpy(), entry.variable.numpy()
            np.testing.assert_array_equal(held, whole if part.index is None else whole[part.index])


@pytest.mark.parametrize("kind", ["level3", pytest.param("inner", marks=pytest.mark.wide)])
def test_trains_as_a_parallelized_model(kind: str) -> None:
    models = [born(kind), kdist.parallelize(build(), config(kind))]
    histories = [compiled(m).fit(*data(), batch_size=4, verbose=0, shuffle=False) for m in models]
    assert histories[0].history == histories[1].history
    for a, b in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(models[0].optimizer.variables, models[1].optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_nothing_is_made_before_its_place_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """At level 3 a device never has more than its part; no slot is ever whole."""
    made: list[int] = []
    zeros = unborn.Unborn.made
    monkeypatch.setattr(unborn.Unborn, "made", lambda self: made.append(1) or zeros(self))
    model = compiled(born("level3"))
    model.fit(*data(), batch_size=8, verbose=0)
    assert not made
    for entry in entries(model):
        largest = max(np.prod(part.target.shape) for part in entry.stored_parts())
        assert largest <= -(-np.prod(entry.variable.shape) // 4) or largest == 1


@pytest.mark.parametrize("kind", ["inner", "inner3"])
def test_mixed_precision(kind: str) -> None:
    """Parts are made when a layer first reads them, and have 32 bits where it sees 16."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        models = [compiled(born(kind)), compiled(kdist.parallelize(build(), config(kind)))]
        losses = [model.train_on_batch(*data()) for model in models]
    finally:
        keras.config.set_dtype_policy("float32")
    assert {local.dtype for e in entries(models[0]) for local in e.locals.values()} == {"float32"}
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    for one, other in zip(models[0].weights, models[1].weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_plan_of_what_layers_send_gives_no_weight_values(frozen: bool) -> None:
    """A model that fits no machine at hand can be planned."""
    model = born("inner")
    if frozen:
        model.get_layer("up").trainable = False
    planned = compiled(model).plan(batch_size=8)
    assert planned.inside
    assert all(entry.unborn is not None for entry in entries(model))
    plain = build()
    plain.get_layer("up").trainable = not frozen
    losses = [compiled(m).train_on_batch(*data()) for m in (plain, model)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_a_file_of_weights_is_not_drawn_over(tmp_path: Path, monkeypatch) -> None:
    plain = build()
    for v in plain.weights:
        v.assign(v + 1)
    plain.save_weights(tmp_path / "w.weights.h5")
    model = compiled(born("level3"))
    monkeypatch.setattr(recipes.Draw, "block", None)
    model.load_weights(tmp_path / "w.weights.h5")
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_read_inside_the_scope() -> None:
    """What is read or written before its place is known is whole, and right."""
    plain = build()
    with kdist.scope(config("inner")):
        model = build()
        kernel = model.get_layer("up").kernel.numpy()
        model.get_layer("down").bias.assign(np.arange(8.0))
    np.testing.assert_array_equal(kernel, plain.get_layer("up").kernel.numpy())
    np.testing.assert_array_equal(model.get_layer("up").kernel.numpy(), kernel)
    np.testing.assert_array_equal(model.get_layer("down").bias.numpy(), np.arange(8.0))
    np.testing.assert_allclose(
        model.predict(data()[0], verbose=0).shape, plain.predict(data()[0], verbose=0).shape
    )


def test_a_value_that_follows_from_its_own() -> None:
    """Python looks `assign` up before the value is read, which makes a plain variable of it."""
    plain, (x, y) = compiled(build()), data()
    with kdist.scope(config("level3")):
        model = build()
        for v in model.weights:
            v.assign(v.numpy() / 2)
        # Its state waits for its place too.
        compiled(model).optimizer.build(model.trainable_variables)
    for v in plain.weights:
        v.assign(v.numpy() / 2)
    plain.optimizer.build(plain.trainable_variables)
    for one in (plain, model):
        for slot in one.optimizer.variables[2:]:
            slot.assign(slot.numpy() + 0.25)
        one.fit(x, y, batch_size=8, verbose=0)
    for a, b in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-5)


def test_first_used_in_a_function() -> None:
    model = compiled(born("level3"))
    x = data()[0]
    found = tf.function(lambda x: model(x))(x)
    np.testing.assert_allclose(found, build()(x), rtol=1e-5, atol=1e-6)


def test_declarations_and_compile_inside_the_scope() -> None:
    with kdist.scope(kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2))):
        model = compiled(build())
        kdist.shard(model.get_layer("up"), weights={"kernel": (None, "model")})
    model.fit(*data(), verbose=0)
    placed = {e.variable.path: e.placement for e in entries(model)}
    assert not next(p for path, p in placed.items() if path.endswith("up/kernel")).is_whole


def test_a_model_that_is_built_later() -> None:
    def unbuilt() -> keras.Model:
        keras.utils.set_random_seed(4)
        return keras.Sequential([keras.layers.Dense(16), keras.layers.Dense(40)])

    x, y = data()
    models = [unbuilt()]
    with kdist.scope(config("level3")):
        models.append(unbuilt())
    for model in models:
        compiled(model).fit(x.astype("float32"), y, batch_size=8, verbose=0)
    for a, b in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_outermost_models_become_parallel() -> None:
    with kdist.scope(config("replicas")):
        inputs = keras.Input((4,))
        inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        outer = keras.Model(inputs, inner(inputs))
        other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    assert parallel_of(inner) is None
    assert parallel_of(outer) is not None and parallel_of(other) is not None
    assert parallel_of(other._functional) is None  # a part of it


@keras.saving.register_keras_serializable("kdist_scope")
class Block(keras.layers.Layer):
    """As tutorials write a transformer's block: layers, and a model of layers, inside a layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rest = [keras.layers.Dense(4, name="rest")]
        self.ffn = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(4)])

    def build(self, shape: Any) -> None:
        self.ffn.build(shape)
        self.rest[0].build(shape)

    def call(self, x: Any) -> Any:
        return x + self.rest[0](self.ffn(x))


def test_models_inside_of_layers_are_of_the_model_around() -> None:
    layouts = {".*rest/kernel": (None, "model")}
    mesh = kdist.mesh(data=2, model=2)
    with kdist.scope(kdist.ParallelConfig(mesh=mesh, layout_map=layouts)):
        inputs = keras.Input((4,))
        block = Block()
        model = keras.Model(inputs, keras.layers.Dense(4)(block(inputs)))
    assert parallel_of(block.ffn) is None and parallel_of(model) is not None


def test_large_variables_that_are_made_whole_are_named(small_chunks: None) -> None:
    with pytest.warns(UserWarning, match="kernel is made whole"), kdist.scope(config("level3")):
        keras.layers.Dense(64, kernel_initializer=lambda s, dtype: keras.ops.ones(s)).build((2, 64))
    with warnings.catch_warnings(), kdist.scope(config("level3")):
        warnings.simplefilter("error")
        build()


def test_large_variables_that_are_read_in_the_scope_are_named(small_chunks: None) -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.up = keras.layers.Dense(64)

        def call(self, x: Any) -> Any:
            return self.up(x)

    with warnings.catch_warnings(), kdist.scope(config("level3")):
        warnings.simplefilter("error")
        model = Own()
        model(keras.Input((64,)))
    assert all(entry.unborn is not None for entry in entries(model))
    with (
        pytest.warns(UserWarning, match="kernel is made whole.*read before the end"),
        kdist.scope(config("level3")),
    ):
        Own()(np.ones((2, 64), "float32"))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="Received: config=2"), kdist.scope(2):  # type: ignore[arg-type]
        pass
    with (
        pytest.raises(ValueError, match="stands alone"),
        kdist.scope(config("replicas")),
        kdist.scope(config("replicas")),
    ):
        pass
    with pytest.raises(ZeroDivisionError), kdist.scope(config("replicas")):
        model = build()
        raise ZeroDivisionError
    assert parallel_of(model) is None
    np.testing.assert_array_equal(model.get_weights()[0], build().get_weights()[0])


@pytest.mark.parametrize("how", ["scope", "parallelize"])
@pytest.mark.parametrize("kind", ["replicas", "level3"])
def test_models_that_have_the_same_weights(kind: str, how: str) -> None:
    """As of an autoencoder, of which one half is used by itself; the other is compiled."""

    def build_both() -> tuple[keras.Model, keras.Model]:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((8,))
        half = keras.layers.Dense(4, "tanh")(inputs)
        whole = keras.Model(inputs, keras.layers.Dense(8)(half))
        return keras.Model(inputs, half), whole

    x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    plain = build_both()
    compiled(plain[1]).fit(x, x, batch_size=8, shuffle=False, verbose=0)
    if how == "scope":
        with kdist.scope(config(kind)):
            made = build_both()
    else:
        made = build_both()
        for model in made:
            kdist.parallelize(model, config(kind))
    made[0].predict(x, verbose=0)  # a program for where weights are before
    compiled(made[1]).fit(x, x, batch_size=8, shuffle=False, verbose=0)
    for model, expected in zip(made, plain, strict=True):
        found = model.predict(x, verbose=0)
        np.testing.assert_allclose(found, expected.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def test_weights_that_another_model_has_moved() -> None:
    inputs = keras.Input((8,))
    half = keras.layers.Dense(4)(inputs)
    models = [keras.Model(inputs, half), keras.Model(inputs, keras.layers.Dense(8)(half))]
    x = np.ones((16, 8), "float32")
    for model in models:
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=4)))
    for model, level in zip(models, (3, 1), strict=True):
        adam = keras.optimizers.Adam()
        model.compile(kdist.ShardedOptimizer(adam, level=level, threshold_kb=0), "mse")
        if level == 3:
            model.fit(x, x[:, :4], batch_size=8, verbose=0)
    with pytest.raises(ValueError, match="Compile this one again.*Received: model="):
        models[0].fit(x, x[:, :4], batch_size=8, verbose=0)
