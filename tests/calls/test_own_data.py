"""Steps of the user's own, and where their data are read."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.api import fitted_model

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from .step_parts import CUTS, IDS, MESHES, layer_of_two

pytestmark = pytest.mark.usefixtures("float64")


class Own(keras.Model):
    """Steps of its own, for batches of two parts that have rows of their own each."""

    def _far(self, data: Any) -> Any:
        more, (x, y) = data
        both = self(ops.concatenate([more, x], 0))
        return ops.mean((both[-ops.shape(x)[0] :] - y) ** 2) + ops.mean(both**2)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            far = self._far(data)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(far, weights), weights)
        return {"far": far}

    def test_step(self, data: Any) -> dict[str, Any]:
        return {"far": self._far(data)}

    def predict_step(self, data: Any) -> Any:
        return ops.tanh(self(data[0]))


def read(rows: int) -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 6)), rng.normal(size=(rows, 3))
    labelled = tf.data.Dataset.from_tensor_slices((x, y)).batch(3)
    return tf.data.Dataset.zip(tf.data.Dataset.from_tensor_slices(2.0 * x).batch(5), labelled)


def trained(axes: dict[str, int] | None) -> list[Any]:
    model = layer_of_two(Own)
    if axes is not None:
        cuts = CUTS if "model" in axes else {}
        config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts)
        kdist.parallelize(model, config)
    model.compile(keras.optimizers.Adam(0.01))
    history = model.fit(read(13), epochs=2, verbose=0, validation_data=read(7)).history
    tested = model.evaluate(read(7), verbose=0, return_dict=True)
    found = model.predict(read(7).map(lambda more, labelled: (more,)), verbose=0)
    return [history["far"], history["val_far"], tested["far"], found, *model.get_weights()]


@pytest.mark.parametrize("axes", MESHES, ids=IDS)
def test_over_processes_process_0_reads_datasets(
    axes: dict[str, int], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """A step of one's own takes whole batches; a line says who reads them."""
    plain = trained(None)
    monkeypatch.setattr(fitted_model, "has_joined", lambda: True)
    for one, other in zip(plain, trained(axes), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)
    said = [str(one.message) for one in recwarn if "process 0 reads" in str(one.message)]
    kinds = ("train", "test", "predict")
    assert len(said) == 3 and all(f"its own `{kind}_step`" in "".join(said) for kind in kinds)
