"""Metrics of every kind, over replicas, equal those of one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import kdist

import keras
import pytest
from keras import ops

from .case import Case
from .features import BY_NAME as FEATURES
from .features import Feature
from .harness import compare
from .matrix import product, spread
from .optimizer_zoo import OPTIMIZERS
from .zoo import BY_NAME


def _one_hot(y_true: Any, y_pred: Any) -> Any:
    """Targets as `y_pred` is laid out: labels of classes as rows of zeros and a one."""
    if y_true.shape[1:] == y_pred.shape[1:]:
        return ops.cast(y_true, y_pred.dtype)
    labels = ops.reshape(ops.cast(y_true, "int32"), ops.shape(y_pred)[:-1])
    return ops.one_hot(labels, y_pred.shape[-1], dtype=y_pred.dtype)


# One number for a batch.


def dice(y_true: Any, y_pred: Any) -> Any:
    y_true, y_pred = _one_hot(y_true, y_pred), ops.sigmoid(y_pred)
    return 2 * ops.sum(y_true * y_pred) / (ops.sum(y_true) + ops.sum(y_pred))


def f1(y_true: Any, y_pred: Any) -> Any:
    y_true, y_pred = _one_hot(y_true, y_pred), ops.cast(y_pred > 0, y_pred.dtype)
    hits = ops.sum(y_true * y_pred)
    return 2 * hits / (2 * hits + ops.sum(ops.abs(y_true - y_pred)))


def rmse(y_true: Any, y_pred: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(_one_hot(y_true, y_pred) - y_pred)))


def largest(y_true: Any, y_pred: Any) -> Any:
    return ops.max(y_pred)


def average(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(y_pred)


# One value per row, of which each depends on all rows; and one that depends on its row alone.


def centred(y_true: Any, y_pred: Any) -> Any:
    return ops.max(ops.square(y_pred - ops.mean(y_pred, axis=0)), axis=-1)


def error(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(_one_hot(y_true, y_pred) - y_pred), axis=-1)


# Classes of users.


class Updates(keras.metrics.Metric):
    """How often it was updated."""

    def __init__(self, name: str = "updates") -> None:
        super().__init__(name=name)
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(1)

    def result(self) -> Any:
        return ops.cast(self.count, "float64")


class Last(keras.metrics.Mean):
    """The mean of the last batch."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.reset_state()
        super().update_state(ops.mean(y_pred))


class Rows(keras.metrics.Sum):
    """How many rows it saw."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(ops.ones_like(y_pred[..., 0]), sample_weight)


def _loss_object() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, name="loss_object")


def of_batches() -> list[Any]:
    """One number a batch, from functions and from a loss object.

    Keras itself takes no weights with these, and so no masks.
    """
    return [dice, f1, rmse, largest, average, _loss_object()]


def of_rows(prefix: str = "") -> list[Any]:
    """The other kinds."""
    wrapped = [
        keras.metrics.MeanMetricWrapper(function, name=f"{prefix}{function.__name__}")
        for function in (centred, error)
    ]
    own = [kind(name=f"{prefix}{kind.__name__.lower()}") for kind in (Updates, Last, Rows)]
    return [*wrapped, *own]


def streaming(prefix: str = "") -> list[Any]:
    """Keras's own, for labels of classes."""
    return [
        keras.metrics.SparseCategoricalAccuracy(name=f"{prefix}accuracy"),
        keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name=f"{prefix}entropy"),
    ]


def _mlp() -> Case:
    """All kinds of metrics, between Keras's own."""
    return dataclasses.replace(
        BY_NAME["mlp"],
        metrics=lambda: [streaming()[0], *of_batches(), *of_rows(), streaming()[1]],
    )


def _encoder() -> Case:
    return dataclasses.replace(BY_NAME["encoder"], metrics=lambda: [*of_rows(), *streaming()])


def _two_tower() -> Case:
    return dataclasses.replace(
        BY_NAME["two_tower"],
        metrics=lambda: {
            "rating": [dice, keras.metrics.MeanAbsoluteError(name="mae"), rmse, Updates()],
            "click": [average, keras.metrics.AUC(from_logits=True, name="auc"), "accuracy"],
        },
    )


CASES: Mapping[str, Case] = {
    "mlp": _mlp(),
    "encoder": _encoder(),
    "two_tower": _two_tower(),
}
WEIGHTED = Feature(
    name="weighted",
    sample_weight=True,
    compile=lambda case: {"weighted_metrics": [*of_rows("weighted_"), *streaming("weighted_")]},
)
FORMS: Mapping[str, Sequence[Feature]] = {
    "none": (),
    "weighted": (WEIGHTED,),
    "two_steps": (FEATURES["steps_per_execution"],),
    "eager": (FEATURES["run_eagerly"],),
}
MESHES: Mapping[str, Mapping[str, int]] = {
    "data4": {"data": 4},
    "data2_model2": {"data": 2, "model": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}


def _possible(name: str, mesh: str, form: str) -> bool:
    if "pipe" in mesh and form == "eager":
        return False
    # Weights of dict outputs have their own structure; kinds of weighted metrics are for labels.
    return not (name == "two_tower" and form == "weighted")


ROWS = [row for row in product(CASES, MESHES, FORMS) if _possible(*row)]


@pytest.mark.parametrize(
    ("name", "mesh", "form"),
    spread(
        ROWS,
        [
            ("mlp", "data4", "weighted"),
            ("two_tower", "data2_model2", "none"),
            ("mlp", "pipe2_data2", "weighted"),
        ],
    ),
)
def test_metric_of_each_kind_equals_one_device(
    name: str, mesh: str, form: str, engine: str
) -> None:
    config: dict[str, Any] = {}
    if "pipe" in mesh:
        config["pipeline"] = kdist.PipelineConfig(micro_batches=2)
    # The last batch does not divide, and leaves a replica without rows.
    compare(
        CASES[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS["sgd"],
        engine=engine,
        samples=19 if mesh == "data4" else 17,
        epochs=1,
        features=FORMS[form],
        config=config,
    )
