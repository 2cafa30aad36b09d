"""Calls in a step that are traced one by one are told, with what differs."""

from __future__ import annotations

import warnings
from typing import Any

from kdist.calls.many_traces import MANY, ManyTraces

import keras
import pytest
from keras import layers, ops

from .step_parts import IDS, MESHES, Own, batch, pair, same

pytestmark = pytest.mark.usefixtures("float64")


class Timed(layers.Layer):
    """Scales by what an attribute, or an argument, says."""

    time = 0.0

    def call(self, x: Any, by: float = 1.0) -> Any:
        return x * (by + self.time)


class Loops(Own):
    """Calls one layer again and again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timed = Timed(name="timed")

    def loss_of(self, x: Any, y: Any) -> Any:
        found = self(x, training=True)
        for turn in range(MANY):
            found = self.turn(found, turn)
        return ops.mean((found - y) ** 2)

    def turn(self, found: Any, turn: int) -> Any:
        return self.timed(found)


class ByAttribute(Loops):
    def turn(self, found: Any, turn: int) -> Any:
        self.timed.time = turn / 8
        return self.timed(found)


class ByArgument(Loops):
    def turn(self, found: Any, turn: int) -> Any:
        return self.timed(found, by=1 + turn / 8)


class ByTensor(Loops):
    def turn(self, found: Any, turn: int) -> Any:
        return self.timed(found, by=ops.convert_to_tensor(1 + turn / 8, "float64"))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (ByAttribute, "attribute 'time' of layer 'timed'"),
        (ByArgument, "an argument that is no tensor"),
        (Loops, ""),
        (ByTensor, ""),
    ],
)
@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_what_differs_is_told(axes: dict[str, int], kind: type, what: str) -> None:
    models = pair(axes, kind)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for model in models:
            model.fit(*batch(), batch_size=8, verbose=0)
    same(models)
    told = [str(one.message) for one in said if "has been traced" in str(one.message)]
    assert len(told) == bool(what)
    assert not what or f"'timed' has been traced {MANY} times, since {what} differs" in told[0]


def test_what_a_call_reads_is_told() -> None:
    said: list[str] = []
    seen = ManyTraces(said.append)
    layer = keras.layers.Dense(2, name="up")
    for turn in range(MANY + 2):
        seen.see([layer], "kind", ((), ((turn, ("units", 2)),)))
        seen.see([layer], turn, ((), ((turn, ("units", 2)),)))
    (text,) = said
    assert "what `call` of layer 'up' reads differs" in text
