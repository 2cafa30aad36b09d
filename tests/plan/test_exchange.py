"""What compressed gradients send: arithmetic by hand, and the transfers of the executed step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import kdist
from kdist import CompressionConfig, FusionConfig, OptimizerConfig, PowerSGD
from kdist.config.compression import Compressor, wire_bytes
from kdist.graphs import executed
from kdist.plan.exchange import Exchange, How, make_exchanges, on_every_slice
from kdist.sharding.layout import WeightLayout
from kdist.sharding.mesh import Topology
from kdist.sharding.owners import UpdateUnit, assign_owners
from kdist.sharding.placement import place

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..runtime.step_parts import first_step

COMPRESSORS = st.sampled_from(["fp16", "bf16", PowerSGD(rank=1), PowerSGD(rank=3)])
SHAPES = st.lists(st.tuples(st.integers(4, 9), st.integers(4, 9)), min_size=1, max_size=3)


def exchange(
    shapes: Any, compressor: Compressor, how: How, root: tuple[int, int], replicas: int
) -> Exchange:
    return Exchange(
        members=tuple(range(len(shapes))),
        inner=0,
        shapes=tuple(shapes),
        itemsize=4,
        compressor=compressor,
        how=how,
        slices=tuple(range(replicas)),
        root=root,
        owner=root[1],
        owners=replicas if how == "scatter" else 1,
    )


def total(one: Exchange) -> dict[str, tuple[int, int]]:
    """What for -> messages and bytes of all collectives."""
    found = {
        what: (sum(m for m, _ in sent), sum(m * size for m, size in sent))
        for what, sent in one.sent().items()
    }
    return {what: counts for what, counts in found.items() if counts[0]}


@given(shapes=SHAPES, compressor=COMPRESSORS, replicas=st.integers(1, 9))
def test_an_all_reduce_moves_the_wire_bytes_twice(
    shapes: Any, compressor: Compressor, replicas: int
) -> None:
    """To the root and back, once per other replica, what `wire_bytes` says of each gradient."""
    sent = total(exchange(shapes, compressor, "all", (0, 0), replicas))
    size = sum(wire_bytes(shape, 4, compressor) for shape in shapes)
    if compressor == "fp16":
        size += 4  # the largest value; and back, the scale
    assert sum(n for _, n in sent.values()) == 2 * (replicas - 1) * size
    rounds = 2 if compressor != "bf16" else 1  # factors P and Q, or scale and values
    assert sum(m for m, _ in sent.values()) == 2 * (replicas - 1) * rounds


@given(shapes=SHAPES, compressor=st.sampled_from(["fp16", "bf16"]), replicas=st.integers(2, 9))
def test_casts_to_owners(shapes: Any, compressor: Compressor, replicas: int) -> None:
    """Scattered or to one owner, the same bytes; an owner elsewhere gets its slice's part too."""
    shapes = [(rows * replicas, columns) for rows, columns in shapes]
    size = sum(wire_bytes(shape, 4, compressor) for shape in shapes)
    scale = 4 if compressor == "fp16" else 0
    for how, root, senders in (
        ("scatter", (1, 0), replicas - 1),
        ("one", (1, 0), replicas - 1),
        ("one", (1, 1), replicas),
    ):
        sent = total(exchange(shapes, compressor, how, root, replicas))
        assert sent["reduce"][1] == senders * (size + scale)
        assert sent.get("share", (0, 0))[1] == senders * scale


def test_low_rank_to_an_owner_at_another_inner_coordinate() -> None:
    """Factors travel between slices; then the whole part goes to the owner, inside its slice."""
    near = total(exchange([(8, 6)], PowerSGD(rank=2), "one", (1, 0), 3))
    far = total(exchange([(8, 6)], PowerSGD(rank=2), "one", (1, 1), 3))
    assert near == {"reduce": (4, 2 * 2 * 14 * 4), "share": (4, 2 * 2 * 14 * 4)}
    assert far == near | {"reduce": (5, 2 * 2 * 14 * 4 + 8 * 6 * 4)}


def test_every_slice_updates_what_is_compressed() -> None:
    mesh = Topology.from_mesh(kdist.mesh(data=3))
    weights = [place(f"w{n}", (6, 4), 4, WeightLayout((None, None)), mesh) for n in range(3)]
    units = assign_owners(weights, [False] * 3, mesh)
    units = on_every_slice(units, [True, False, True], weights)
    assert Counter(u.variable for u in units) == {0: 3, 1: 1, 2: 3}
    assert [u.owner[0] for u in units if u.variable == 0] == [0, 1, 2]
    assert {u.variable for u in units if u.replicated} == {0, 2}
    how: list[Compressor] = ["bf16", "none", "bf16"]
    (together,) = make_exchanges(units, weights, how, ["a", "a", "a"], [])
    assert together.members == (0, 2) and together.how == "all"
    apart = make_exchanges(units, weights, how, [None] * 3, [])
    assert [e.members for e in apart] == [(0,), (2,)]
    assert [e.root[0] for e in apart] == [0, 1]  # sums are made in turn
    alone = place(
        "w", (6, 4), 4, WeightLayout((None, None)), Topology.from_mesh(kdist.mesh(data=1))
    )
    one = [UpdateUnit(0, 0, (0, 0))]
    assert on_every_slice(one, [True], [alone]) == tuple(one)


# -- the executed step ---------------------------------------------------------------------------

X, Y = np.ones((8, 12), np.float32), np.ones((8, 8), np.float32)
CUTS = {".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}


def trained(axes: Mapping[str, int], config: CompressionConfig | None, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(32, name="up"),
            layers.Dense(16, name="down"),
            layers.Dense(8, name="head"),
        ]
    )
    optimizer = getattr(keras.optimizers, options.pop("optimizer", "Adam"))()
    level = options.pop("level", 0)
    parallel = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=options.pop("layout_map", CUTS if "model" in axes else None),
        pipeline=kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None,
        optimizer=OptimizerConfig(level=level, threshold_kb=0, **options),
        fusion=FusionConfig(mode="size", size_mb=1),
        compression=config,
    )
    kdist.parallelize(model, parallel)
    model.compile(optimizer, "mse")
    parts, functions = first_step(model, X, Y)
    step = executed.largest([f for f in functions if len(f.select(executed.ASSIGNMENTS)) > 5])
    return model, parts, step


STORED_CUT = {".*up/kernel": ("data", None), ".*down/kernel": (None, "data")}
CASTS = CompressionConfig(patterns={".*kernel": "fp16"})
LOW_RANK = CompressionConfig(patterns={".*kernel": PowerSGD(rank=2)})
MIXED = CompressionConfig(patterns={".*up/kernel": PowerSGD(rank=3), ".*down/kernel": "bf16"})


def long(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("axes", "config", "options"),
    [
        ({"data": 4}, MIXED, {"level": 0}),
        long({"data": 2}, MIXED, {"level": 1}),
        ({"data": 2, "model": 2}, LOW_RANK, {"optimizer": "Lamb"}),
        long({"data": 4}, MIXED, {"level": 1}),
        long({"data": 4}, CASTS, {"level": 2}),
        long({"data": 2, "model": 2}, CASTS, {"optimizer": "Lamb", "level": 1}),
        long({"data": 2, "model": 2}, MIXED, {"level": 2}),
        long({"data": 4}, CASTS, {"level": 3}),
        ({"data": 4}, LOW_RANK, {"level": 3}),
        long({"data": 2, "model": 2}, LOW_RANK, {"level": 3}),
        long({"data": 4}, LOW_RANK, {"level": 3, "optimizer": "Lamb"}),
        long({"data": 4}, LOW_RANK, {"layout_map": STORED_CUT}),
        long({"data": 4}, LOW_RANK, {"layout_map": STORED_CUT, "level": 3}),
        long({"data": 4}, CASTS, {"layout_map": STORED_CUT}),
        ({"pipe": 2, "data": 2}, MIXED, {"level": 0}),
        long({"pipe": 2, "data": 2}, CASTS, {"level": 3}),
        long({"pipe": 2, "data": 2, "model": 2}, MIXED, {"level": 1}),
        long({"pipe": 2, "data": 2, "model": 2}, LOW_RANK, {"level": 3}),
        long({"data": 4}, LOW_RANK, {"level": 1, "partition": "parameter"}),
        long({"data": 4}, MIXED, {"level": 2, "optimizer": "Muon"}),
    ],
)
def test_the_step_sends_what_the_plan_says(axes: Any, config: Any, options: Any) -> None:
    model, parts, step = trained(axes, config, **options)
    table = parts.table(step)
    if "pipe" not in axes:  # else boundary tensors travel too
        assert not [what for what in table if what.startswith("unexplained")], table
    plan = {t.what: (t.messages, t.nbytes) for t in model.plan().traffic()}

    def sent(*kinds: str) -> tuple[int, int]:
        counts = [(table.get(kind, 0), parts.nbytes(step, kind)) for kind in kinds]
        return sum(m for m, _ in counts), sum(n for _, n in counts)

    def planned(*kinds: str) -> tuple[int, int]:
        counts = [plan.get(kind, (0, 0)) for kind in kinds]
        return sum(m for m, _ in counts), sum(n for _, n in counts)

    assert sent("gradient", "compressed") == planned("reduce", "share")
    assert sent("value") == planned("broadcast")
    exchanges = [total(e) for e in model.plan().exchanges]
    assert sent("compressed")[1] >= sum(n for e in exchanges for _, n in e.values()) > 0


def test_at_level_0_all_traffic_shrinks() -> None:
    """No new values are sent of what every slice updates: 4 x fewer bytes are 4 x fewer."""
    _, parts, step = trained({"data": 2}, None)
    before = parts.nbytes(step, "gradient") + parts.nbytes(step, "value")
    config = CompressionConfig(rest=PowerSGD(rank=1), middle="none")
    model, parts, step = trained({"data": 2}, config)
    kinds = ("gradient", "value", "compressed")
    after = sum(parts.nbytes(step, kind) for kind in kinds)
    classes = model.plan().classes
    assert before == 2 * classes.full_bytes
    assert after == 2 * classes.nbytes
    assert before > 4 * after


def test_inspect_counts_what_is_kept() -> None:
    model, _, _ = trained({"data": 2}, LOW_RANK)
    errors = 12 * 32 + 32 * 16 + 16 * 8
    factors = 2 * (32 + 16 + 8)  # Q alone: columns by rank
    assert [m.compression for m in kdist.inspect(model).memory] == [4 * (errors + factors)] * 2
    assert "compression" in str(kdist.inspect(model))
