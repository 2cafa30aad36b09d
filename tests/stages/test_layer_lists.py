"""Subclassed models whose stages are lists of layers: what equals their own call, and the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist
from kdist.api.attached import attached

import keras
import numpy as np
import pytest

WIDTH, TOKENS, WORDS = 8, 6, 11


class Chain(keras.Model):
    """Calls its layers in a loop of its own."""

    def __init__(self, layers: list[keras.Layer]) -> None:
        super().__init__()
        self.listed = layers

    def call(self, x: Any, training: bool | None = None) -> Any:
        for layer in self.listed:
            x = layer(x)
        return x


class WithoutTraining(Chain):
    """Keras's trainer passes no `training`, so its layers are always in inference."""

    def call(self, x: Any) -> Any:
        for layer in self.listed:
            x = layer(x)
        return x


class Penalty(keras.layers.Layer):
    """Adds a loss, and counts its calls."""

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        self.seen.assign_add(1.0)
        return x


def dense(name: str, **options: Any) -> keras.Layer:
    return keras.layers.Dense(WIDTH, "tanh", name=name, **options)


def blocks() -> keras.Model:
    def block() -> keras.Model:
        return keras.Sequential([keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dropout(0.0)])

    return Chain([block() for _ in range(4)])


def losses_and_counters() -> keras.Model:
    return Chain([dense("a", activity_regularizer="l2"), Penalty(), dense("b")])


def normed(cls: type[Chain]) -> keras.Model:
    layers = [dense("a"), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dropout(0.5)]
    return cls([*layers, dense("b")])


def shared() -> keras.Model:
    a, b = dense("a"), dense("b")
    return Chain([a, b, a])


def masked() -> keras.Model:
    table = keras.layers.Embedding(WORDS, WIDTH, mask_zero=True)
    lstm = keras.layers.LSTM(WIDTH, return_sequences=True)
    return Chain([table, lstm, keras.layers.Dense(WORDS)])


def data(model: keras.Model) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    if isinstance(model.listed[0], keras.layers.Embedding):
        tokens = rng.integers(0, WORDS, (2, 16, TOKENS))
        return tokens[0] * (np.arange(TOKENS) < 4), tokens[1]
    return rng.normal(size=(16, WIDTH)), rng.normal(size=(16, WIDTH))


def compiled(model: keras.Model, stages: int, cut: int = 1) -> keras.Model:
    if stages > 1:
        lists = [model.listed[:cut], model.listed[cut:]]
        kdist.PipelineModel(model, stages, 2, assignment=lists)
    words = isinstance(model.listed[0], keras.layers.Embedding)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if words else "mse"
    model.compile("adam", loss)
    return model


def trained(build: Callable[[], keras.Model], stages: int) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = compiled(build(), stages)
    model.losses_seen = model.fit(
        *data(model), batch_size=8, shuffle=False, epochs=2, verbose=0
    ).history["loss"]
    return model


def normed_without_training() -> keras.Model:
    return normed(WithoutTraining)


@pytest.mark.parametrize(
    "build",
    [
        blocks,
        masked,
        normed_without_training,
        pytest.param(shared, marks=pytest.mark.long),
        pytest.param(losses_and_counters, marks=pytest.mark.long),
    ],
)
def test_a_chain_equals_one_device(build: Callable[[], keras.Model], float64: None) -> None:
    plain, model = trained(build, 1), trained(build, 2)
    np.testing.assert_allclose(plain.losses_seen, model.losses_seen, rtol=1e-9)
    x, _ = data(model)
    np.testing.assert_allclose(plain.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-9)
    if build is blocks:
        last = attached(model).entries[id(model.listed[3].weights[0])]
        assert {at[0] for at in last.locals} == {1}
    if build is not losses_and_counters:  # it counts micro-batches
        for a, b in zip(plain.get_weights(), model.get_weights()):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def normed_with_dropout() -> keras.Model:
    return normed(Chain)


DTYPES = ("float32", "mixed_float16", "mixed_bfloat16", "float16")


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        (normed_with_dropout, "mixed_bfloat16"),
        (normed_with_dropout, "float16"),
        (masked, "mixed_float16"),
        *(pytest.param(masked, one, marks=pytest.mark.long) for one in DTYPES if one[:2] != "mi"),
        *(pytest.param(normed_with_dropout, one, marks=pytest.mark.long) for one in DTYPES[:2]),
    ],
)
def test_a_chain_is_accepted_in_every_dtype(build: Callable[[], keras.Model], dtype: str) -> None:
    keras.config.set_dtype_policy(dtype)
    model = compiled(build(), 2)
    attached(model).prepare("test", data(model))
    assert attached(model).staged is not None


class Parts(Chain):
    """Has layers a, b and drop, and computes with them what a subclass says."""

    def __init__(self) -> None:
        super().__init__([dense("a"), dense("b"), keras.layers.Dropout(0.5, name="drop")])
        self.a, self.b, self.drop = self.listed
        self.other = keras.layers.Rescaling(2.0, name="other")
        self.numbers = iter(range(1, 1000))


def own_call(call: Callable, cls: type = Parts) -> type:
    return type("Own", (cls,), {"call": call})


def straight(self: Any, x: Any, training: bool | None = None) -> Any:
    return self.drop(self.b(self.a(x)))


def adds_a_loss(self: Any, x: Any, training: bool | None = None) -> Any:
    self.add_loss(keras.ops.mean(x))
    return straight(self, x)


def writes_state(self: Any, x: Any, training: bool | None = None) -> Any:
    x = straight(self, x)
    self.b.bias.assign(self.b.bias + 1.0)
    return x


def forgets_the_mask(self: Any, x: Any, training: bool | None = None) -> Any:
    table, lstm, head = self.listed
    return head(lstm(table(x), mask=None if training is None else keras.ops.not_equal(x, 1)))


OTHER_CALLS = {
    "residual": (
        lambda m, x, training=None: straight(m, x) + x,
        "returns the result of op.* AddV2",
    ),
    "factor": (lambda m, x, training=None: 2 * straight(m, x), "returns the result of op.* Mul"),
    "skip": (
        lambda m, x, training=None: m.drop(m.b(m.a(x)) + x),
        "gives layer 'drop' as 'inputs' the result of operation AddV2 .*, the chain the output of "
        "layer 'b'",
    ),
    "unlisted": (
        lambda m, x, training=None: m.drop(m.b(m.other(m.a(x)))),
        r"gives layer 'b' as 'inputs' the result of operation AddV2 .*/other",
    ),
    "gradient": (
        lambda m, x, training=None: m.drop(m.b(keras.ops.stop_gradient(m.a(x)))),
        "gives layer 'b' as 'inputs' the result of operation StopGradient",
    ),
    "parallel": (
        lambda m, x, training=None: (m.a(x), m.drop(m.b(x)))[1],
        "gives layer 'b' as 'inputs' the model's input, cast to float32, "
        "the chain the output of layer 'a'",
    ),
    "order": (
        lambda m, x, training=None: m.drop(m.a(m.b(x))),
        "calls layer 'b' where the lists have layer 'a', as number 0",
    ),
    "twice": (
        lambda m, x, training=None: m.drop(m.b(m.a(m.a(x)))),
        "calls layer 'a' twice, the lists once",
    ),
    "never": (lambda m, x, training=None: m.b(m.a(x)), "calls layer 'drop' not at all, the lists"),
    "early": (
        lambda m, x, training=None: (lambda y: (m.drop(y), y)[1])(m.b(m.a(x))),
        "returns the output of layer 'b', the chain the output of layer 'drop'",
    ),
    "flag": (
        lambda m, x, training=None: m.drop(m.b(m.a(x)), training=True),
        "With training=False, it gives layer 'drop' as 'training' True, the chain False",
    ),
    "in training": (
        lambda m, x, training=None: straight(m, x * 3 if training else x),
        "With training=True, it gives layer 'a' as 'inputs' the result of operation Mul",
    ),
    "structure": (
        lambda m, x, training=None: {"y": straight(m, x)},
        "returns 1 tensors as dict, the last layer 1 as",
    ),
    "loss": (adds_a_loss, "collects 1 loss from add_loss .* the listed layers 0 losses"),
    "state": (writes_state, "assigns variable '.*b/bias' the result of operation"),
}


@pytest.mark.parametrize("kind", OTHER_CALLS)
def test_another_call_is_refused(kind: str) -> None:
    call, message = OTHER_CALLS[kind]
    model = compiled(own_call(call)(), 2)
    x, y = data(model)
    with pytest.raises(ValueError, match=f"(?s)must do just that.*{message}.*Received: model="):
        model.train_on_batch(x, {"y": y} if kind == "structure" else y)


class ThreeDims(keras.layers.Layer):
    """Tells its shape without a call, as layers do that build by hand."""

    def call(self, x: Any) -> Any:
        if len(x.shape) != 3:
            raise ValueError("takes (batch, length, features)")
        return x

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


@pytest.mark.parametrize("tell", [True, False], ids=["when traced", "when built"])
def test_layers_that_are_no_chain_are_refused(tell: bool) -> None:
    class Positions(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.words = keras.layers.Embedding(WORDS, WIDTH)
            self.positions = keras.layers.Embedding(TOKENS, WIDTH)
            self.last = ThreeDims() if tell else keras.layers.LSTM(WIDTH)

        def call(self, x: Any) -> Any:
            return self.last(self.words(x) + self.positions(keras.ops.arange(TOKENS)))

    keras.utils.set_random_seed(0)
    model = Positions()
    x = np.zeros((8, TOKENS), "int32")
    model(x)
    stages = [[model.words, model.positions], [model.last]]
    config = kdist.PipelineConfig(micro_batches=2, stages=stages)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(pipe=2), pipeline=config))
    with pytest.raises(ValueError, match="(?s)must do just that. .*Put what is between.*Received"):
        model.predict(x, verbose=0)


def test_another_mask_is_refused() -> None:
    model = compiled(own_call(forgets_the_mask, Chain)(masked().listed), 2)
    with pytest.raises(ValueError, match="gives layer 'lstm' as 'mask' the result of operation"):
        model.train_on_batch(*data(model))


def test_other_numbers_are_refused() -> None:
    """A layer whose own code does not do the same twice: only numbers tell."""

    class Counting(keras.layers.Layer):
        calls = 0

        def call(self, x: Any) -> Any:
            Counting.calls += 1
            return x * float(Counting.calls)

    model = compiled(Chain([dense("a"), Counting()]), 2)
    with pytest.raises(ValueError, match=r"On a batch of \(8,\) its outputs are up to .* allowed"):
        model.train_on_batch(*data(model))


def test_comparing_changes_no_state() -> None:
    model = compiled(own_call(OTHER_CALLS["flag"][0])(), 2)
    x, y = data(model)
    model(x)
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    before = [v.numpy() for v in variables]
    with pytest.raises(ValueError, match="must do just that"):
        model.train_on_batch(x, y)
    for variable, value in zip(variables, before):
        np.testing.assert_array_equal(variable, value)
    assert all("call" not in layer.__dict__ for layer in model.listed)
    assert not attached(model).entries


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda listed: [listed], "one list per virtual stage, 2 here"),
        (lambda listed: [listed[:1], listed[2:]], "contain every layer"),
        (lambda listed: [listed, [dense("foreign")]], "contain layers of the model alone"),
    ],
)
def test_wrong_lists_of_layers_are_refused(cut: Any, message: str) -> None:
    model = blocks()
    lists = cut(model.listed)
    lists[-1][-1].build((None, WIDTH))
    kdist.PipelineModel(model, 2, 2, assignment=lists)
    model.compile("adam", "mse")
    with pytest.raises(ValueError, match=message):
        model.train_on_batch(*data(model))


def test_a_subclassed_model_needs_lists() -> None:
    model = blocks()
    model(np.zeros((1, WIDTH)))
    with pytest.raises(ValueError, match="Only a Functional model"):
        kdist.PipelineModel(model, 2, 2)
