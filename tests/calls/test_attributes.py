"""Attributes that a step sets between two calls of one layer."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
import warnings
from collections.abc import Mapping
from typing import Any

from kdist._compat import keras_models
from kdist.calls.attributes import alike, attributes_of
from kdist.calls.functions import CallFunctions

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from .step_parts import IDS, MESHES, Own, batch, pair, same

pytestmark = pytest.mark.usefixtures("float64")


def test_values_are_alike_by_what_they_hold() -> None:
    for make in (lambda: 1.5, lambda: [1, {"a": (2, "b")}], lambda: np.arange(3), lambda: None):
        assert alike(make()) == alike(make())
    for one, other in [
        (1, True),
        (1, 1.0),
        ([1], (1,)),
        ([1, 2], [2, 1]),
        (np.ones(1), np.ones(2)),
    ]:
        assert alike(one) != alike(other)
    keras_tensor = keras.KerasTensor((2,))
    assert alike(keras_tensor) == alike(keras.KerasTensor((2,)))


def test_objects_are_themselves_and_what_they_hold() -> None:
    one = types.SimpleNamespace(flag=True, inner=types.SimpleNamespace(scale=1.0))
    before = alike(one)
    assert alike(one) == before and alike(types.SimpleNamespace(**vars(one))) != before
    one.inner.scale = 2.0
    assert alike(one) != before
    one.inner.scale = 1.0
    assert alike(one) == before
    one.itself = one
    hash(alike(one))


def test_frozen_dataclasses_are_alike_if_equal() -> None:
    @dataclasses.dataclass(frozen=True)
    class Settings:
        scale: float

    assert alike(Settings(1.0)) == alike(Settings(1.0)) != alike(Settings(2.0))


SCALE = 1.0


def scaled(x: Any) -> Any:
    return SCALE * x


def test_functions_are_alike_by_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = 1.0

    def within(x: Any) -> Any:
        return scale * x

    def of_itself(x: Any) -> Any:
        return of_itself(x)

    before = alike(within), alike(scaled), alike(of_itself)
    assert before == (alike(within), alike(scaled), alike(of_itself))
    scale = 2.0
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2.0)
    assert alike(within) != before[0] and alike(scaled) != before[1]


@pytest.mark.parametrize(
    "make", [lambda: tf.Variable(0), lambda: tf.constant(0), lambda: keras.Variable(0), set().copy]
)
def test_what_has_no_hash(make: Any) -> None:
    one, other = make(), make()
    assert alike(one) == alike(one)
    assert (alike(one) == alike(other)) == isinstance(one, set)
    hash(alike({"held": [one]}))


def test_an_object_that_cannot_say_what_it_equals_equals_itself() -> None:
    class Arrays:
        def __eq__(self, other: object) -> Any:
            return np.arange(2) == np.arange(2)

        def __hash__(self) -> int:
            return 0

    one, other = Arrays(), Arrays()
    assert {alike(one): 1}[alike(one)] == 1
    assert alike(one) != alike(other)


@dataclasses.dataclass
class Sizes:
    size: int


class OfSizes(Sizes, enum.Enum):
    """Has no hash: the dataclass has none."""

    SMALL = 1


class Number(int):
    def __eq__(self, other: object) -> bool:
        return int(self) == other

    __hash__: Any = None


class Failing(Mapping):
    """Raises whatever is asked of it."""

    def __getitem__(self, key: Any) -> Any:
        raise RuntimeError

    __iter__ = __len__ = __hash__ = __getitem__  # type: ignore[assignment]


@pytest.mark.parametrize(
    "value", [OfSizes.SMALL, Number(3), np.zeros(1, "i4,i4")[0], Failing(), [Failing()]]
)
def test_what_cannot_be_looked_into_is_itself(value: Any) -> None:
    assert {alike(value): 1}[alike(value)] == 1
    assert alike([value, 1]) != alike([value, 2])


def test_sets_are_alike_in_whatever_order() -> None:
    words = [str(n) for n in range(50)]
    others = words[::-1]
    assert alike(set(words)) == alike(set(others))
    assert alike({1}) != alike({1.0}) and alike({1}) != alike({2})


def test_large_containers_are_themselves() -> None:
    words = [str(n) for n in range(100_000)]
    assert alike(words) == alike(words) != alike([*words])


def test_an_object_that_is_gone_is_not_taken_for_another() -> None:
    seen = set()
    for _ in range(50):
        seen.add(alike(lambda: None))
    assert len(seen) == 50


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activation", keras.activations.relu),
        ("lora_enabled", True),
        ("activity_regularizer", keras.regularizers.L2(0.1)),
        ("mine", {"a": [1]}),
        ("_mine", 1.0),
        ("loss", "mse"),
        ("autocast", False),
    ],
)
def test_attributes_of_layers(name: str, value: Any) -> None:
    dense = layers.Dense(2)
    dense.build((None, 2))
    before = attributes_of([dense])
    setattr(dense, name, value)
    assert attributes_of([dense]) != before


@pytest.mark.parametrize("make", [lambda: layers.LSTM(2, dropout=0.1), lambda: layers.Dense(2)])
def test_what_keras_notes_of_a_call_says_nothing_of_the_next(make: Any) -> None:
    layer, x = make(), np.zeros((1, 3, 2))
    layer.build((None, 3, 2))
    before = attributes_of(keras_models.flat_layers(layer))
    tf.function(layer, autograph=False)(x, training=True)
    assert attributes_of(keras_models.flat_layers(layer)) == before


class Switched(Own):
    """Calls itself before and after something is switched, and compares."""

    def switch(self, on: bool) -> None:
        raise NotImplementedError

    def loss_of(self, x: Any, y: Any) -> Any:
        self.switch(True)
        found = self(x, training=True)
        self.switch(False)
        other = self(x, training=True)
        self.switch(True)
        return ops.mean((found - y) ** 2) + 0.5 * ops.mean((found - tf.stop_gradient(other)) ** 2)


class Activation(Switched):
    """An attribute of Keras's own layer."""

    def switch(self, on: bool) -> None:
        self.get_layer("up").activation = keras.activations.get("tanh" if on else "gelu")


class Deeper(Switched):
    """An object that a layer of the model holds, and that has an attribute."""

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return self.settings.scale * super().call(inputs, training=training, mask=mask)

    def switch(self, on: bool) -> None:
        if not hasattr(self, "settings"):
            self.settings = types.SimpleNamespace(scale=1.0)
        self.settings.scale = 1.5 if on else 1.0


ON = True


class NamedAsOfModels(Switched):
    """An attribute of a name that Keras has in models."""

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        made = super().call(inputs, training=training, mask=mask)
        return 1.5 * made if self.loss == "on" else made

    def switch(self, on: bool) -> None:
        self.loss = "on" if on else "off"


class Global(Switched):
    """A number of the module that `call` reads."""

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        made = super().call(inputs, training=training, mask=mask)
        return 1.5 * made if ON else made

    def switch(self, on: bool) -> None:
        global ON
        ON = on


class Given(Switched):
    """An object that the model is called with, and that has an attribute."""

    def call(self, inputs: Any, training: Any = None, mask: Any = None, how: Any = None) -> Any:
        made = super().call(inputs, training=training, mask=mask)
        return made if how is None else how.scale * made

    def loss_of(self, x: Any, y: Any) -> Any:
        how = types.SimpleNamespace(scale=1.5)
        found = self(x, training=True, how=how)
        how.scale = 0.5
        return ops.mean((found - y) ** 2) + ops.mean((found - self(x, training=True, how=how)) ** 2)


class Counted(Switched):
    """Counts its calls, and does something else in each."""

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        self.calls_so_far = getattr(self, "calls_so_far", 0) + 1
        scale = 1.0 + 0.1 * (self.calls_so_far % 2)
        return scale * super().call(inputs, training=training, mask=mask)

    def switch(self, on: bool) -> None:
        if on:
            self.calls_so_far = 0


class Meeting(Switched):
    """Rows of the batch meet in one of the calls alone."""

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        made = super().call(inputs, training=training, mask=mask)
        return made if self.apart else made - ops.mean(made, axis=0, keepdims=True)

    def switch(self, on: bool) -> None:
        self.apart = on


@pytest.mark.parametrize("kind", [Activation, Deeper, Given, NamedAsOfModels, Global])
@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_each_call_does_what_it_finds(axes: dict[str, int], kind: type) -> None:
    models = pair(axes, kind)
    for model in models:
        model.fit(*batch(), batch_size=8, epochs=2, verbose=0, shuffle=False)
    same(models)


class Twice(Switched):
    """Calls itself twice, with nothing changed."""

    def switch(self, on: bool) -> None:
        self.get_layer("up").activation = keras.activations.tanh


@pytest.mark.parametrize(("kind", "count"), [(Twice, 1), (Activation, 2)])
def test_calls_with_like_attributes_share_functions(
    kind: type, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    begin = CallFunctions.__init__

    def begun(functions: CallFunctions, *given: Any) -> None:
        made.append(functions)
        begin(functions, *given)

    monkeypatch.setattr(CallFunctions, "__init__", begun)
    pair(MESHES[0], kind)[1].fit(*batch(), batch_size=8, verbose=0, shuffle=False)
    assert len(made) == count


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_a_layer_that_counts_its_calls(axes: dict[str, int]) -> None:
    """Each call is another, and the step settles; Python runs more often than in Keras."""
    models = pair(axes, Counted)
    for model in models:
        model.fit(*batch(), batch_size=8, epochs=2, verbose=0, shuffle=False)
    assert all(np.isfinite(w).all() for w in models[1].get_weights())


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_rows_that_meet_in_one_call_alone_are_told(axes: dict[str, int]) -> None:
    models = pair(axes, Meeting)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        models[1].fit(*batch(), batch_size=8, verbose=0, shuffle=False)
    assert any("rows" in str(one.message) for one in said), [str(one.message) for one in said]
