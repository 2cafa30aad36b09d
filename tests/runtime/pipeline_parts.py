"""Models, data and recorders that tests of pipelines share."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.runtime.recorder import TimelineRecorder

import keras
import numpy as np

WIDTH = 8


def chain(layers: int = 8, width: int = WIDTH) -> keras.Model:
    x = inputs = keras.Input((width,))
    for i in range(layers):
        x = keras.layers.Dense(width, "tanh", name=f"layer{i}")(x)
    return keras.Model(inputs, x)


def pipelined(schedule: Any, stages: int = 2, micro: int = 4, **options: Any) -> keras.Model:
    model = kdist.PipelineModel(chain(), stages, micro, schedule, **options)
    model.compile("sgd", "mse")
    return model


def data(rows: int = 16, width: int = WIDTH) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, width)), rng.normal(size=(rows, width))


def recorded(model: keras.Model, steps: int = 2) -> TimelineRecorder:
    recorder = attached(model).recorder = TimelineRecorder()
    for _ in range(steps):
        model.train_on_batch(*data())
    return recorder


class Own(keras.Model):
    """A model whose loss is its own."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def own(layers: int = 4) -> keras.Model:
    plain = chain(layers)
    return Own(plain.inputs, plain.outputs)
