"""Tensors of a step that a layer reads from an attribute, and not from its arguments."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from .step_parts import IDS, MESHES, Own, batch, pair, same

pytestmark = pytest.mark.usefixtures("float64")


class Scaled(Own):
    """Multiplies what it makes by what the step has put into an attribute."""

    scale: Any = None

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        made = super().call(inputs, training=training, mask=mask)
        return made if self.scale is None else made * self.scale

    def scaled_by(self, scale: Any, x: Any) -> Any:
        self.scale = scale
        made = self(x, training=True)
        self.scale = None
        return made


class OfWeights(Scaled):
    """The tensor follows from weights: it has a gradient."""

    def loss_of(self, x: Any, y: Any) -> Any:
        scale = 1.0 + ops.mean(self.get_layer("up").kernel ** 2)
        return ops.mean((self.scaled_by(scale, x) - y) ** 2)


class OfACall(Scaled):
    """The tensor follows from a call of a layer."""

    def loss_of(self, x: Any, y: Any) -> Any:
        scale = 1.0 + ops.mean(self.get_layer("up")(x))
        return ops.mean((self.scaled_by(scale, x) - y) ** 2)


class InAFunction(Scaled):
    """Within a `tf.function` of the step's, in which tapes do not show what has a gradient."""

    def loss_of(self, x: Any, y: Any) -> Any:
        @tf.function(autograph=False)
        def found() -> Any:
            scale = 1.0 + ops.mean(self.get_layer("up").kernel ** 2)
            return ops.mean((self.scaled_by(scale, x) - y) ** 2)

        return found()


class OfTheBatch(Scaled):
    """Two tensors, neither of which has a gradient."""

    def loss_of(self, x: Any, y: Any) -> Any:
        found = [self.scaled_by(ops.mean(x * by), x) for by in (2.0, -3.0)]
        return sum(ops.mean((one - y) ** 2) for one in found)


@pytest.mark.parametrize("kind", [OfWeights, OfACall, InAFunction, OfTheBatch])
@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_tensors_that_a_layer_holds(axes: dict[str, int], kind: type) -> None:
    models, losses = pair(axes, kind), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for model in models:
            options = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
            losses.append(model.fit(*batch(), **options).history["far"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    same(models)
    told = ["reads a tensor that the step computes" in str(one.message) for one in said]
    assert any(told) == (kind is not OfTheBatch)


class Keeps(keras.layers.Layer):
    """Keeps what it made last, to show it."""

    def call(self, x: Any) -> Any:
        self.made = x + 1
        return self.made


def test_what_a_trace_made_tells_no_calls_apart() -> None:
    from kdist.calls.attributes import attributes_of

    layer = Keeps()
    found = []
    for _ in range(2):
        tf.function(layer, autograph=False)(tf.ones((1, 2)))
        found.append(attributes_of([layer]))
    assert found[0] == found[1]
