"""Losses that replicas cannot compute part by part equal one device."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import pytest

from .features import BY_NAME as FEATURES
from .harness import Run, compare, train_batches
from .matrix import MESHES, product, spread
from .optimizer_zoo import OPTIMIZERS
from .outcome import FLOAT64, check
from .test_levels import config
from .whole_losses import BY_NAME, COUPLED, WEIGHTED

# Examples and batch size: parts of one size; parts that differ, and a batch with less rows than
# replicas.
SIZES = {"even": (16, 8), "ragged": (13, 5)}

DEFAULT = [
    ("dice", "data4", "ragged"),
    ("circle", "data4", "even"),
    ("one_of_two", "data2_model2", "ragged"),
    ("projection", "data4", "ragged"),
    ("same_output_twice", "data4", "even"),
    ("own_call_of_the_model", "data2_model2", "ragged"),
]
DEFAULT_LEVELS = [
    ("centres", 2, "data4"),
    ("kernel_penalty", 3, "data2_model2"),
    ("own_call_of_the_model", 3, "data2_model2"),
]
DEFAULT_FEATURES = [("unreduced", "sample_weight", "data4")]


def _run(name: str, mesh: str, sizes: str, engine: str, **options: Any) -> None:
    samples, batch_size = SIZES[sizes]
    options.setdefault("optimizer", OPTIMIZERS["adam"])
    compare(
        BY_NAME[name],
        MESHES[mesh],
        engine=engine,
        samples=samples,
        batch_size=batch_size,
        **options,
    )


@pytest.mark.parametrize(
    ("name", "mesh", "sizes"), spread(product(BY_NAME, ("data4", "data2_model2"), SIZES), DEFAULT)
)
def test_loss_equals_one_device(name: str, mesh: str, sizes: str, engine: str) -> None:
    _run(name, mesh, sizes, engine)


@pytest.mark.parametrize(
    ("name", "level", "mesh"),
    spread(
        product([*(case.name for case in WEIGHTED), "dice"], (1, 2, 3), ("data4", "data2_model2")),
        DEFAULT_LEVELS,
    ),
)
def test_loss_at_every_level(name: str, level: int, mesh: str, engine: str) -> None:
    _run(name, mesh, "ragged", engine, config=config(level))


def recomputed(level: int, **options: Any) -> dict[str, Any]:
    return {**config(level), "recompute": kdist.RecomputeConfig(layers=[".*"], **options)}


CHUNKED = {
    "recompute": recomputed(0),
    "selective_at_level_1": recomputed(1, policy="selective"),
    "recompute_at_level_3": recomputed(3),
    "kept_at_level_3": config(3, keep_gathered=True),
    "in_no_chunks": {"fusion": kdist.FusionConfig(overlap=False)},
}
DEFAULT_CHUNKED = [("centres", "recompute_at_level_3", "data2_model2")]


@pytest.mark.parametrize(
    ("name", "chunks", "mesh"),
    spread(
        product(
            ("dice", "centres", "own_call_of_the_model", "kernel_penalty", "one_of_two"),
            CHUNKED,
            ("data4", "data2_model2"),
        ),
        DEFAULT_CHUNKED,
    ),
)
def test_loss_between_chunks(name: str, chunks: str, mesh: str, engine: str) -> None:
    """Its gradients come in between the passes, of which one may be repeated by the other."""
    _run(name, mesh, "ragged", engine, config=CHUNKED[chunks])


@pytest.mark.parametrize(
    ("name", "mesh"),
    spread(product(("dice", "unreduced", "one_of_two", "masked"), ("data4", "data2_model2")), []),
)
def test_batches_of_many_sizes(name: str, mesh: str, engine: str) -> None:
    """`train_on_batch`, whose batches have a known size: Keras counts losses of outputs by it."""
    run = Run(case=BY_NAME[name], mesh_axes=MESHES[mesh], optimizer=OPTIMIZERS["sgd_momentum"])
    expected, actual = (train_batches(run, e, (8, 5, 3, 13)) for e in ("plain", engine))
    check(expected, actual, FLOAT64, run.case.zero_gradient_paths, title=run.title)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dice", "unreduced", "centres", "projection"])
def test_xla_computes_the_same(name: str, engine: str) -> None:
    _run(name, "data4", "even", engine, compile={"jit_compile": True})


@pytest.mark.long
@pytest.mark.parametrize("name", ["circle", "one_number"])
def test_class_weights(name: str, engine: str) -> None:
    _run(name, "data4", "ragged", engine, features=[FEATURES["class_weight"]])


COMPOSED = (
    "sample_weight",
    "reduction_sum",
    "mean_with_sample_weight",
    "add_loss",
    "kernel_regularizer",
    "activity_regularizer",
    "gradient_accumulation",
    "global_clipnorm",
    "steps_per_execution",
    "run_eagerly",
)
# Keras itself cannot add a vector of losses and a number.
NO_MEANING = product(["unreduced"], ["add_loss", "kernel_regularizer", "activity_regularizer"])


@pytest.mark.parametrize(
    ("name", "feature", "mesh"),
    spread(
        [
            row
            for row in product(
                ("dice", "root_mean_square", "unreduced", "one_of_two", "shared_centres"),
                COMPOSED,
                ("data4", "data2_model2"),
            )
            if row[:2] not in NO_MEANING
        ],
        DEFAULT_FEATURES,
    ),
)
def test_loss_composes(name: str, feature: str, mesh: str, engine: str) -> None:
    _run(name, mesh, "ragged", engine, features=[FEATURES[feature]])


@pytest.mark.long
@pytest.mark.parametrize("name", [case.name for case in (*COUPLED, *WEIGHTED)])
@pytest.mark.parametrize("dtype", ["float64", "mixed_float16", "mixed_bfloat16"])
def test_loss_with_a_loss_scale(name: str, dtype: str, engine: str) -> None:
    def optimizer(**options: Any) -> keras.optimizers.Optimizer:
        return keras.optimizers.LossScaleOptimizer(OPTIMIZERS["adam"](**options), 256.0)

    _run(name, "data4", "even", engine, optimizer=optimizer, dtype=dtype)
