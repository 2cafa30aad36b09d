"""What a layer writes and then reads: no gradient flows through it, as on one device."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from keras import layers, ops

from ..parity import compile_all, everywhere, fit_all

pytestmark = pytest.mark.usefixtures("float64")


class Normed(layers.Layer):
    """Divides by a norm of its weights that it keeps as state."""

    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="gain")
        self.norm = self.add_weight(shape=(), initializer="ones", trainable=False, name="norm")

    def call(self, inputs: Any) -> Any:
        self.norm.assign(0.5 * self.norm + ops.sum(ops.square(self.gain)))
        return inputs * self.gain / self.norm


class Weighed(keras.Model):
    """Weighs its loss by a running mean of the loss itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="running"
        )

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        loss = ops.mean(ops.square(y - y_pred))
        self.running.assign(0.9 * self.running + 0.1 * loss)
        return loss / self.running


def build(kind: type[keras.Model] = keras.Model) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    hidden = Normed(name="normed")(layers.Dense(8, "tanh", name="up")(inputs))
    return kind(inputs, layers.Dense(3, name="down")(hidden), name="normed_model")


@pytest.mark.parametrize("kind", [keras.Model, Weighed])
def test_no_gradient_flows_through_what_is_written(kind: type[keras.Model]) -> None:
    models = everywhere(lambda: build(kind))
    compile_all(models)
    fit_all(models, batch_size=8, epochs=2)
