"""Models whose `fit` prepares batches first, as KerasHub's tasks do, go on within an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..cluster.stopping import StopAfter, Stopped
from .runs import BATCH, arrays

pytestmark = pytest.mark.usefixtures("float64")


class Task(keras.Model):
    """Its layers take four of six features, which may be words."""

    def preprocess_samples(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        x = tf.strings.to_number(x, tf.float64) if x.dtype == tf.string else x
        return keras.utils.pack_x_y_sample_weight(x[:, :4] / 2, y, sample_weight)

    def fit(self, x: Any = None, y: Any = None, **kwargs: Any) -> Any:
        if not isinstance(x, tf.data.Dataset):
            size = kwargs.pop("batch_size")
            x = tf.data.Dataset.from_tensor_slices((x, y)).batch(size)
        return super().fit(x.map(self.preprocess_samples), **kwargs)


def task() -> Task:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    model = Task(inputs, keras.layers.Dense(3, name="last")(inputs))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("adam", "mse")
    return model


def trained(words: bool, *callbacks: keras.callbacks.Callback) -> list[np.ndarray]:
    model, (x, y) = task(), arrays()
    given = {"batch_size": BATCH, "epochs": 3, "shuffle": False, "verbose": 0}
    model.fit(x.astype(str) if words else x, y, callbacks=list(callbacks), **given)
    return [keras.ops.convert_to_numpy(v) for v in model.variables]


@pytest.mark.parametrize("words", [False, True])
def test_a_task_goes_on_within_an_epoch(words: bool, tmp_path: Path) -> None:
    def saver() -> keras.callbacks.Callback:
        return kdist.callbacks.ShardedCheckpoint(tmp_path, every_steps=2, resume=True)

    with pytest.raises(Stopped):
        trained(words, saver(), StopAfter(9))
    for one, other in zip(trained(words, saver()), trained(words), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)
