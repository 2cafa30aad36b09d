"""The same model on every kind of mesh, level and placement, for checkpoints to go between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import kdist

import keras
import numpy as np

ROWS = 48
VOCABULARY, WIDTH, LENGTH = 12, 8, 4
LAYOUTS = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
}


def data():
    """Token ids and numbers to predict."""
    draw = np.random.default_rng(0)
    return draw.integers(0, VOCABULARY, (ROWS, LENGTH)), draw.normal(size=(ROWS, WIDTH))


def build() -> keras.Model:
    """A table, a block with a layer that is used twice, normalisation."""
    keras.utils.set_random_seed(11)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH, name="table")(tokens)
    tied = keras.layers.Dense(WIDTH, activation="tanh", name="tied")
    x = tied(x)
    x = keras.layers.Dense(4 * WIDTH, activation="gelu", name="up")(x)
    x = keras.layers.Dense(WIDTH, name="down")(x)
    x = keras.layers.LayerNormalization(name="norm")(tied(x))
    x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(tokens, keras.layers.Dense(WIDTH, name="head")(x))


def build_tied() -> keras.Model:
    """A table whose weight the output uses too."""
    keras.utils.set_random_seed(12)
    tokens = keras.Input((LENGTH,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(VOCABULARY, WIDTH, name="table")
    x = keras.layers.Dense(4 * WIDTH, activation="gelu", name="up")(table(tokens))
    x = keras.layers.Dense(WIDTH, name="down")(x)
    x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
    x = table(x, reverse=True)
    return keras.Model(tokens, keras.layers.Dense(WIDTH, name="head")(x))


def build_frozen() -> keras.Model:
    """A table and a layer that do not train."""
    model = build()
    for name in ("table", "up"):
        model.get_layer(name).trainable = False
    return model


def adam() -> keras.optimizers.Optimizer:
    """Adam that does not make steps of rounding errors where a gradient is nothing else."""
    return keras.optimizers.Adam(1e-2, epsilon=1e-2, global_clipnorm=2.0)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a model is trained.

    Attributes:
        mesh: Axes; None for plain Keras.
        level: Of optimizer parallelism.
        layouts: Whether inner axes cut weights.
        config: Further options of `ParallelConfig`, made when they are needed.
        declare: What is declared on the built model.
        optimizer: Makes the optimizer.
        state: Further options of `OptimizerConfig`.
        build: Makes the model.
    """

    mesh: Mapping[str, int] | None = None
    level: int = 0
    layouts: bool = False
    config: Callable[[], dict[str, Any]] = dict
    declare: Callable[[keras.Model], Any] = lambda model: None
    optimizer: Callable[[], Any] = lambda: adam()
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    build: Callable[[], keras.Model] = lambda: build()

    def model(self) -> keras.Model:
        """A new model, compiled."""
        model = self.build()
        if self.mesh is not None:
            self.declare(model)
            config = kdist.ParallelConfig(
                mesh=kdist.mesh(**self.mesh),
                layout_map=LAYOUTS if self.layouts else None,
                optimizer=kdist.OptimizerConfig(level=self.level, threshold_kb=0, **self.state),
                **self.config(),
            )
            kdist.parallelize(model, config)
        model.compile(self.optimizer(), "mse", metrics=["mae"])
        return model


def _pipeline() -> dict[str, Any]:
    return {"pipeline": kdist.PipelineConfig(micro_batches=2)}


def _interleaved() -> dict[str, Any]:
    return {"pipeline": kdist.PipelineConfig(micro_batches=4, schedule="interleaved")}


def _explicit() -> dict[str, Any]:
    stages = {"table": 0, "up": 1, "down": 2, "head": 3}
    return {
        "pipeline": kdist.PipelineConfig(micro_batches=3, schedule="zero_bubble", stages=stages)
    }


def split(axis: str, rows: tuple[int, ...]) -> Callable[[keras.Model], Any]:
    return lambda model: kdist.shard(model.get_layer("table"), manual_split=rows, axis=axis)


KINDS: Mapping[str, Kind] = {
    "plain": Kind(),
    "data4": Kind({"data": 4}),
    "data3-level1": Kind({"data": 3}, 1),
    "data4-level2": Kind({"data": 4}, 2),
    "data4-level3": Kind({"data": 4}, 3),
    "data2-model2": Kind({"data": 2, "model": 2}, 0, True),
    "data2-model2-level3": Kind({"data": 2, "model": 2}, 3, True),
    "pipe2-data2-level1": Kind({"pipe": 2, "data": 2}, 1, config=_pipeline),
    "pipe2-model2": Kind({"pipe": 2, "model": 2}, 0, True, config=_pipeline),
    "pipe2-interleaved": Kind({"pipe": 2}, config=_interleaved),
    "pipe4-zero-bubble": Kind({"pipe": 4}, config=_explicit),
    "state-host": Kind({"data": 2}, 2, state={"state_on": "host"}),
    "global": Kind({"data": 2, "model": 2}, 1, True, config=lambda: {"batch_semantics": "global"}),
    "host-table": Kind(
        {"data": 2}, 1, declare=lambda model: kdist.place(model.get_layer("table"), "host")
    ),
    "split-model": Kind(
        {"data": 2, "model": 2}, 0, True, declare=split("model", (5, VOCABULARY - 5))
    ),
    "split-data": Kind({"data": 3}, 3, declare=split("data", (0, 9, 3))),
}
"""Where checkpoints come from and go to."""


def train(model: keras.Model, epochs: int) -> list[float]:
    """Losses of some epochs, in the order of the data."""
    x, y = data()
    found = model.fit(x, y, batch_size=12, epochs=epochs, shuffle=False, verbose=0)
    return [*found.history["loss"], *found.history["mae"]]


def state(model: keras.Model) -> list[np.ndarray]:
    """Every variable of a model that has trained, whole."""
    metrics = {id(v) for v in model.metrics_variables}
    own = [v for v in model.variables if id(v) not in metrics]
    return [np.array(keras.ops.convert_to_numpy(v)) for v in [*own, *model.optimizer.variables]]
