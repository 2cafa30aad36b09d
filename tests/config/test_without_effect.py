"""A setting without effect is in the plan's notes, and training warns of it once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import kdist
from kdist import (
    CompressionConfig,
    FusionConfig,
    OptimizerConfig,
    PipelineConfig,
    RecomputeConfig,
)

import keras
import numpy as np
import pytest

from ..parity import CUTS

KERNELS = "'up/kernel', 'up/bias', 'down/kernel' and 1 more"


def dense() -> keras.Model:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, "tanh", name="up")(inputs)
    return keras.Model(inputs, keras.layers.Dense(4, name="down")(hidden))


def embedded() -> keras.Model:
    tokens = keras.Input((4,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(8, 4, tie_weights=True, name="table")
    hidden = keras.layers.Dense(4, name="up")(table(tokens))
    return keras.Model(tokens, table(hidden, reverse=True))


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.up = keras.layers.Dense(8, name="up")
        self.down = keras.layers.Dense(4, name="down")

    def call(self, x: Any) -> Any:
        return self.down(self.up(x))

    def compute_output_shape(self, shape: Any) -> Any:
        return (*shape[:-1], 4)


def subclassed() -> keras.Model:
    model = Subclassed()
    model(np.ones((1, 4), np.float32))
    return model


def split_table() -> keras.Model:
    table = kdist.layers.SplitEmbedding((3, 7), 2, axis="data", name="table")
    head = keras.layers.Dense(1, name="head")
    return keras.Sequential([keras.Input((4,)), table, keras.layers.Flatten(), head])


class OwnLoss(keras.Model):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def own_loss() -> keras.Model:
    inputs = keras.Input((4,))
    return OwnLoss(inputs, keras.layers.Dense(4, name="up")(inputs))


def noted(model: keras.Model) -> list[str]:
    """What the plan notes to be without effect."""
    return [note for note in model.plan().notes if "has no effect" in note]


def warned(model: keras.Model) -> list[str]:
    """What two steps warn of."""
    inputs = getattr(model, "inputs", None)
    rows = np.ones((8, 4), inputs[0].dtype if inputs else "float32")
    target = np.ones((8, *model.compute_output_shape((8, 4))[1:]), np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.train_on_batch(rows, target)
    found = [str(w.message) for w in caught if "has no effect" in str(w.message)]
    return [text.removeprefix(f"{model.name}: ") for text in found]


def made(
    axes: dict[str, int],
    build: Callable[[], keras.Model] = dense,
    setting: Callable[[keras.Model], Any] = lambda model: None,
    optimizer: Any = "sgd",
    level: OptimizerConfig | None = None,
    **options: Any,
) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = build()
    setting(model)
    if "model" in axes and build is dense:
        options.setdefault("layout_map", CUTS)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes), optimizer=level or OptimizerConfig(), **options
    )
    kdist.parallelize(model, config)
    model.compile(optimizer() if callable(optimizer) else optimizer, "mse")
    return model


def at(number: int, **options: Any) -> dict[str, Any]:
    return {"level": OptimizerConfig(level=number, threshold_kb=0, **options)}


def again(**options: Any) -> Callable[[keras.Model], Any]:
    """Declares that a layer runs again."""
    return lambda model: kdist.recompute(model.get_layer("up"), **options)


PIPE = {"pipe": 2, "data": 2}
STAGES = PipelineConfig(micro_batches=2, stages={"up": 0, "down": 1})
CHUNKS = PipelineConfig(micro_batches=2, schedule="interleaved")
FREED = "when gradients and gathered parameters are freed"
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no fusion, one replica": (
        {"axes": {"model": 2}, "fusion": FusionConfig(mode="none")},
        ["fusion (none) has no effect: gradients travel between replicas, and the mesh model=2"],
    ),
    "no overlap, one replica": (
        {"axes": {"model": 2}, "fusion": FusionConfig(overlap=False)},
        ["fusion (auto, exchanged after the backward pass) has no effect: gradients travel"],
    ),
    "threshold at level 0": (
        {"axes": {"data": 2}, **at(0)},
        ["threshold_kb=0 has no effect: level 0 cuts nothing. Raise level"],
    ),
    "threshold of a sharded optimizer at level 0": (
        {
            "axes": {"data": 2, "model": 2},
            "optimizer": lambda: kdist.ShardedOptimizer(
                keras.optimizers.SGD(), level=0, threshold_kb=8
            ),
        },
        ["threshold_kb=8 has no effect: level 0 cuts nothing. Raise level"],
    ),
    "level, no data axis": (
        {"axes": {"model": 2}, **at(2)},
        ["level=2 has no effect: gradients travel between replicas, and the mesh model=2 has one"],
    ),
    "level, one replica": (
        {"axes": {"data": 1}, **at(3, keep_gathered=True, partition="parameter")},
        ["level=3, keep_gathered=True, partition='parameter' has no effect: gradients travel"],
    ),
    "sharded sums, one replica": (
        {"axes": {"data": 1}, **at(1, gradient_accumulation_shard=True)},
        ["level=1, gradient_accumulation_shard=True has no effect: gradients travel"],
    ),
    "level, a pipeline of one replica": (
        {"axes": {"pipe": 2}, "pipeline": STAGES, **at(1)},
        ["level=1 has no effect: gradients travel"],
    ),
    "level below the threshold": (
        {"axes": {"data": 2}, "level": OptimizerConfig(level=1)},
        ["level=1 has no effect on where parameters are kept and updated: all 4 parameters stay"],
    ),
    "sharded sums of no accumulation": (
        {"axes": {"data": 2}, **at(1, gradient_accumulation_shard=True)},
        ["gradient_accumulation_shard=True has no effect: the optimizer adds up no gradients"],
    ),
    "opting in at level 0": (
        {"axes": {"data": 2}, "setting": lambda m: kdist.set_parallel_optimizer(m, True)},
        [f"kdist.set_parallel_optimizer({KERNELS}, True) has no effect: level 0. Leave it out"],
    ),
    "opting in of what does not divide": (
        {
            "axes": {"data": 4},
            "setting": lambda m: kdist.set_parallel_optimizer(m, True),
            "build": lambda: keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(4, name="up"), keras.layers.Dense(6)]
            ),
            **at(1, partition="slice"),
        },
        ["', True) has no effect: no dim of (6,) divides by 4 replicas"],
    ),
    "overlap in pipelines": (
        {"axes": PIPE, "pipeline": STAGES, "fusion": FusionConfig(overlap=False)},
        ["FusionConfig(overlap=False) has no effect: a pipeline's buckets leave stage by stage"],
    ),
    "overlap at level 2": (
        {"axes": {"data": 2}, "fusion": FusionConfig(overlap=False), **at(2)},
        ["FusionConfig(overlap=False) has no effect: level 2 frees gradients while the backward"],
    ),
    "keep_gathered in pipelines": (
        {"axes": PIPE, "pipeline": STAGES, **at(3, keep_gathered=True)},
        [
            f"level=3 has no effect on {FREED}: a pipeline's stage of one chunk keeps both",
            "keep_gathered=True has no effect: a pipeline's stage of one chunk gathers its",
        ],
    ),
    "fusion ids of tied tables": (
        {
            "axes": {"data": 2},
            "build": embedded,
            "setting": lambda m: kdist.set_comm_fusion(m.get_layer("table"), 1),
        },
        ["kdist.set_comm_fusion of 'table/embeddings' has no effect: gradients of embedding tab"],
    ),
    "an algorithm between processes in one": (
        {"axes": {"data": 2}, "fusion": FusionConfig(algorithm="ring")},
        ["FusionConfig(algorithm='ring') has no effect: it is about sums between processes, and"],
    ),
    "fusion of one replica": (
        {"axes": {"model": 2}, "fusion": FusionConfig(mode="index", index=(2,))},
        ["fusion (buckets end at (2,)) has no effect: gradients travel between replicas"],
    ),
    "fusion ids of one replica": (
        {"axes": {"model": 2}, "setting": lambda m: kdist.set_comm_fusion(m, 2)},
        [f"kdist.set_comm_fusion of {KERNELS} has no effect: gradients travel between replicas"],
    ),
    "a stage without a pipeline": (
        {"axes": {"data": 2}, "setting": lambda m: kdist.set_stage(m.get_layer("up"), 1)},
        ["kdist.set_stage of 'up' has no effect: ParallelConfig names no pipeline"],
    ),
    "all-to-all without inner axes": (
        {"axes": {"data": 2}, "enable_alltoall": True},
        ["enable_alltoall=True has no effect: only inner axes cut the tensors of layers"],
    ),
    "sequence without inner axes": (
        {"axes": {"data": 2}, "sequence_parallel": True},
        ["sequence_parallel=True has no effect: only inner axes cut the tensors of layers"],
    ),
    "compression of one replica": (
        {"axes": {"model": 2}, "compression": CompressionConfig(rest="bf16")},
        ["compression has no effect: gradients travel between replicas"],
    ),
    "collectives of no inner axes": (
        {"axes": {"data": 2}, "setting": again(mp_comm_recompute=False)},
        ["mp_comm_recompute=False of 'up' has no effect: it is about collectives of inner axes"],
    ),
    "gathers of no parameter": (
        {
            "axes": {"data": 2},
            "recompute": RecomputeConfig(layers=["up"], parallel_optimizer_comm_recompute=True),
        },
        ["_comm_recompute of 'up/kernel', 'up/bias' has no effect: none of these weights"],
    ),
    "gathers of other parameters": (
        {
            "axes": {"data": 2, "model": 2},
            "setting": again(parallel_optimizer_comm_recompute=False),
            "layout_map": {"down/kernel": ("data", None)},
        },
        ["_comm_recompute of 'up/kernel', 'up/bias' has no effect: none of these weights"],
    ),
}


def some(names: Iterable[str], default: Collection[str]) -> Any:
    """All names, those that are not in the default suite marked long."""
    marked = (pytest.param(n, marks=[] if n in default else [pytest.mark.long]) for n in names)
    return pytest.mark.parametrize("name", list(marked))


@pytest.mark.parametrize("name", CASES)
def test_it_is_noted(name: str) -> None:
    options, expected = CASES[name]
    notes = noted(made(**options))
    assert len(notes) == len(expected), notes
    for text, note in zip(expected, notes, strict=True):
        assert text in note


@some(CASES, ["level, no data axis", "keep_gathered in pipelines", "opting in at level 0"])
def test_it_is_warned_of_once(name: str) -> None:
    model = made(**CASES[name][0])
    notes = noted(model)
    assert warned(model) == notes
    assert warned(model) == []


QUIET: dict[str, dict[str, Any]] = {
    "level 3 in chunks of stages": {
        "axes": {"pipe": 1, "data": 2},
        "pipeline": CHUNKS,
        **at(3, keep_gathered=True),
    },
    "defaults": {"axes": {"data": 2}},
    "collectives of inner axes": {
        "axes": {"model": 2},
        "setting": again(mp_comm_recompute=False),
    },
    "gathers at level 3": {
        "axes": {"data": 2},
        "setting": again(parallel_optimizer_comm_recompute=True),
        **at(3),
    },
    "gathers by a layout": {
        "axes": {"data": 2, "model": 2},
        "setting": again(parallel_optimizer_comm_recompute=True),
        "layout_map": {"up/kernel": ("data", "model")},
    },
    "data x model": {"axes": {"data": 2, "model": 2}, "enable_alltoall": True},
    "a table that is split over data": {
        "axes": {"data": 2},
        "build": split_table,
        "enable_alltoall": True,
    },
    "level 1": {"axes": {"data": 2}, **at(1)},
    "level 3": {"axes": {"data": 2}, "fusion": FusionConfig(mode="none"), **at(3)},
    "level 3, kept": {"axes": {"data": 2}, **at(3, keep_gathered=True)},
    "no overlap": {"axes": {"data": 2}, "fusion": FusionConfig(overlap=False)},
    "freeing on inner meshes": {"axes": {"data": 2, "model": 2}, **at(2)},
    "freeing in subclassed models": {"axes": {"data": 2}, "build": subclassed, **at(3)},
    "freeing with an own loss": {"axes": {"data": 2}, "build": own_loss, **at(2)},
    "no overlap at level 1": {
        "axes": {"data": 2, "model": 2},
        "fusion": FusionConfig(overlap=False),
        **at(1),
    },
    "a fusion mode and gathers": {
        "axes": {"data": 2},
        "fusion": FusionConfig(mode="size", size_mb=1),
        **at(3),
    },
    "fusion ids and gathers": {
        "axes": {"data": 2},
        "setting": lambda m: kdist.set_comm_fusion(m, 1),
        **at(3),
    },
    "ids": {"axes": {"data": 2}, "setting": lambda m: kdist.set_comm_fusion(m, 1)},
    "id 0 of a table": {
        "axes": {"data": 2},
        "build": embedded,
        "setting": lambda m: kdist.set_comm_fusion(m.get_layer("table"), 0),
    },
    "opting in": {
        "axes": {"data": 2},
        "setting": lambda m: kdist.set_parallel_optimizer(m, True),
        "level": OptimizerConfig(level=1),
    },
    "pipeline": {"axes": PIPE, "pipeline": STAGES, **at(1)},
    "compression": {"axes": {"data": 2}, "compression": CompressionConfig(rest="bf16")},
}


@pytest.mark.parametrize("name", QUIET)
def test_what_has_its_effect_is_not_noted(name: str) -> None:
    assert noted(made(**QUIET[name])) == []


@some(QUIET, ["level 1"])
def test_what_has_its_effect_is_not_warned_of(name: str) -> None:
    assert warned(made(**QUIET[name])) == []


def test_accumulated_sums_that_are_sharded_have_an_effect() -> None:
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    config = OptimizerConfig(level=1, threshold_kb=0, gradient_accumulation_shard=True)
    assert noted(made({"data": 2}, optimizer=optimizer, level=config)) == []


def test_the_settings_of_a_sharded_optimizer_count() -> None:
    optimizer = kdist.ShardedOptimizer(keras.optimizers.SGD(), level=2, threshold_kb=0)
    (note, *_) = noted(made({"model": 2}, optimizer=optimizer))
    assert note.startswith("level=2 has no effect: gradients travel between replicas")


def test_a_new_setting_is_warned_of_after_another_compile() -> None:
    model = made({"data": 2})
    assert warned(model) == []
    kdist.set_parallel_optimizer(model, True)
    model.compile("sgd", "mse")
    (note,) = noted(model)
    assert warned(model) == [note]
    model.compile("sgd", "mse")
    assert warned(model) == []
