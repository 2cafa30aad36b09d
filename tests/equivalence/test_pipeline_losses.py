"""Losses over the whole batch, models run op by op, and penalties of outputs, in pipelines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import pytest

from .case import CLASSES, Case
from .features import BY_NAME as FEATURES
from .harness import compare
from .matrix import product, spread
from .optimizer_zoo import OPTIMIZERS
from .test_pipeline import CASES, pipeline
from .whole_losses import BY_NAME
from .zoo import MLP

MESHES: Mapping[str, Mapping[str, int]] = {
    "pipe2": {"pipe": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}
# Losses that couple rows, with masks, of one output of two, unreduced; and losses of a model's own,
# with a head of weights and state, with weights of stages, with tables that stages look up.
NAMES = (
    "dice",
    "unreduced",
    "masked",
    "one_of_two",
    "kernel_penalty",
    "projection",
    "shared_centres",
    "dense_centres",
)
DEFAULT = [("projection", "pipe2_data2"), ("dense_centres", "pipe2_data2_model2")]


def _run(name: str | Case, mesh: str, engine: str, schedule: str = "auto", **options: Any) -> None:
    """Neither replicas nor micro-batches divide a batch, and the last one is smaller."""
    compare(
        name if isinstance(name, Case) else BY_NAME.get(name) or CASES[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        batch_size=10,
        samples=17,
        config={"pipeline": pipeline(micro_batches=3, schedule=schedule)},
        **options,
    )


@pytest.mark.parametrize(("name", "mesh"), spread(product(NAMES, MESHES), DEFAULT))
def test_loss_equals_one_device(name: str, mesh: str, engine: str) -> None:
    _run(name, mesh, engine)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "feature",
    ["sample_weight", "add_loss", "activity_regularizer", "kernel_regularizer", "global_clipnorm"],
)
def test_features(feature: str, mesh: str, engine: str) -> None:
    _run("dice", mesh, engine, features=(FEATURES[feature],))


@pytest.mark.parametrize(
    ("name", "mesh", "schedule"),
    spread(
        [
            ("gpt_tied", "pipe2", "1f1b"),
            ("encoder", "pipe2_data2", "zero_bubble"),
            ("recurrent", "pipe2_data2", "1f1b"),
            ("dice", "pipe2_data2", "auto"),
            ("projection", "pipe2_data2", "auto"),
            ("mlp", "pipe2_data2_model2", "1f1b"),
            ("resnet", "pipe2_data2", "gpipe"),
        ],
        [("mlp", "pipe2_data2_model2", "1f1b")],
    ),
)
def test_operation_by_operation(name: str, mesh: str, schedule: str, engine: str) -> None:
    _run(name, mesh, engine, features=(FEATURES["run_eagerly"],), schedule=schedule)


def _regularized() -> keras.Model:
    """A Sequential: Keras itself takes no such penalty of a Functional model."""
    dense = [
        keras.layers.Dense(8, activation="tanh", name="up"),
        keras.layers.Dense(CLASSES, name="down"),
    ]
    model = keras.Sequential([keras.Input((12,)), *dense], name="regularized")
    model.activity_regularizer = keras.regularizers.L2(0.05)
    return model


REGULARIZED = {
    "compiled": dataclasses.replace(MLP, name="regularized", build=_regularized),
    "dice": dataclasses.replace(BY_NAME["dice"], build=_regularized, name="regularized_dice"),
}


@pytest.mark.parametrize(
    ("name", "mesh"), spread(product(REGULARIZED, MESHES), [("compiled", "pipe2_data2")])
)
def test_an_activity_regularizer_of_the_model_itself(name: str, mesh: str, engine: str) -> None:
    _run(REGULARIZED[name], mesh, engine)


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_micro_batches(rows: int, engine: str) -> None:
    compare(
        BY_NAME["dice"],
        {"pipe": 2, "data": 2},
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        samples=rows,
        config={"pipeline": pipeline(micro_batches=4)},
    )
