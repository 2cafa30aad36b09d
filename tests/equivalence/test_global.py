"""`batch_semantics="global"`: what couples rows sees the whole batch, as on one device."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import pytest

from .case import Case
from .coupled import LAYERS, NAMED, WITHOUT_BATCH, case
from .features import BY_NAME as FEATURES
from .harness import Run, compare, train, train_batches
from .matrix import LEVELS, level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .outcome import FLOAT64, EquivalenceError, check
from .test_ways import SIZES, sliced_over_data
from .whole_losses import BY_NAME as LOSSES
from .zoo import BY_NAME

MESHES = {"data4": {"data": 4}, "data2_model2": {"data": 2, "model": 2}}
PIPES = {
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}
GLOBAL = {"batch_semantics": "global"}


def _compare(what: Case, mesh: str, engine: str, **options: Any) -> None:
    # Batches of 8, 8 and 3 examples: one that does not divide, and is smaller than four replicas.
    settings = {"samples": 19, "epochs": 1, "config": GLOBAL, **options}
    compare(
        what,
        {**MESHES, **PIPES}[mesh],
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        reference="plain",
        **settings,
    )


@pytest.mark.parametrize(("name", "mesh"), spread(product(BY_NAME, MESHES), []))
def test_model_equals_one_device(name: str, mesh: str, engine: str) -> None:
    _compare(BY_NAME[name], mesh, engine, epochs=2)


# Layers in which rows meet ------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", spread(product(MESHES), [("data4",)]))
def test_all_that_users_meet_at_once(mesh: str, engine: str) -> None:
    _compare(case(*NAMED), mesh, engine)


@pytest.mark.parametrize(("name", "mesh"), spread(product(LAYERS, MESHES), []))
def test_layer_that_couples_rows_equals_one_device(name: str, mesh: str, engine: str) -> None:
    _compare(case(name), mesh, engine)


@pytest.mark.parametrize("name", spread(product(NAMED), [("contrastive",)]))
def test_replicas_apart_train_on_other_numbers(name: str) -> None:
    with pytest.raises(EquivalenceError, match="differ from the reference"):
        _compare(case(name), "data4", "kdist", config={})


@pytest.mark.parametrize("mesh", spread(product(MESHES), []))
def test_an_output_without_a_batch_dim(mesh: str, engine: str) -> None:
    _compare(WITHOUT_BATCH, mesh, engine)


@pytest.mark.parametrize(("name", "mesh"), spread(product(LOSSES, MESHES), []))
def test_loss_that_couples_rows(name: str, mesh: str, engine: str) -> None:
    _compare(LOSSES[name], mesh, engine)


# Optimizer parallelism and fusion -----------------------------------------------------------------

ZOO = ("mlp", "encoder", "resnet", "two_tower", "gpt_tied", "dlrm")
COMPOSED = (
    "gradient_accumulation",
    "global_clipnorm",
    "clipnorm",
    "constraint",
    "ema",
    "weight_decay_exclude",
    "kernel_regularizer",
    "loss_scale_factor",
    "three_steps_per_execution",
)


@pytest.mark.parametrize(
    ("name", "level", "mesh"),
    spread(product(ZOO, LEVELS[1:], MESHES), [("two_tower", "level1", "data2_model2")]),
)
def test_model_at_level_equals_one_device(name: str, level: str, mesh: str, engine: str) -> None:
    _compare(BY_NAME[name], mesh, engine, config={**GLOBAL, **level_config(level)})


@pytest.mark.parametrize(
    ("name", "level", "mesh"),
    spread(product(LAYERS, ("level1", "level3"), MESHES), [("batchnorm", "level3", "data4")]),
)
def test_layer_that_couples_rows_at_level(name: str, level: str, mesh: str, engine: str) -> None:
    _compare(case(name), mesh, engine, config={**GLOBAL, **level_config(level)})


@pytest.mark.parametrize(("level", "mesh"), spread(product(LEVELS, MESHES), []))
def test_synchronized_batchnorm_at_level(level: str, mesh: str, engine: str) -> None:
    features = (FEATURES["synchronized_batchnorm"],)
    _compare(BY_NAME["resnet"], mesh, engine, features=features, config=level_config(level))


@pytest.mark.parametrize(
    ("feature", "level", "mesh"), spread(product(COMPOSED, LEVELS, MESHES), [])
)
def test_level_composes(feature: str, level: str, mesh: str, engine: str) -> None:
    config = {**GLOBAL, **level_config(level)}
    _compare(
        case("contrastive", "batchnorm"), mesh, engine, features=(FEATURES[feature],), config=config
    )


@pytest.mark.parametrize(
    ("fusion", "level", "mesh"),
    spread(product(("none", "size", "index", "ids"), LEVELS[:4], MESHES), []),
)
def test_fusion(fusion: str, level: str, mesh: str, engine: str) -> None:
    options = {"size": {"size_mb": 1e-4}, "index": {"index": (2,)}}
    mode = "auto" if fusion == "ids" else fusion
    config = {**GLOBAL, **level_config(level)}
    config["fusion"] = kdist.FusionConfig(mode=mode, **options.get(fusion, {}))
    declare = _with_ids if fusion == "ids" else None
    _compare(case("contrastive", "batchnorm"), mesh, engine, config=config, declare=declare)


def _with_ids(model: keras.Model) -> None:
    for number, variable in enumerate(model.trainable_variables):
        kdist.set_comm_fusion(variable, number % 2 + 1)


# Pipelines ----------------------------------------------------------------------------------------

PIPED = ("mlp", "encoder", "resnet", "gpt_tied", "dlrm")


def _piped(what: Case, mesh: str, engine: str, level: str = "level0", **options: Any) -> None:
    pipeline = kdist.PipelineConfig(micro_batches=1)
    config = {**GLOBAL, "pipeline": pipeline, **level_config(level)}
    _compare(what, mesh, engine, config=config, **options)


@pytest.mark.parametrize(
    ("name", "level", "mesh"),
    spread(product(PIPED, LEVELS[:4], PIPES), [("resnet", "level1", "pipe2_data2")]),
)
def test_stages_of_replicas_that_compute_together(
    name: str, level: str, mesh: str, engine: str
) -> None:
    _piped(BY_NAME[name], mesh, engine, level)


@pytest.mark.parametrize(
    ("name", "level", "mesh"),
    spread(product(LAYERS, ("level0", "level3"), PIPES), [("experts", "level3", "pipe2_data2")]),
)
def test_layer_that_couples_rows_in_a_pipeline(
    name: str, level: str, mesh: str, engine: str
) -> None:
    _piped(case(name), mesh, engine, level)


@pytest.mark.parametrize(
    ("feature", "level", "mesh"),
    spread(product(COMPOSED, ("level1", "level3"), PIPES), []),
)
def test_pipelines_compose(feature: str, level: str, mesh: str, engine: str) -> None:
    _piped(case("contrastive", "batchnorm"), mesh, engine, level, features=(FEATURES[feature],))


@pytest.mark.parametrize(
    ("level", "mesh"), spread(product(LEVELS[:4], PIPES), [("level1", "pipe2_data2")])
)
def test_synchronized_batchnorm_sees_a_micro_batch_of_all_replicas(
    level: str, mesh: str, engine: str
) -> None:
    config = {"pipeline": kdist.PipelineConfig(micro_batches=2), **level_config(level)}
    options = {"optimizer": OPTIMIZERS["adam"], "samples": 19, "epochs": 1, "config": config}
    features = (FEATURES["synchronized_batchnorm"],)
    run = Run(case=BY_NAME["resnet"], mesh_axes=PIPES[mesh], features=features, **options)
    # One device that computes micro-batch after micro-batch of the whole batch.
    apart = Run(case=BY_NAME["resnet"], mesh_axes={"pipe": 2}, **options)
    check(train(apart, "parts"), train(run, engine), FLOAT64, (), title=run.title)


# Ways of training ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "name"),
    spread(
        [
            (feature.name, name)
            for feature in FEATURES.values()
            for name in ("mlp", "encoder", "resnet", "two_tower")
            if feature.fits(BY_NAME[name])
        ],
        [],
    ),
)
def test_feature_equals_one_device(feature: str, name: str, engine: str) -> None:
    _compare(BY_NAME[name], "data2_model2", engine, features=(FEATURES[feature],))


@pytest.mark.parametrize("way", ["run_eagerly", "three_steps_per_execution", "own_compute_loss"])
@pytest.mark.long
def test_ways_that_leave_dtensor_see_the_whole_batch_too(way: str, engine: str) -> None:
    _compare(case("contrastive"), "data4", engine, features=(FEATURES[way],))


@pytest.mark.parametrize(
    ("name", "mesh"), spread(product(("mlp", "encoder", "resnet"), MESHES), [])
)
def test_batches_of_many_sizes(name: str, mesh: str, engine: str) -> None:
    run = Run(
        case=BY_NAME[name],
        mesh_axes=MESHES[mesh],
        optimizer=OPTIMIZERS["sgd_momentum"],
        features=(FEATURES["sample_weight"],),
        config=GLOBAL,
    )
    expected = train_batches(run, "plain", SIZES)
    actual = train_batches(run, engine, SIZES)
    check(expected, actual, FLOAT64, run.case.zero_gradient_paths, title=run.title)


@pytest.mark.parametrize(
    ("name", "mesh"),
    spread(product(("mlp", "encoder", "resnet", "dlrm"), MESHES), [("dlrm", "data4")]),
)
def test_weights_sliced_over_data(name: str, mesh: str, engine: str) -> None:
    layouts = sliced_over_data(BY_NAME[name], MESHES[mesh])
    _compare(BY_NAME[name], mesh, engine, layout_map=layouts)


@pytest.mark.parametrize("level", ["level0", "level2"])
@pytest.mark.parametrize("dtype", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.long
def test_other_precision(dtype: str, level: str, engine: str) -> None:
    config = {**GLOBAL, **level_config(level)}
    _compare(BY_NAME["mlp"], "data2_model2", engine, dtype=dtype, config=config)
