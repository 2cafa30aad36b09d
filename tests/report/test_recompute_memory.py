"""What recompute saves, and which communication it repeats, counted in executed steps."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.dtensor.collectives import COLLECTIVES
from kdist.graphs.layer_names import BACKWARD

import keras
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import gpt_model

BLOCKS = [r"block_(\d+)_.*"]
ROWS = 8


def trained(
    depth: int, axes: dict[str, int], sequence: bool = False, **options: Any
) -> keras.Model:
    """A GPT that has made one step; `sequence`: cut along the sequence, too."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    sizes = gpt_model.GPTSizes(vocabulary=64, length=32, width=32, depth=depth)
    layouts = gpt_model.layout_map() if "model" in axes else None
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes), layout_map=layouts, sequence_parallel=sequence, **options
    )
    model = kdist.parallelize(gpt_model.build(sizes), config)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = np.zeros((ROWS, sizes.length), np.int32)
    model.train_on_batch(tokens, tokens)
    return model


def peak(model: keras.Model) -> int:
    """Activations on the device that has the most."""
    found = [one.activations for one in kdist.inspect(model, ROWS).memory]
    assert None not in found
    return max(found)  # type: ignore[type-var]


def again(**options: Any) -> kdist.RecomputeConfig:
    return kdist.RecomputeConfig(layers=BLOCKS, **options)


@functools.cache
def between(
    depth: int, pipeline: Any = None, level: int = 0, sequence: bool = False, **axes: int
) -> tuple[int, int]:
    """The peaks without recompute and with all of it."""
    options = with_level(pipeline, level) | {"sequence": sequence}
    whole = trained(depth, axes, **options)
    return peak(whole), peak(trained(depth, axes, recompute=again(), **options))


def with_level(pipeline: Any, level: int) -> dict[str, Any]:
    """Options of the configuration."""
    spread = kdist.OptimizerConfig(level=level, threshold_kb=0)
    return {"pipeline": pipeline, "optimizer": spread}


DATA, INNER = {"data": 2}, {"data": 2, "model": 2}


@pytest.mark.parametrize(
    ("depth", "axes", "share"),
    [
        (3, DATA, 0.5),
        (3, {"model": 2}, 0.5),
        pytest.param(3, INNER, 0.5, marks=pytest.mark.long),
        pytest.param(12, DATA, 1 / 3, marks=pytest.mark.long),
        pytest.param(12, INNER, 1 / 3, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_blocks_are_there_one_at_a_time(depth: int, axes: dict[str, int], share: float) -> None:
    none, full = between(depth, **axes)
    assert full <= share * none


STAGED = {"pipe": 2, "pipeline": kdist.PipelineConfig(micro_batches=4)}
HALVES = {"pipe": 2, "pipeline": kdist.PipelineConfig(micro_batches=4, schedule="zero_bubble")}
CHUNKS = {
    "pipe": 2,
    "pipeline": kdist.PipelineConfig(micro_batches=4, schedule="interleaved", chunks=2),
}
ALL = tuple(range(1, 11))


@pytest.mark.parametrize(
    ("depth", "where", "tenths"),
    [
        (3, DATA, (2, 6)),
        pytest.param(12, DATA, ALL, marks=pytest.mark.long),
        pytest.param(4, INNER, ALL, marks=pytest.mark.long),
        pytest.param(3, {"model": 2, "sequence": True}, (2, 6), marks=pytest.mark.wide),
        pytest.param(4, {**INNER, "sequence": True}, ALL, marks=pytest.mark.long),
        pytest.param(4, STAGED, ALL, marks=pytest.mark.long),
        pytest.param(4, HALVES, ALL, marks=pytest.mark.long),
        pytest.param(4, CHUNKS, ALL, marks=pytest.mark.long),
        pytest.param(4, {"model": 2, **STAGED}, ALL, marks=pytest.mark.long),
        pytest.param(4, {"model": 2, **HALVES}, ALL, marks=pytest.mark.long),
        pytest.param(4, {"model": 2, **CHUNKS}, ALL[::3], marks=pytest.mark.long),
        pytest.param(4, {**DATA, "level": 3}, ALL, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_budget_holds(depth: int, where: dict[str, Any], tenths: tuple[int, ...]) -> None:
    """In the executed step, and more of it never repeats more."""
    none, full = between(depth, **where)
    axes = {k: v for k, v in where.items() if k not in ("pipeline", "level", "sequence")}
    options = with_level(where.get("pipeline"), where.get("level", 0))
    options["sequence"] = where.get("sequence", False)
    times = []
    for tenth in tenths:
        budget = full + (none - full) * tenth / 10
        config = again(policy="budget", budget_mb=budget / 2**20)
        model = trained(depth, axes, recompute=config, **options)
        assert peak(model) <= budget, tenth
        choices = attached(model).choices
        assert all(str(one) in "".join(model.plan().notes) for one in choices.values())
        assert all(one.peak <= budget for one in choices.values())
        times.append([one.repeated for one in choices.values()])
    assert all(a >= b for before, after in zip(times, times[1:]) for a, b in zip(before, after))
    assert 0 < sum(times[0]) < sum(one.seconds for one in choices.values())


@pytest.mark.parametrize("axes", [{"data": 1}, {"model": 2}, {"pipe": 2}], ids=str)
def test_a_budget_that_nothing_fits(axes: dict[str, int]) -> None:
    options = {"pipeline": kdist.PipelineConfig(micro_batches=2)} if "pipe" in axes else {}
    least = r"need (\d\.\d+) MB on a device.*Give budget_mb at least"
    with pytest.raises(ValueError, match=least) as error:
        trained(2, axes, recompute=again(policy="budget", budget_mb=0.01), **options)
    needed = float(re.search(least, str(error.value))[1])  # type: ignore[index]
    just = trained(2, axes, recompute=again(policy="budget", budget_mb=needed), **options)
    assert 0.85 * needed <= peak(just) / 2**20 <= needed
    short = again(policy="budget", budget_mb=0.99 * needed)
    with pytest.raises(ValueError, match=least):
        trained(2, axes, recompute=short, **options)


@pytest.mark.long
@pytest.mark.parametrize("axes", [DATA, INNER], ids=str)
def test_cheap_operations_alone(axes: dict[str, int]) -> None:
    whole = peak(trained(12, axes))
    selective = trained(12, axes, recompute=again(policy="selective"))
    assert peak(selective) <= 2 / 3 * whole


def repeated(model: keras.Model) -> Counter:
    """The types of the nodes that a step over inner axes repeats."""
    found: Counter = Counter()
    for one in attached(model).mesh_step.runner.chunks._programs.values():  # type: ignore[union-attr]
        stitcher = one.stitcher
        names = (n for n in stitcher.live if n in stitcher.originals)
        found.update(stitcher.nodes[n].op for n in names)
    return found


@pytest.mark.parametrize(("comm", "each"), [(True, 1), (False, 0)])
def test_collectives_of_inner_axes_are_repeated_or_kept(comm: bool, each: int) -> None:
    """Of a block's two sums the second makes its output, which is kept in any case."""
    depth = 2
    config = again(mp_comm_recompute=comm)
    model = trained(depth, {"model": 2}, recompute=config)
    found = repeated(model)
    listed = Counter(one.node for one in kdist.inspect(model).collectives)
    assert sum(n - 1 for n in listed.values()) == each * depth
    assert sum(n for op, n in found.items() if op in COLLECTIVES) == each * depth
    assert found["Softmax"] == depth


def stage_sums(model: keras.Model) -> list[int]:
    """Collectives of the forward pass of blocks that a stage's backward function has."""
    found = []
    for functions in attached(model).mesh_step.runner.programs._traced.values():  # type: ignore[union-attr]
        for one in functions:
            names = set().union(*(part.communicating() for part in one.parts[1:]))
            found.append(sum("kdist_block" in n and BACKWARD not in n for n in names))
    return found


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({"mp_comm_recompute": False}, 0),
        pytest.param({}, 1, marks=pytest.mark.long),
        pytest.param({"policy": "selective"}, 0, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_collectives_in_stages_are_repeated_or_kept(options: dict[str, Any], each: int) -> None:
    pipeline = kdist.PipelineConfig(micro_batches=2)
    axes = {"pipe": 2, "model": 2}
    model = trained(2, axes, pipeline=pipeline, recompute=again(**options))
    assert stage_sums(model) == [each, each]


@pytest.mark.parametrize(("keep", "comm"), [(False, None), (False, False), (True, True)])
def test_gathered_parameters_are_freed_or_kept(keep: bool, comm: bool | None) -> None:
    """A layer's own setting wins over `keep_gathered`; kernels of blocks are used backwards too."""
    spread = kdist.OptimizerConfig(level=3, threshold_kb=0, keep_gathered=keep)
    config = again(parallel_optimizer_comm_recompute=comm)
    model = trained(2, DATA, recompute=config, optimizer=spread)
    gathers = Counter(i for gather in model.plan().gathers for i in gather.weights)
    wanted = 2 if (comm if comm is not None else not keep) else 1
    variables = enumerate(model.trainable_variables)
    kernels = [i for i, v in variables if "block_0" in v.path and v.name == "kernel"]
    assert len(kernels) == 6
    assert {gathers[i] for i in kernels} == {wanted}


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2}, {"data": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("overlap", [True, False])
def test_activations_are_seen_inside_programs(axes: dict[str, int], overlap: bool) -> None:
    """TensorFlow may make variants of a program, which take and return less."""
    wide, rows = 256, 16
    model = keras.Sequential([keras.Input((8,)), *map(keras.layers.Dense, (wide, 4))])
    fusion = kdist.FusionConfig(overlap=overlap)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), fusion=fusion))
    model.compile("sgd", "mse")
    x, y = np.zeros((rows, 8), "float32"), np.zeros((rows, 4), "float32")
    model.train_on_batch(x, y)
    hidden = rows // axes["data"] * wide * 4
    found = [one.activations for one in kdist.inspect(model, rows).memory]
    assert all(n is not None for n in found)
    assert hidden <= max(found) <= 4 * hidden


STAGES = kdist.PipelineConfig(micro_batches=2)


@pytest.fixture
def all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow optimizes steps as it does on GPUs."""
    monkeypatch.setattr("kdist.graphs.instantiation._WITHOUT_GAIN", {})


def activations_of_stages(keep: bool) -> None:
    model = trained(1, {"pipe": 2}, pipeline=STAGES, recompute=None if keep else again())
    inspection = kdist.inspect(model, ROWS)
    # An output of the block, or what it is given, of one micro-batch.
    assert all((one.activations or 0) > ROWS / 2 * 32 * 32 * 4 for one in inspection.memory)
    assert not inspection.closed


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "again"])
def test_activations_of_stages_are_seen(keep: bool) -> None:
    activations_of_stages(keep)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "again"])
def test_activations_of_stages_are_seen_in_variants(keep: bool, all_passes: None) -> None:
    """TensorFlow puts what it knows of micro-batches into variants of the stages' functions."""
    activations_of_stages(keep)


def test_why_activations_are_not_seen(all_passes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdist.report.step_graph.is_folded", lambda tensor: False)
    inspection = kdist.inspect(trained(1, {"pipe": 2}, pipeline=STAGES), ROWS)
    assert {one.activations for one in inspection.memory} == {None}
    assert "variants of 4 functions" in inspection.closed
    assert f"activations not counted: {inspection.closed}" in str(inspection)


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}], ids=str)
def test_each_layer_says_whether_what_a_layout_cuts_over_data_is_gathered_again(
    axes: dict[str, int],
) -> None:
    """Counted from the plan of a step that was made: twice with True, once with False."""
    x = inputs = keras.Input((8,))
    for name in ("first", "again", "kept"):
        x = keras.layers.Dense(8, "gelu", name=name)(x)
    model = keras.Model(inputs, keras.layers.Dense(4, name="head")(x))
    kdist.recompute(model.get_layer("again"), parallel_optimizer_comm_recompute=True)
    kdist.recompute(model.get_layer("kept"), parallel_optimizer_comm_recompute=False)
    layouts = {"(again|kept)/kernel": ("data", None)}
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layouts)
    kdist.parallelize(model, config).compile("sgd", "mse")
    model.train_on_batch(np.ones((ROWS, 8)), np.ones((ROWS, 4)))
    gathers = Counter(i for gather in model.plan().gathers for i in gather.weights)
    paths = [v.path for v in model.trainable_variables]
    assert {paths[i]: n for i, n in gathers.items()} == {"again/kernel": 2, "kept/kernel": 1}


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("keep", [False, True])
def test_each_layer_says_whether_what_level_3_cuts_is_gathered_again(
    keep: bool, axes: dict[str, int]
) -> None:
    """A weight is gathered once, and again if it is freed and a backward pass looks at it.

    That looks at kernels, but for the first one, and at all that a block repeats; never in the last
    chunk, which it begins with.
    """
    x = inputs = keras.Input((8,))
    for name in ("first", "again", "kept", "other"):
        x = keras.layers.Dense(8, "gelu", name=name)(x)
    model = keras.Model(inputs, keras.layers.Dense(4, name="head")(x))
    kdist.recompute(model.get_layer("again"), parallel_optimizer_comm_recompute=True)
    kdist.recompute(model.get_layer("kept"), parallel_optimizer_comm_recompute=False)
    spread = kdist.OptimizerConfig(level=3, threshold_kb=0, keep_gathered=keep)
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), optimizer=spread)
    kdist.parallelize(model, config).compile("sgd", "mse")
    model.train_on_batch(np.ones((ROWS, 8)), np.ones((ROWS, 4)))
    gathers = Counter(i for gather in model.plan().gathers for i in gather.weights)
    freed = {"again/kernel", "again/bias"} | (set() if keep else {"other/kernel"})
    wanted = {v.path: 1 + (v.path in freed) for v in model.trainable_variables}
    paths = [v.path for v in model.trainable_variables]
    assert {paths[i]: n for i, n in gathers.items()} == wanted


def pair(x: Any, name: str, activation: str | None = None) -> Any:
    """Two products, cut by columns and by rows: one sum, which makes its output."""
    up = keras.layers.Dense(16, "gelu", name=f"{name}_up")
    return keras.layers.Dense(8, activation, name=f"{name}_down")(up(x))


def normed(x: Any, name: str) -> Any:
    return keras.layers.LayerNormalization(name=f"{name}_norm")(pair(x, name))


KINDS = {
    # A sum that is the block's output is kept, and one that is only added to is not looked at.
    "pair": (1, 0, pair),
    "added": (1, 0, lambda x, n: keras.layers.Add(name=f"{n}_add")([x, pair(x, f"{n}_a")])),
    # What a norm, an activation or a product in the block takes, the backward pass needs.
    "normed": (1, 1, normed),
    "activated": (1, 1, lambda x, n: pair(x, n, "gelu")),
    "two pairs": (2, 1, lambda x, n: pair(pair(x, f"{n}_a"), f"{n}_b")),
    "two normed": (2, 2, lambda x, n: normed(normed(x, f"{n}_a"), f"{n}_b")),
}


@pytest.mark.parametrize("comm", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_repeats_the_sums_that_its_backward_pass_needs(kind: str, comm: bool) -> None:
    """By the kind of block: so many sums forward, of which so many run again, or none."""
    sums, needed, made = KINDS[kind]
    keras.utils.clear_session(free_memory=False)
    x = inputs = keras.Input((8,))
    for n in range(2):
        x = made(keras.layers.Dense(8, "gelu", name=f"before_{n}")(x), f"block_{n}")
    model = keras.Model(inputs, keras.layers.Dense(4, name="head")(x))
    layouts = {".*up/kernel": (None, "model"), ".*up/bias": ("model",)}
    layouts[".*down/kernel"] = ("model", None)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(model=2), layout_map=layouts, recompute=again(mp_comm_recompute=comm)
    )
    kdist.parallelize(model, config).compile("sgd", "mse")
    model.train_on_batch(np.ones((ROWS, 8)), np.ones((ROWS, 4)))
    found = sum(n for op, n in repeated(model).items() if op in COLLECTIVES)
    listed = [one for one in kdist.inspect(model).collectives if one.phase == "forward"]
    forward = {one.node for one in listed if one.layer.startswith("block_")}
    assert len(forward) == 2 * sums
    assert found == 2 * needed * comm
