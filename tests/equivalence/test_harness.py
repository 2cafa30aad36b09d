"""The harness's own parts, checked without kdist."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from .attention_models import valid_tokens
from .case import Case
from .features import BY_NAME as FEATURES
from .harness import Run, build, compare, precision, slot_names, train
from .optimizer_zoo import OPTIMIZERS
from .pairwise import cover
from .reference import part_sizes, reference_parts
from .undecided import with_undecided
from .zoo import BY_NAME, ZOO


@pytest.mark.parametrize(
    ("examples", "parts", "sizes"),
    [
        (13, 8, [2, 2, 2, 2, 2, 1, 1, 1]),
        (8, 4, [2, 2, 2, 2]),
        (3, 4, [1, 1, 1, 0]),
        (5, 1, [5]),
        (0, 2, [0, 0]),
    ],
)
def test_part_sizes(examples: int, parts: int, sizes: list[int]) -> None:
    assert part_sizes(examples, parts) == sizes


@pytest.mark.parametrize("name", ["encoder", "two_tower"])
def test_parts_equal_the_whole_without_batchnorm(name: str) -> None:
    # Two programs written apart from each other agree: the yardstick is not kdist's own.
    compare(
        BY_NAME[name],
        {"data": 4},
        optimizer=OPTIMIZERS["adam"],
        engine="parts",
        reference="plain",
        samples=13,
        # Eagerly: in a graph, where the batch size is unknown, Keras averages the losses of single
        # outputs over batches without weights, and the parts always run eagerly.
        features=tuple(
            FEATURES[name] for name in ("sample_weight", "activity_regularizer", "run_eagerly")
        ),
    )


def test_one_part_with_batchnorm_equals_keras() -> None:
    compare(
        BY_NAME["resnet"],
        {"data": 1},
        optimizer=OPTIMIZERS["adam"],
        engine="parts",
        reference="plain",
        features=(FEATURES["add_loss"], FEATURES["kernel_regularizer"]),
    )


def test_moving_statistics_are_the_mean_over_nonempty_parts() -> None:
    with precision("float64"):
        keras.backend.clear_session()
        norm = keras.layers.BatchNormalization(momentum=0.5, name="norm")
        model = keras.Sequential([keras.Input((1,)), norm])
        model.compile("sgd", "mse", run_eagerly=True)
        x = np.array([[1.0], [3.0], [10.0]])
        reference_parts(model, 4).train_on_batch(x, x)
        # Four parts of three rows: 1, 3, 10 and nothing. Each starts from a mean of 0.
        assert float(norm.moving_mean.numpy()[0]) == pytest.approx(0.5 * (1 + 3 + 10) / 3)
        assert float(norm.moving_variance.numpy()[0]) == pytest.approx(0.5)


def test_parts_reject_what_they_do_not_know() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="weighting='median'"):
        reference_parts(model, 2, weighting="median")
    with pytest.raises(ValueError, match="parts=0"):
        reference_parts(model, 0)


@pytest.mark.parametrize("dtype", ["float64", "float32", "mixed_float16", "mixed_bfloat16"])
def test_precision_reaches_the_layers_and_ends(dtype: str) -> None:
    before = keras.config.dtype_policy().name
    with precision(dtype):
        assert build(BY_NAME["mlp"]).layers[1].dtype_policy.name == dtype
    assert keras.config.dtype_policy().name == before


def test_reference_of_schedule_free_starts_from_the_weights() -> None:
    # Plain Keras 3.15 loses the weights when `fit` builds this optimizer; the harness builds it.
    run = Run(case=BY_NAME["mlp"], mesh_axes={}, optimizer=OPTIMIZERS["schedule_free_adamw"])
    with precision("float64"):
        start = build(run.case).get_layer("up").kernel.numpy()
    moved = train(run, "plain").weights["up/kernel"] - start
    assert 0 < np.abs(moved).max() < 0.1


def test_examples_that_rounding_decides_are_counted() -> None:
    metrics = {
        "classes": [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        "click": [keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
        "rating": [keras.metrics.MeanAbsoluteError()],
    }
    found = with_undecided(metrics, eps=2.0**-10)
    assert [[m.name for m in each] for each in found.values()] == [
        ["accuracy", "undecided"],
        ["accuracy", "undecided"],
        ["mean_absolute_error"],
    ]
    # The largest logit is 4, so that two of them move by 2 * 2 runs * 2 eps * 4 = 0.031.
    logits = np.array([[4.0, 3.98, 0.0], [4.0, 3.96, 0.0], [-4.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    classes = found["classes"][1]
    classes.update_state(np.zeros(4), logits)
    assert float(classes.result()) == 0.5
    classes.reset_state()
    classes.update_state(np.zeros(4), logits, sample_weight=[1.0, 1.0, 0.0, 0.0])
    assert float(classes.result()) == 0.5
    click = found["click"][1]
    click.update_state(np.zeros((4, 1)), np.array([[4.0], [0.01], [-0.01], [0.02]]))
    assert float(click.result()) == 0.5


def test_adafactor_slots_tell_parameter_and_kind() -> None:
    optimizer = keras.optimizers.Adafactor()
    dense = keras.layers.Dense(3, name="up")
    dense.build((None, 2))
    optimizer.build(dense.trainable_variables)
    assert slot_names([v.path for v in optimizer.variables]) == [
        "0/adafactor/iteration",
        "1/adafactor/learning_rate",
        "2/adafactor/up_kernel_row",
        "3/adafactor/up_kernel_column",
        "4/adafactor/up_kernel_velocity",
        "5/adafactor/up_bias_row",  # of a vector Keras keeps an empty one
        "6/adafactor/up_bias_column",
        "7/adafactor/up_bias_velocity",
    ]


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_case_is_sound(case: Case) -> None:
    with precision("float64"):
        first = build(case).get_weights()
        model = build(case)
        for a, b in zip(first, model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        paths = {variable.path: variable for variable in model.trainable_variables}
        for pattern, layout in case.layout_map.items():
            hit = [v for path, v in paths.items() if re.fullmatch(pattern, path)]
            assert hit, f"{pattern} matches no variable of {case.name}"
            for variable in hit:
                assert len(layout) == len(variable.shape), variable.path
                for size, axis in zip(variable.shape, layout, strict=True):
                    assert axis is None or size % 4 == 0, variable.path
        _check_gradients(case, model, paths)


def _check_gradients(case: Case, model: keras.Model, paths: dict[str, Any]) -> None:
    """True gradients are zero exactly where the case says."""
    x, y, _ = case.data(0, 8)
    model.compile("sgd", case.loss("sum_over_batch_size"), loss_weights=case.loss_weights)
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    gradients = tape.gradient(loss, [v.value for v in paths.values()])
    for path, gradient in zip(paths, gradients, strict=True):
        size = float(tf.reduce_max(tf.abs(tf.convert_to_tensor(gradient))))
        zero = any(re.fullmatch(pattern, path) for pattern in case.zero_gradient_paths)
        assert (size < 1e-15) if zero else (size > 1e-7), (path, size)


def test_encoder_batches_hold_unequal_counts_of_valid_tokens() -> None:
    x, _, _ = BY_NAME["encoder"].data(0, 16)
    counts = valid_tokens(x)
    quarters = {int(counts[i : i + 4].sum()) for i in range(0, 16, 4)}
    assert len(quarters) == 4


def test_cover_covers_and_is_small() -> None:
    factors = {"a": range(4), "b": range(4), "c": range(3), "d": range(2)}
    rows = cover(factors, lambda row: not (row.get("a") == 0 and row.get("b") == 0))
    assert not any(row["a"] == 0 and row["b"] == 0 for row in rows)
    seen = {(row["a"], row["b"]) for row in rows}
    assert len(seen) == 15
    assert len(rows) <= 24
