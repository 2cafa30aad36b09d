"""Losses that read what the user changes while a model trains."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from ..parity import MESHES, compile_all, fit_all, mlp, pair

pytestmark = pytest.mark.usefixtures("float64")


class ScaledLoss(keras.Model):
    """Reads a variable of no layer in `compute_loss`."""

    scale = 1.0

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return self.scale * super().compute_loss(*args, **options)


@pytest.mark.parametrize("compiled_loss", [True, False])
def test_a_loss_that_reads_a_variable_of_no_layer(compiled_loss: bool, recwarn: Any) -> None:
    """In a compiled loss the warning says where else to read it; there the model stays cut."""
    scale = tf.Variable(1.0, dtype="float64")

    def scaled(y: Any, p: Any) -> Any:
        return scale * keras.ops.mean(keras.ops.square(y - p), axis=-1)

    def build() -> keras.Model:
        model = mlp()
        if compiled_loss:
            return model
        scaling = ScaledLoss(model.inputs, model.outputs)
        scaling.scale = scale
        return scaling

    models = pair(MESHES[1], build)
    changes = keras.callbacks.LambdaCallback(on_epoch_begin=lambda n, logs: scale.assign(n + 1.0))
    compile_all(models, loss=scaled if compiled_loss else "mse")
    fit_all(models, epochs=2, callbacks=[changes])
    told = [str(w.message) for w in recwarn if "gathered weights" in str(w.message)]
    assert len(told) == compiled_loss
    assert all("read in an overridden compute_loss" in one for one in told)
