"""Compressed gradients: equal to one device that compresses its parts' gradients in numpy."""

from __future__ import annotations

from typing import Any

import kdist
from kdist import CompressionConfig, FusionConfig, OptimizerConfig, PowerSGD

import keras
import numpy as np
import pytest
import tensorflow as tf

from .compressed_models import (
    GLOBALS,
    INPUTS,
    OPTIMIZERS,
    OUTPUTS,
    PARTS,
    PIPES,
    RULES,
    STORED_CUT,
    STORED_CUT_TWICE,
    WARM,
    adam,
    assert_equal,
    batches,
    build,
    loop,
    parallel,
    rule_of,
    sgd,
    train,
    weights,
)
from .compressed_reference import Reference
from .harness import precision
from .matrix import MESHES, product, spread

GRID = product(RULES, (0, 1, 2), ("sgd",), ("data4", "data2_model2"))
GRID += product(RULES, (3,), ("sgd",), ("data4", "data2_model2"))
GRID += product(RULES, (0, 1, 2, 3), ("sgd",), PIPES)
GRID += product(("bf16", "rank2"), (0, 1), ("scaled", "clipped", "accumulating"), PIPES)
GRID += product(("rank2",), (3,), ("scaled", "lamb", "accumulating"), ("data4", "data2_model2"))
GRID += product(RULES, (0, 1, 2, 3), ("sgd",), GLOBALS)
GRID += product(("bf16", "rank2"), (0, 1, 2), ("scaled", "clipped", "accumulating"), GLOBALS)
GRID += product(("bf16", "rank2"), (0, 1, 2), set(OPTIMIZERS) - {"sgd"}, ("data4", "data2_model2"))
DEFAULT = [
    ("rank2", 0, "clipped", "data4"),
    ("rank2", 1, "scaled", "data2_model2"),
    ("fp16", 0, "sgd", "data4"),
    ("bf16", 3, "sgd", "data4"),
    ("rank2", 3, "sgd", "data2_model2"),
    ("rank2", 1, "sgd", "pipe2_data2"),
    ("fp16", 0, "sgd", "pipe2_data2_model2"),
    ("rank2", 1, "sgd", "global_data2_model2"),
]


@pytest.mark.parametrize(("kind", "level", "name", "mesh"), spread(sorted(GRID), DEFAULT))
def test_equals_numpy(kind: str, level: int, name: str, mesh: str) -> None:
    config, rule = rule_of(RULES[kind])
    axes, make = {**MESHES, **PIPES, **GLOBALS}[mesh], OPTIMIZERS[name]
    with precision("float64"):
        model = parallel(
            axes,
            make(),
            config,
            optimizer=OptimizerConfig(level=level, threshold_kb=0),
            fusion=FusionConfig(mode="none"),
            batch_semantics="global" if mesh in GLOBALS else "replica",
        )
        # From level 1 on gradients are accumulated before they travel; at level 0 after it.
        local = name == "accumulating" and level > 0
        reference = Reference(
            model=build(),
            optimizer=sgd() if local else getattr(make(), "inner_optimizer", make()),
            accumulate=2 if local else 1,
            replicas=axes["data"],
            rule=rule,
            twice=level == 0,
            parts=PARTS if "model" in axes else {},
        )
        train(model, batches())
        for x, y in batches():
            reference.step(x, y)
    assert_equal(model, reference.model)


ODD = 13
"""Features that no number of replicas divides: they share columns of the first kernel."""


@pytest.mark.parametrize(
    ("kind", "level", "fusion", "mesh"),
    spread(
        product(RULES, (1, 2, 3), ("none", "size"), ("data4", "data2_model2")),
        [
            ("rank2", 1, "size", "data4"),
            ("fp16", 2, "size", "data2_model2"),
            ("rank2", 3, "none", "data4"),
            ("bf16", 3, "size", "data2_model2"),
        ],
        quick=1,
    ),
)
def test_columns_of_replicas_equal_numpy(kind: str, level: int, fusion: Any, mesh: str) -> None:
    config, rule = rule_of(RULES[kind])
    axes = MESHES[mesh]
    with precision("float64"):
        model = parallel(
            axes,
            sgd(),
            config,
            model=lambda: build(ODD),
            optimizer=OptimizerConfig(level=level, threshold_kb=0, partition="slice"),
            fusion=FusionConfig(mode=fusion, **({"size_mb": 1} if fusion == "size" else {})),
        )
        decided = {d.path.rpartition("up/")[2]: d for d in model.plan().decisions}
        assert (decided["kernel"].how, decided["kernel"].dim) == ("slice", 1)
        reference = Reference(
            model=build(ODD),
            optimizer=sgd(),
            replicas=axes["data"],
            rule=rule,
            twice=False,
            parts=PARTS if "model" in axes else {},
        )
        data = batches(inputs=ODD)
        train(model, data)
        for x, y in data:
            reference.step(x, y)
    assert_equal(model, reference.model)


ON_HOST = sorted(
    product(("fp16", "bf16"), (0, 3), ("sgd", "scaled", "lamb"), ("data4", "data2_model2", *PIPES))
)


@pytest.mark.parametrize(
    ("kind", "level", "name", "mesh"),
    spread(
        ON_HOST,
        [
            ("bf16", 0, "sgd", "data4"),
            ("fp16", 3, "scaled", "data2_model2"),
            ("fp16", 0, "sgd", "pipe2_data2"),
        ],
    ),
)
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.long)])
def test_gradients_travel_to_the_host_compressed(
    kind: str, level: int, name: str, mesh: str, fused: bool
) -> None:
    """The host adds in full precision; nothing travels between replicas, and values as they are."""
    config, rule = rule_of(RULES[kind])
    axes, make = {**MESHES, **PIPES}[mesh], OPTIMIZERS[name]
    with precision("float64"):
        model = parallel(
            axes,
            make(),
            config,
            optimizer=OptimizerConfig(level=level, threshold_kb=0, state_on="host"),
            fusion=FusionConfig(mode="auto" if fused else "none"),
        )
        reference = Reference(
            model=build(),
            optimizer=getattr(make(), "inner_optimizer", make()),
            replicas=axes["data"],
            rule=rule,
            twice=False,
            one_scale=fused,
            parts=PARTS if "model" in axes else {},
        )
        train(model, batches())
        for x, y in batches():
            reference.step(x, y)
    assert_equal(model, reference.model)


STORED = {
    "data4": (STORED_CUT, {}),
    "data2_model2": (STORED_CUT_TWICE, PARTS),
}


@pytest.mark.parametrize(
    ("kind", "level", "mesh"),
    spread(sorted(product(RULES, (0, 2, 3), STORED)), [("rank2", 0, "data2_model2")]),
)
def test_what_a_layout_stores_cut_over_data(kind: str, level: int, mesh: str) -> None:
    """Owners get their parts of a sum: rows of the first kernel, columns of the second."""
    config, rule = rule_of(RULES[kind])
    layouts, parts = STORED[mesh]
    if kind == "fp16":  # columns for different owners have scales of their own
        replicas = MESHES[mesh]["data"]
        parts = {**parts, "down/kernel": blocks(parts.get("down/kernel"), OUTPUTS, replicas)}
    with precision("float64"):
        options = OptimizerConfig(level=level, threshold_kb=0)
        model = parallel(MESHES[mesh], sgd(), config, layout_map=layouts, optimizer=options)
        reference = Reference(
            model=build(),
            optimizer=sgd(),
            replicas=MESHES[mesh]["data"],
            rule=rule,
            twice=False,
            parts=parts,
        )
        train(model, batches())
        for x, y in batches():
            reference.step(x, y)
    assert all(p.data_dim is not None for p in model.plan().weights if "kernel" in p.path)
    assert_equal(model, reference.model)


def shared() -> keras.Model:
    """One layer is called twice, on two stages."""
    keras.utils.set_random_seed(7)
    layers = keras.layers
    twice = layers.Dense(16, "tanh", name="twice")
    x = inputs = keras.Input((INPUTS,))
    x = layers.Dense(16, name="up")(x)
    x = layers.Dense(16, name="between")(twice(x))
    return keras.Model(inputs, layers.Dense(OUTPUTS, name="down")(twice(x)))


@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.long), 3])
def test_a_weight_that_two_stages_use(level: int) -> None:
    """It has a gradient on each stage; what low rank makes of them depends on their sum alone."""
    config, rule = rule_of(WARM)
    stages = {"up|twice": 0, "between|twice#1|down": 1}
    with precision("float64"):
        model = parallel(
            PIPES["pipe2_data2"],
            sgd(),
            config,
            model=shared,
            pipeline=kdist.PipelineConfig(micro_batches=2, stages=stages),
            optimizer=OptimizerConfig(level=level, threshold_kb=0),
        )
        reference = Reference(model=shared(), optimizer=sgd(), replicas=2, rule=rule, twice=False)
        train(model, batches())
        for x, y in batches():
            reference.step(x, y)
    assert {len(e.slices) for e in model.plan().exchanges} == {2, 4}
    assert_equal(model, reference.model)


def blocks(parts: Any, columns: int, count: int) -> list[tuple[slice, ...]]:
    """Each part, cut into blocks of columns."""
    size = columns // count
    return [
        (rows, slice(n * size, (n + 1) * size))
        for rows, _ in parts or [(slice(None), slice(None))]
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("kind", "level", "mesh"),
    spread(
        sorted(product(RULES, (0, 1, 3), ("data4", "data2_model2", *PIPES))),
        [("rank2", 0, "data4"), ("bf16", 3, "data2_model2")],
    ),
)
def test_own_loops(kind: str, level: int, mesh: str) -> None:
    """Gradients that `kdist.gradients` hands out have travelled compressed, once."""
    config, rule = rule_of(RULES[kind])
    axes = {**MESHES, **PIPES}[mesh]
    with precision("float64"):
        options = OptimizerConfig(level=level, threshold_kb=0)
        model = parallel(axes, sgd(), config, optimizer=options, fusion=FusionConfig(mode="none"))
        reference = Reference(
            model=build(),
            optimizer=sgd(),
            replicas=axes["data"],
            rule=rule,
            twice=level == 0,
            parts=PARTS if "model" in axes else {},
        )
        loop(model, batches())
        for x, y in batches():
            reference.step(x, y)
    assert_equal(model, reference.model)


@pytest.mark.parametrize("level", [0, pytest.param(2, marks=pytest.mark.long)])
def test_one_scale_for_what_travels_together(level: int) -> None:
    """The largest value counts, whoever has it, whichever gradient it is in.

    Gradients of one replica are 1e4 times those of the others, which a scale of theirs would make
    overflow. Those of one kernel are 1e6 times smaller than the other's: with a scale of its own
    less of them would be lost.
    """
    config, rule = rule_of("fp16")
    ((x, y),) = batches(steps=1)
    x, y = 1e-6 * x, np.concatenate([y[:-2], 1e4 * y[-2:]])
    with precision("float64"):
        model = parallel(
            {"data": 4},
            keras.optimizers.SGD(1.0),
            config,
            optimizer=OptimizerConfig(level=level, threshold_kb=0),
            fusion=FusionConfig(mode="size"),
        )
        reference = Reference(
            model=build(),
            optimizer=keras.optimizers.SGD(1.0),
            replicas=4,
            rule=rule,
            twice=level == 0,
            one_scale=True,
        )
        for one in (model, reference.model):
            one.layers[0].bias.assign(np.ones(16))  # or the other kernel's would be small, too
        train(model, [(x, y)])
        reference.step(x, y)
    assert len(model.plan().exchanges) == 1
    assert_equal(model, reference.model)


@pytest.mark.parametrize("level", [0, pytest.param(2, marks=pytest.mark.long)])
def test_no_class_changes_no_bit(level: int) -> None:
    # Sums on a GPU are in no fixed order.
    rounding = 1e-12 if tf.config.list_logical_devices("GPU") else 0.0
    config = CompressionConfig(rest="none")
    losses = []
    with precision("float64"):
        for one in (None, config):
            model = parallel(
                {"data": 2}, adam(), one, optimizer=OptimizerConfig(level=level, threshold_kb=0)
            )
            losses.append((train(model, batches()), weights(model)))
    np.testing.assert_allclose(losses[0][0], losses[1][0], rtol=rounding)
    for a, b in zip(losses[0][1].values(), losses[1][1].values()):
        np.testing.assert_allclose(a, b, rtol=rounding)


def test_a_rank_that_holds_the_gradient_is_exact() -> None:
    """A gradient of a dense layer has at most the rank of its batch."""
    config, _ = rule_of(PowerSGD(rank=4))
    with precision("float64"):
        models = [parallel({"data": 4}, sgd(), one) for one in (None, config)]
        for model in models:
            train(model, batches(rows=4))
    assert_equal(*models)
    assert all(isinstance(e.compressor, PowerSGD) for e in models[1].plan().exchanges)
