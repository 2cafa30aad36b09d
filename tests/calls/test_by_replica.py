"""Calls that are differentiated again: plain operations on each replica's rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import kdist
from kdist.calls.layer_calls import LayerCalls
from kdist.calls.over_mesh import OverMesh

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from .step_parts import CUTS, IDS, Own, batch, layer_of_two, pair, same
from .step_parts import MESHES as AXES

pytestmark = pytest.mark.usefixtures("float64")

BY_REPLICA, ALONE = "on one device per replica, on whole weights", "on one device, on whole weights"
MESHES: dict[str, tuple[dict[str, int], int]] = {
    "data 4": ({"data": 4}, 0),
    "data 3, level 3": ({"data": 3}, 3),
    "data 2 x model 2": ({"data": 2, "model": 2}, 0),
    "data 2 x model 2, level 3": ({"data": 2, "model": 2}, 3),
    "model 2": ({"model": 2}, 0),
}


class Seen(layers.Layer):
    """Notes on which device it is told to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def call(self, x: Any) -> Any:
        made = x + 0.0
        if isinstance(made, tf.Tensor):
            self.seen.append(made.device)
        return made


class Diffusion(Own):
    """An equation of derivatives: du/dx0 = d2u/dx1^2, as physics-informed networks learn it."""

    def loss_of(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                found = self(x, training=True)
            first = inner.gradient(found, x)
            slope = first[:, 1]
        second = outer.gradient(slope, x)[:, 1]
        return ops.mean((first[:, 0] - second) ** 2) + ops.mean((found - y) ** 2)


class Penalty(Own):
    """A loss with the size of the network's slope."""

    def loss_of(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = self(x, training=True)
        slopes = ops.sum(ops.square(tape.gradient(found, x)), axis=1)
        return ops.mean((found - y) ** 2) + ops.mean((slopes - 1.0) ** 2)


def fitted(
    mesh: str, kind: type, middle: Callable[[], Any], rows: int = 19
) -> tuple[list[keras.Model], list[str]]:
    """The model plain and over a mesh, both trained, and what was said."""
    axes, level = MESHES[mesh]
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(layer_of_two(kind, middle()))
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)
    cuts = CUTS if "model" in axes else {}
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts, optimizer=optimizer)
    kdist.parallelize(models[1], config)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for model in models:
            model.compile(keras.optimizers.Adam(0.01))
            model.fit(*batch(rows), batch_size=8, epochs=2, verbose=0, shuffle=False)
    return models, [str(one.message) for one in said]


@pytest.mark.parametrize("kind", [Diffusion, Penalty])
@pytest.mark.parametrize("mesh", MESHES)
def test_each_replica_computes_its_rows(mesh: str, kind: type) -> None:
    models, said = fitted(mesh, kind, Seen)
    same(models)
    replicas = MESHES[mesh][0].get("data", 1)
    words, others = (BY_REPLICA, ALONE) if replicas > 1 else (ALONE, BY_REPLICA)
    assert any(words in text for text in said) and not any(others in text for text in said)
    seen = next(one for one in models[1].layers if isinstance(one, Seen)).seen
    assert len({device for device in seen if device}) == replicas, seen


class Looped(Own):
    """Calls itself in a loop, which replicas do not compute apart."""

    def loss_of(self, x: Any, y: Any) -> Any:
        def far(i: Any) -> Any:
            return ops.mean((self(x, training=True) - y) ** 2)

        return tf.reduce_sum(tf.map_fn(far, tf.range(2), fn_output_signature=x.dtype))


@pytest.mark.parametrize("kind", [Penalty, Looped])
@pytest.mark.parametrize("axes", AXES, ids=IDS)
def test_what_xla_does_not_compile_is_told(axes: dict[str, int], kind: type) -> None:
    models = pair(axes, kind, jit_compile=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for model in models:
            model.fit(*batch(), batch_size=8, verbose=0, shuffle=False)
    same(models)
    told = [str(one.message) for one in said if "computes on one device" in str(one.message)]
    assert told and all(one.endswith("jit_compile=True compiles nothing in it") for one in told)


class Followed(Penalty):
    """Notes where each gradient of its activations is computed."""

    def train_step(self, data: Any) -> dict[str, Any]:
        found = super().train_step(data)
        ops = tf.compat.v1.get_default_graph().get_operations()
        self.places = {op.device for op in ops if op.type == "TanhGrad"}
        return found


@pytest.mark.parametrize("mesh", ["data 3, level 3", "data 2 x model 2"])
def test_gradients_are_computed_where_the_rows_are(mesh: str) -> None:
    models, _ = fitted(mesh, Followed, Seen)
    replicas = MESHES[mesh][0]["data"]
    assert len(models[1].places) == replicas and "" not in models[1].places, models[1].places


class Critic(Own):
    """Calls itself twice; the slope is that of one call alone."""

    def loss_of(self, x: Any, y: Any) -> Any:
        loss = ops.mean((self(x, training=True) - y) ** 2)
        for scale in (0.5, 0.7):
            near = scale * x
            with tf.GradientTape() as tape:
                tape.watch(near)
                found = self(near, training=True)
            loss += ops.mean(tape.gradient(found, near) ** 2)
        return loss


class TwoSlopes(Penalty):
    """Has slopes in two places, and a call besides."""

    def loss_of(self, x: Any, y: Any) -> Any:
        loss = super().loss_of(0.5 * x, y) + super().loss_of(0.7 * x, y)
        return loss + ops.mean((self(x, training=True) - y) ** 2)


@pytest.mark.parametrize(("kind", "over", "traces"), [(Critic, 1, 2), (TwoSlopes, 0, 3)])
@pytest.mark.parametrize("mesh", ["data 4", "data 2 x model 2"])
def test_other_calls_of_the_layer_stay_over_the_mesh(
    mesh: str, kind: type, over: int, traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def begun(calls: LayerCalls, *given: Any) -> Any:
        ran.append(0)
        return begin(calls, *given)

    def called(call: OverMesh) -> Any:
        ran[-1] += 1
        return run(call)

    begin, run = LayerCalls.over_mesh, OverMesh.__call__
    monkeypatch.setattr(LayerCalls, "over_mesh", begun)
    monkeypatch.setattr(OverMesh, "__call__", called)
    models, _ = fitted(mesh, kind, Seen, 16)
    same(models)
    assert ran[-1] == over and len(ran) == traces, ran


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "dropout": (lambda: layers.Dropout(0.5, seed=1), "writes (seed_gen"),
    "noise without a seed": (lambda: layers.GaussianNoise(0.1), "writes (seed_gen"),
    "a penalty": (lambda: layers.ActivityRegularization(l2=0.1), "added losses"),
    "statistics": (lambda: layers.BatchNormalization(name="norm"), "writes (norm/moving_mean, "),
    "rows that meet": (lambda: layers.Lambda(lambda x: x - ops.mean(x, axis=0)), "rows of the"),
}


@pytest.mark.parametrize("mesh", ["data 4", "data 2 x model 2"])
@pytest.mark.parametrize("name", OTHERS)
def test_what_would_give_other_numbers_is_computed_on_one_device(name: str, mesh: str) -> None:
    middle, reason = OTHERS[name]
    models, said = fitted(mesh, Penalty, middle)
    same(models)
    assert any(ALONE in text and reason in text for text in said), said
    assert not any(BY_REPLICA in text for text in said)


@pytest.mark.parametrize("name", ["dropout", "statistics"])
def test_so_are_the_other_calls_of_the_layer(name: str) -> None:
    middle, reason = OTHERS[name]
    models, said = fitted("data 4", Critic, middle)
    same(models)
    assert sum(ALONE in text and reason in text for text in said) == 1, said


class Words(Own):
    """Of ids and features; the slope is that of the features."""

    def loss_of(self, x: Any, y: Any) -> Any:
        ids, dense = x
        with tf.GradientTape() as tape:
            tape.watch(dense)
            found = self((ids, dense), training=True)
        return ops.mean((found - y) ** 2) + ops.mean(tape.gradient(found, dense) ** 2)


@pytest.mark.parametrize("placed", ["host", ""])
@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "model": 2}], ids=["data", "inner"])
def test_rows_of_tables(axes: dict[str, int], placed: str) -> None:
    """Those on the host are fetched for one call alone; others have gradients by rows."""
    models, told = [], []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        ids, dense = keras.Input((3,), dtype="int32"), keras.Input((4,))
        table = layers.Embedding(7, 2, name="words")
        both = layers.Concatenate()([layers.Flatten()(table(ids)), dense])
        hidden = layers.Dense(8, "tanh", name="up")(both)
        model = Words([ids, dense], layers.Dense(3, name="down")(hidden))
        if parallel:
            if placed:
                kdist.place(table, placed)
            cuts = CUTS if "model" in axes else {}
            kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts))
        model.compile(keras.optimizers.Adam(0.01, clipnorm=0.1))
        rng = np.random.default_rng(0)
        given = (rng.integers(0, 7, (19, 3)).astype("int32"), rng.normal(size=(19, 4)))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.fit(given, rng.normal(size=(19, 3)), 8, 2, 0, shuffle=False)
        models.append(model)
        told = [str(one.message) for one in said]
    same(models)
    assert any((ALONE if placed else BY_REPLICA) in text for text in told), told
    assert any("table on the host" in text for text in told) == bool(placed)


class Smooth(keras.Model):  # not `Own`, of which Keras makes a class of functional models
    """Subclassed; the slope is that of what a reader says of words, some masked."""

    def __init__(self) -> None:
        super().__init__()
        self.words = layers.Embedding(7, 2, mask_zero=True, name="words")
        word = keras.Input((3, 2))
        pooled = layers.GlobalAveragePooling1D()(layers.Dense(8, "tanh", name="up")(word))
        self.reader = keras.Model(word, layers.Dense(3, "tanh", name="down")(pooled))

    train_step = Own.train_step

    def call(self, ids: Any, training: bool = False) -> Any:
        return self.reader(self.words(ids), training=training)

    def loss_of(self, x: Any, y: Any) -> Any:
        words = self.words(x)
        with tf.GradientTape() as tape:
            tape.watch(words)
            found = self.reader(words, training=True)
        return ops.mean((found - y) ** 2) + ops.mean(tape.gradient(found, words) ** 2)


@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize("axes", AXES, ids=IDS)
def test_masks_go_along(axes: dict[str, int], level: int) -> None:
    rng = np.random.default_rng(0)
    ids, y = rng.integers(0, 4, (19, 3)).astype("int32"), rng.normal(size=(19, 3))
    ids[:, 0] = 1 + ids[:, 0] % 3
    models = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        model = Smooth()
        model(ids)
        if parallel:
            optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0)
            cuts = CUTS if "model" in axes else {}
            mesh = kdist.mesh(**axes)
            config = kdist.ParallelConfig(mesh=mesh, layout_map=cuts, optimizer=optimizer)
            kdist.parallelize(model, config)
        model.compile(keras.optimizers.Adam(0.01))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.fit(ids, y, 8, 2, 0, shuffle=False)
        models.append(model)
    same(models)
    assert any(BY_REPLICA in str(one.message) for one in said)


class Rounded(Penalty):
    """The penalty of a model that computes in 16 bits."""

    def loss_of(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = ops.cast(self(x, training=True), y.dtype)
        slopes = ops.sum(ops.square(ops.cast(tape.gradient(found, x), y.dtype)), axis=1)
        return ops.mean((found - y) ** 2) + ops.mean((slopes - 1.0) ** 2)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("axes", AXES, ids=IDS)
def test_in_sixteen_bits(axes: dict[str, int], policy: str) -> None:
    """Up to what they round off: products of 16 bits are added in another order."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    models = pair(axes, Rounded)
    before = models[0].get_weights()
    x, y = (part.astype("float32") for part in batch(16))
    with pytest.warns(UserWarning, match=BY_REPLICA):
        for model in models:
            model.compile(keras.optimizers.SGD(0.5))
            model.fit(x, y, batch_size=16, verbose=0)
    bits = 7 if policy == "mixed_bfloat16" else 10
    for start, one, other in zip(before, *(m.get_weights() for m in models), strict=True):
        moved = np.abs(one - start).max()
        assert moved > 0 and np.abs(other - one).max() < 2 * 2.0**-bits * moved
