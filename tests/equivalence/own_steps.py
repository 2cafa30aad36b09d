"""Models with training steps of their own, as users write them, for `test_own_steps.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

ROWS = 26  # two batches of 10, and one of 6 that three replicas share unevenly


def features() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, 6))


def targets() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(ROWS, 3))


def ids() -> np.ndarray:
    return np.random.default_rng(2).integers(0, 9, size=(ROWS, 4))


def network(inputs: int, outputs: int, name: str) -> keras.Model:
    """Two layers that the layout map cuts by `model`."""
    first = keras.Input((inputs,))
    hidden = layers.Dense(8, "tanh", name="up")(first)
    return keras.Model(first, layers.Dense(outputs, name="down")(hidden), name=name)


class Taped(keras.Model):
    """The step that guides show: a tape, the compiled loss and optimizer, metrics."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=found, sample_weight=weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, found, sample_weight=weight)
        return {metric.name: metric.result() for metric in self.metrics}


def taped(normalized: bool = False) -> keras.Model:
    first = keras.Input((6,))
    hidden = layers.Dense(8, "tanh", name="up")(first)
    if normalized:
        hidden = layers.BatchNormalization(synchronized=True)(hidden)
    return Taped(first, layers.Dense(3, name="down")(hidden))


def float8() -> keras.Model:
    first, policy = keras.Input((6,)), keras.dtype_policies.get("float8_from_float64")
    hidden = layers.Dense(8, "tanh", dtype=policy, name="up")(first)
    return Taped(first, layers.Dense(3, dtype=policy, name="down")(hidden))


class Around(keras.Model):
    """Keras's own step, with something before and after."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        logs = super().train_step((2.0 * x, y))
        return {**logs, "twice": 2.0 * logs["loss"]}


def around() -> keras.Model:
    base = network(6, 3, "around")
    return Around(base.inputs, base.outputs)


def two_outputs() -> keras.Model:
    """Losses of single outputs are metrics of their own, weighted by the rows that Keras knows."""
    first = keras.Input((6,))
    hidden = layers.Dense(8, "tanh", name="up")(first)
    outputs = {name: layers.Dense(3, name=name)(hidden) for name in ("down", "beside")}
    return Around(first, outputs)


class Penalty(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


def penalized() -> keras.Model:
    first = keras.Input((6,))
    up = layers.Dense(8, "tanh", name="up", kernel_regularizer="l2", activity_regularizer="l2")
    return Taped(first, layers.Dense(3, name="down", bias_regularizer="l1")(Penalty()(up(first))))


def tables() -> keras.Model:
    """Rows of a table that the batch looks up, with masks, and of one that all batches look up."""

    class Places(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = layers.Embedding(4, 8, name="places")
            self.supports_masking = True

        def build(self, shape: Any) -> None:
            self.table.build(shape)
            self.built = True

        def call(self, x: Any) -> Any:
            return x + self.table(ops.arange(4))

    first = keras.Input((4,), dtype="int32")
    words = Places()(layers.Embedding(9, 8, mask_zero=True, name="words")(first))
    hidden = layers.Dense(8, "tanh", name="up")(layers.GlobalAveragePooling1D()(words))
    return Taped(first, layers.Dense(3, name="down")(hidden))


class Sampling(layers.Layer):
    """Draws a fixed number: replicas draw from streams of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, given: Any) -> Any:
        mean, log_var = given
        drawn = keras.random.uniform(ops.shape(mean), 0.5, 0.5000001, seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * ops.round(10.0 * drawn) / 10.0


class Autoencoder(keras.Model):
    """A variational autoencoder: two networks, and a loss of what lies between them."""

    def __init__(self) -> None:
        super().__init__()
        first = keras.Input((6,))
        hidden = layers.Dense(8, "tanh", name="up")(first)
        mean, log_var = layers.Dense(2, name="mean")(hidden), layers.Dense(2, name="var")(hidden)
        self.encoder = keras.Model(first, [mean, log_var, Sampling()([mean, log_var])])
        self.decoder = network(2, 6, "decoder")
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "distance")]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, log_var, drawn = self.encoder(data)
            distance = ops.mean(ops.sum(ops.exp(log_var) + mean**2 - 1 - log_var, axis=1))
            loss = ops.mean(ops.sum((data - self.decoder(drawn)) ** 2, axis=1)) + distance
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        for tracker, value in zip(self.trackers, (loss, distance)):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class Adversaries(keras.Model):
    """A generator and a discriminator, each with an optimizer; no `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = network(2, 6, "g"), network(6, 1, "d")
        self.seed_generator = keras.random.SeedGenerator(3)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("d_loss", "g_loss")]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_function = keras.losses.BinaryCrossentropy(from_logits=True)

    def noise(self, rows: Any) -> Any:
        return keras.random.normal((rows, 2), seed=self.seed_generator)

    def critic(self, real: Any, rows: Any) -> Any:
        both = ops.concatenate([self.g(self.noise(rows)), real], 0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], 0)
        return self.loss_function(labels, self.d(both))

    def train_step(self, real: Any) -> dict[str, Any]:
        rows = ops.shape(real)[0]
        with tf.GradientTape() as tape:
            d_loss = self.critic(real, rows)
        gradients = tape.gradient(d_loss, self.d.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.d.trainable_weights))
        with tf.GradientTape() as tape:
            judged = self.d(self.g(self.noise(rows)))
            g_loss = self.loss_function(ops.zeros((rows, 1)), judged)
        gradients = tape.gradient(g_loss, self.g.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.g.trainable_weights))
        for tracker, value in zip(self.trackers, (d_loss, g_loss)):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class Critics(Adversaries):
    """With a penalty on gradients: a gradient of a gradient, through the discriminator."""

    def critic(self, real: Any, rows: Any) -> Any:
        fake = self.g(self.noise(rows), training=True)
        between = real + keras.random.uniform((rows, 1), seed=self.seed_generator) * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.d(between, training=True)
        slopes = ops.sqrt(ops.sum(ops.square(tape.gradient(judged, between)), axis=1))
        return ops.mean(self.d(fake)) - ops.mean(self.d(real)) + ops.mean((slopes - 1.0) ** 2)


class Student(keras.Model):
    """Distillation, with a `test_step` and a `predict_step` of its own too."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = network(6, 3, "student"), network(6, 3, "teacher")
        self.teacher.trainable = False

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        wanted = ops.softmax(self.teacher(x, training=False))
        with tf.GradientTape() as tape:
            found = self.student(x, training=True)
            far = keras.losses.KLDivergence()(wanted, ops.softmax(found))
            loss = 0.7 * far + 0.3 * self.compute_loss(y=y, y_pred=found)
        gradients = tape.gradient(loss, self.student.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.student.trainable_variables))
        return {**self.compute_metrics(x, y, found), "far": far}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        found = self.student(x, training=False)
        return {**self.compute_metrics(x, y, found), "largest": ops.max(found)}

    def predict_step(self, data: Any) -> Any:
        return ops.softmax(self(data[0] if isinstance(data, tuple) else data))


class Views(keras.Model):
    """Two views of each row, told from those of other rows: a loss in which rows meet."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = network(6, 8, "encoder"), network(8, 4, "head")

    def view(self, x: Any) -> Any:
        return ops.normalize(self.head(self.encoder(x, training=True), training=True), axis=1)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            alike = ops.matmul(self.view(data), ops.transpose(self.view(1.1 * data)))
            numbers = ops.arange(ops.shape(alike)[0])
            loss = ops.mean(
                keras.losses.sparse_categorical_crossentropy(numbers, alike, from_logits=True)
            )
        weights = self.encoder.trainable_weights + self.head.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss, "mean": ops.mean(alike)}


class Structured(keras.Model):
    """Dicts in, dicts out, options, one output that has no rows; built by its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Dense(8, "tanh", name="up"), layers.Dense(3, name="down")

    def call(self, given: Any, scale: float = 1.0, training: bool = False) -> Any:
        hidden = self.up(given["features"]) * scale
        return {"found": self.down(hidden), "size": (hidden, ops.mean(ops.square(hidden)))}

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            made = self({"features": x}, scale=0.5, training=True)
            far, size = ops.mean((made["found"] - y) ** 2), made["size"][1]
        weights = self.trainable_weights
        pairs = zip(tape.gradient(far, weights), tape.gradient(size, weights))
        both = [a if b is None else a + 0.5 * b for a, b in pairs]
        gradients, norm = tf.clip_by_global_norm(both, 0.5)
        self.optimizer.apply(gradients, weights)
        return {"far": far, "norm": norm}


@dataclasses.dataclass(frozen=True)
class OwnStep:
    """A model with its own step.

    Attributes:
        build: Makes the model.
        options: Makes what `compile` takes.
        data: Makes what `fit` takes.
    """

    build: Callable[[], keras.Model]
    options: Callable[[], dict[str, Any]]
    data: Callable[[], tuple[Any, ...]] = lambda: (features(), targets())


def adam(**options: Any) -> dict[str, Any]:
    return {"optimizer": keras.optimizers.Adam(0.01), **options}


def two_optimizers() -> dict[str, Any]:
    adam = keras.optimizers.Adam(0.01)
    return {"d_optimizer": adam, "g_optimizer": keras.optimizers.RMSprop(0.01)}


def scaled() -> dict[str, Any]:
    inner = keras.optimizers.AdamW(0.01, use_ema=True, clipnorm=0.5)
    scaled = keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2)
    return {"optimizer": scaled, "loss": "mse", "metrics": ["mae"]}


ZOO = {
    "taped": OwnStep(taped, lambda: adam(loss="mse", metrics=["mae"])),
    "around, loss scaling": OwnStep(around, scaled),
    "two outputs": OwnStep(
        two_outputs,
        lambda: adam(loss={"down": "mse", "beside": "mae"}),
        lambda: (features(), {"down": targets(), "beside": targets()}),
    ),
    "normalized": OwnStep(lambda: taped(True), lambda: adam(loss="mse")),
    "penalized": OwnStep(penalized, lambda: adam(loss="mse")),
    "tables": OwnStep(tables, lambda: adam(loss="mse"), lambda: (ids(), targets())),
    "autoencoder": OwnStep(Autoencoder, adam, lambda: (features(),)),
    "adversaries": OwnStep(Adversaries, two_optimizers, lambda: (features(),)),
    "critics": OwnStep(Critics, two_optimizers, lambda: (features(),)),
    "distillation": OwnStep(Student, lambda: adam(loss="mse", metrics=["mae"])),
    "views": OwnStep(Views, adam, lambda: (features(),)),
    "structured": OwnStep(Structured, adam),
    "float8": OwnStep(float8, lambda: adam(loss="mse")),
}
