"""Fusion of gradients: which travel together, by ids and modes, and what the step then sends."""

from __future__ import annotations

import dataclasses
from typing import Any

import kdist
from kdist import FusionConfig
from kdist.api.attached import attached
from kdist.comm import LinkCost
from kdist.config.fusion import MAX_MB, Item, assign_buckets, bucket_size, largest_fused
from kdist.graphs import executed

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..runtime.step_parts import first_step

KB, MB = 1024, 2**20
X, Y = np.ones((8, 6), np.float32), np.ones((8, 3), np.float32)


def items(*sizes: int, kind: Any = "float32", groups: Any = None) -> list[Item]:
    groups = groups or [None] * len(sizes)
    return [Item(size, kind, group) for size, group in zip(sizes, groups, strict=True)]


# -- buckets, by hand ----------------------------------------------------------------------------


def test_buckets_are_filled_from_the_last_parameter_on() -> None:
    config = FusionConfig(mode="size", size_mb=3)
    # From the end: 2 + 1, then 2 alone (2 + 2 > 3), then 2.
    assert assign_buckets(items(2 * MB, 2 * MB, 1 * MB, 2 * MB), config) == [2, 1, 0, 0]


def test_a_bucket_holds_exactly_its_size() -> None:
    config = FusionConfig(mode="size", size_mb=2)
    assert assign_buckets(items(MB, MB, MB), config) == [1, 0, 0]
    assert assign_buckets(items(MB, MB, MB + 1), config) == [1, 1, 0]


def test_index_counts_in_reverse_parameter_order() -> None:
    config = FusionConfig(mode="index", index=(2, 5))
    assert assign_buckets(items(*[4] * 7), config) == [2, 2, 1, 1, 1, 0, 0]


def test_none_fuses_nothing() -> None:
    assert assign_buckets(items(*[4] * 4), FusionConfig(mode="none")) == [3, 2, 1, 0]


def test_auto_leaves_large_parameters_alone() -> None:
    large, small = int(largest_fused(FusionConfig())) + 4, 4 * KB
    found = assign_buckets(items(small, large, small, large, small), FusionConfig())
    assert found[0] == found[2] == found[4]
    assert len({found[0], found[1], found[3]}) == 3


def test_auto_makes_several_buckets() -> None:
    found = assign_buckets(items(*[64 * KB] * 80), FusionConfig())
    assert len(set(found)) == 8
    # The first to leave are the last parameters.
    assert found == sorted(found, reverse=True)


def test_auto_follows_the_cost_of_a_message() -> None:
    slow = FusionConfig(link=LinkCost(a=1e-3, b=1e-9))
    # Copying 5 MB in and out takes as long as the start of a message; 1 MB travels as long.
    assert largest_fused(slow) == pytest.approx(5e6)
    assert bucket_size([10**6] * 4, slow) == pytest.approx(1e6)
    # At least two buckets, so that one can overlap the backward pass; eight of a large model.
    assert bucket_size([10**5] * 4, slow) == pytest.approx(2e5)
    assert bucket_size([10**6] * 80, slow) == pytest.approx(1e7)
    assert bucket_size([10**9] * 80, slow) == MAX_MB * MB


def test_ids_go_before_modes() -> None:
    groups = [1, 0, 1, None, None, 0]
    found = assign_buckets(items(*[4] * 6, groups=groups), FusionConfig(mode="size", size_mb=1))
    assert found[0] == found[2] and found[3] == found[4]
    assert len(set(found)) == 4
    unfused = assign_buckets(items(*[4] * 6, groups=groups), FusionConfig(mode="none"))
    assert unfused[0] == unfused[2] and len(set(unfused)) == 5


def test_kinds_never_mix() -> None:
    two = [Item(4, "float32", 1), Item(4, "float16", 1), Item(4, "float32", 1)]
    assert assign_buckets(two, FusionConfig()) == [1, 0, 1]


def test_an_index_past_the_last_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"below 3, the number of parameters.*index=\(1, 3\)"):
        assign_buckets(items(4, 4, 4), FusionConfig(mode="index", index=(1, 3)))


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "all"},
        {"mode": "size", "size_mb": 0},
        {"mode": "size", "size_mb": True},
        {"size_mb": 4},
        {"mode": "index"},
        {"mode": "index", "index": (3, 2)},
        {"mode": "index", "index": (0, 2)},
        {"index": (2,)},
        {"mode": "index", "index": 2},
        {"mode": "none", "link": LinkCost(a=1e-3, b=1e-9)},
        {"link": 1e-3},
        {"algorithm": "tensorflow"},
        {"overlap": 1},
    ],
)
def test_config_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Received: "):
        FusionConfig(**options)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 100 * MB),
            st.sampled_from("ab"),
            st.sampled_from([None, None, None, 0, 1, 2]),
        ),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from(["auto", "size", "none"]),
    st.floats(0.1, 64),
)
def test_buckets_keep_the_rules(given_items: list, mode: str, size: float) -> None:
    found_items = [Item(*one) for one in given_items]
    config = FusionConfig(mode=mode, size_mb=size) if mode == "size" else FusionConfig(mode=mode)
    buckets = assign_buckets(found_items, config)
    assert sorted(set(buckets)) == list(range(max(buckets) + 1))
    # Buckets leave in the order in which their last gradient, of their first parameter, is made.
    first = {b: buckets.index(b) for b in buckets}
    assert [first[b] for b in sorted(first)] == sorted(first.values(), reverse=True)
    for b in set(buckets):
        members = [item for item, bucket in zip(found_items, buckets) if bucket == b]
        assert len({(m.kind, m.group) for m in members}) == 1
        if members[0].group == 0 or (mode == "none" and members[0].group is None):
            assert len(members) == 1
        if members[0].group is None and len(members) > 1:
            assert (
                sum(m.nbytes for m in members) <= min(size if mode == "size" else 64, MAX_MB) * MB
            )


# -- ids -----------------------------------------------------------------------------------------


def test_ids_reach_nested_layers_and_can_be_read() -> None:
    inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(3)])
    model = keras.Sequential([keras.Input((6,)), inner])
    assert kdist.get_comm_fusion(inner.layers[0].kernel) is None
    kdist.set_comm_fusion(model, 3)
    kdist.set_comm_fusion(inner.layers[1], 5)
    ids = [kdist.get_comm_fusion(v) for v in model.trainable_variables]
    assert ids == [3, 3, 5, 5]


def test_every_setting_is_printed() -> None:
    """Tuning tells candidates apart by it."""
    configs = [
        FusionConfig(),
        FusionConfig(link=LinkCost(a=1e-3, b=1e-9)),
        FusionConfig(link=LinkCost(a=1e-3, b=2e-9)),
        FusionConfig(mode="size", size_mb=2),
        FusionConfig(mode="index", index=(2,)),
        FusionConfig(mode="none"),
        FusionConfig(overlap=False),
    ]
    assert len({str(config) for config in configs}) == len(configs)


@pytest.mark.parametrize("group", [-1, 1.0, True, "1"])
def test_other_ids_are_refused(group: Any) -> None:
    with pytest.raises(ValueError, match="integer from 0 on. Received: "):
        kdist.set_comm_fusion(keras.layers.Dense(2), group)


# -- against what ran ----------------------------------------------------------------------------


def towers() -> keras.Model:
    """Three blocks of two dense layers; 14 parameters with the head's."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((6,))
    for block in range(3):
        for layer in range(2):
            x = keras.layers.Dense(8, "tanh", name=f"block_{block}_{layer}")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(x))


def step_of(level: int, axes: dict[str, int], optimizer: str, fusion: Any, ids: bool) -> Any:
    model = towers()
    if ids:
        for layer in model.layers[1:-1]:
            kdist.set_comm_fusion(layer, int(layer.name.split("_")[1]))
    cuts = {".*_0/kernel": (None, "model"), ".*_1/kernel": ("model", None)}
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=cuts if "model" in axes else None,
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
        fusion=fusion,
    )
    kdist.parallelize(model, config)
    model.compile(getattr(keras.optimizers, optimizer)(0.01), "mse")
    before = model.plan()
    parts, functions = first_step(model, X, Y)
    step = executed.largest([f for f in functions if len(f.select(executed.ASSIGNMENTS)) > 5])
    return model, before, parts, step


SIZE = FusionConfig(mode="size", size_mb=600 / MB)
ROWS = [
    (0, {"data": 4}, "Adam", FusionConfig(), False),
    (0, {"data": 4}, "Adam", FusionConfig(mode="none"), False),
    (0, {"data": 4}, "Lamb", SIZE, False),
    (0, {"data": 4}, "Adam", FusionConfig(mode="index", index=(2, 6)), False),
    (0, {"data": 4}, "Adam", FusionConfig(), True),
    (0, {"data": 4, "model": 2}, "Adam", SIZE, False),
    (1, {"data": 4}, "Adam", FusionConfig(), False),
    (1, {"data": 4}, "Adam", FusionConfig(mode="none"), True),
    (1, {"data": 4}, "Muon", SIZE, False),
    (2, {"data": 4}, "Adam", SIZE, False),
    (3, {"data": 4}, "Adam", FusionConfig(), False),
    (3, {"data": 4}, "Lamb", FusionConfig(), False),
]


@pytest.mark.parametrize(("level", "axes", "optimizer", "fusion", "ids"), ROWS)
def test_the_step_sends_what_the_plan_counts(
    level: int, axes: dict[str, int], optimizer: str, fusion: Any, ids: bool
) -> None:
    model, before, parts, step = step_of(level, axes, optimizer, fusion, ids)
    # Which parameters the backward pass gathers again is known once the step is traced.
    assert dataclasses.replace(model.plan(), gathers=before.gathers) == before
    assert level == 3 or model.plan() == before
    table = parts.table(step)
    assert not [what for what in table if what.startswith("unexplained")], table
    planned = {t.what: (t.messages, t.nbytes) for t in model.plan().traffic()}
    names = {"reduce": "gradient", "join": "join", "broadcast": "value", "gather": "gather"}
    sent = {w: (table[n], parts.nbytes(step, n)) for w, n in names.items() if n in table}
    assert sent == planned
    sums = [n for n in step.nodes if n.op == "AddN" and parts.made_in.get(n.name) == "update"]
    plan = model.plan()
    # A sum per owner: a reduce has one, a reduce-scatter as many as replicas.
    fused = {n for bucket in plan.buckets for each in bucket.units for n in each}
    lone = len(plan.units) - len(fused)
    assert len(sums) == sum(len(bucket.owners) for bucket in plan.buckets) + lone
    (reduced,) = (t.collectives for t in plan.traffic() if t.what == "reduce")
    assert reduced == len(plan.buckets) + lone


class OwnLoss(keras.Model):
    """Computes its loss itself: the forward pass runs again to pull gradients through."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any) -> Any:
        return keras.ops.mean((y - y_pred) ** 2) * keras.ops.mean(y_pred**2)


def test_a_loss_over_the_whole_batch_gathers_what_the_plan_counts() -> None:
    plain = towers()
    model = OwnLoss(plain.inputs, plain.outputs)
    optimizer = kdist.OptimizerConfig(level=3, threshold_kb=0)
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=4), optimizer=optimizer)
    kdist.parallelize(model, config)
    model.compile("adam", "mse")
    parts, functions = first_step(model, X, Y)
    step = max(functions, key=lambda f: len(f.nodes))
    (planned,) = [t for t in model.plan().traffic() if t.what == "gather"]
    sent = parts.table(step)["gather"], parts.nbytes(step, "gather")
    assert sent == (planned.messages, planned.nbytes)


def early_buckets(overlap: bool, level: int = 0, model_axis: int = 1) -> list[int]:
    """Per bucket, in the order they leave, how many calls of programs its sum waits for."""
    model = towers()
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=2, model=model_axis),
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
        fusion=FusionConfig(mode="size", size_mb=300 / MB, overlap=overlap),
    )
    kdist.parallelize(model, config)
    model.compile("adam", "mse")
    parts, _ = first_step(model, X, Y)
    sums = [op for op in parts.graph.get_operations() if op.name.startswith("reduce")]
    calls = [len([op for op in above(one) if "Call" in op.type]) for one in sums]
    assert len(calls) > 2
    return sorted(calls)


def above(operation: Any) -> set[Any]:
    """Operations that must run before one."""
    found: set[Any] = set()
    waiting = [operation]
    while waiting:
        for one in (*(t.op for t in waiting[-1].inputs), *waiting.pop().control_inputs):
            if one not in found:
                found.add(one)
                waiting.append(one)
    return found


@pytest.mark.parametrize(("level", "model_axis"), [(0, 1), (1, 1), (0, 2)])
def test_buckets_leave_while_the_backward_pass_goes_on(level: int, model_axis: int) -> None:
    calls = early_buckets(overlap=True, level=level, model_axis=model_axis)
    # The first bucket waits for the forward pass and the last layers; the last one for all.
    assert calls[0] < calls[-1]
    assert len(set(calls)) > 2


def test_overlap_is_the_default() -> None:
    assert FusionConfig().overlap


def test_without_overlap_all_buckets_wait_for_the_whole_pass() -> None:
    assert set(early_buckets(overlap=False)) == {2}  # the two replicas' programs


def test_overlap_is_set_before_training() -> None:
    model = kdist.parallelize(towers(), kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    with pytest.raises(ValueError, match=r"overlap changes.*Received: fusion="):
        attached(model).set_fusion(FusionConfig(overlap=False))
