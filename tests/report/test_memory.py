"""Bytes per device, held to the formula of optimizer parallelism.

Adam in float32: 4 bytes of a parameter, 4 of its gradient, 8 of its moments. Over N replicas, per
byte of parameter and device: 16 whole; 8 + 8/N with moments spread (level 1, and 0: every update is
computed once per process, so its moments are kept once); 4 + 12/N with gradients too (2); 16/N with
parameters too (3). What is below the threshold stays whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.graphs import executed
from kdist.report import memory
from kdist.sharding.device import Device

import keras
import numpy as np
import pytest
import tensorflow as tf

from .memory_parts import (
    BIAS,
    COUNTERS,
    CUT,
    KERNEL,
    LAYERS,
    REPLICAS,
    ROWS,
    SCALARS,
    WHOLE,
    WIDTH,
    analysed,
    bucket,
    build,
    chunk,
    gradients_at_level_2,
    most,
    parameters_at_level_3,
    prepared,
    values_at_level_2,
    with_edges,
)

# -- variables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_variables_take_the_formula_s_bytes(level: int, at_level: Callable) -> None:
    found = memory.measure(attached(at_level(level)), None)
    stored = CUT / REPLICAS + WHOLE if level == 3 else CUT + WHOLE
    assert {m.parameters for m in found} == {stored}
    # Together one copy of the moments.
    assert sum(m.slots - SCALARS for m in found) == 2 * (CUT + WHOLE)
    # Cut, or dealt out: six kernels to four devices, of which two are cut from level 1 on.
    least, most = (2 * KERNEL, 4 * KERNEL) if level == 0 else (2 * CUT // REPLICAS,) * 2
    for m in found:
        assert least <= m.slots - SCALARS <= most + 2 * WHOLE


@pytest.mark.parametrize("level", [0, 3])
def test_they_are_the_buffers_that_exist(level: int, at_level: Callable) -> None:
    model = at_level(level)
    parallel = attached(model)
    held: dict[str, int] = {}
    for entry in parallel.entries.values():
        for local in entry.locals.values():
            device = Device.parse(local.value.device).name
            held[device] = held.get(device, 0) + local.numpy().nbytes
    assert held == {m.device: m.parameters for m in memory.measure(parallel, None)}
    held = {}
    for one in parallel.update.jobs.local[0]:
        for variable in one.optimizer.variables:
            device = Device.parse(variable.value.device).name
            held[device] = held.get(device, 0) + variable.numpy().nbytes
    assert held == {m.device: m.slots for m in memory.measure(parallel, None)}


@pytest.mark.parametrize("level", [0, 1, 2])
def test_devices_that_share_memory_keep_a_value_once(level: int) -> None:
    """Rows written in place would give a variable a buffer of its own, and each read of it one."""
    model = prepared(level, layers=2)
    batch = np.ones((ROWS, WIDTH), np.float32)
    step = executed.largest(executed.watch(lambda: model.train_on_batch(batch, batch)))
    assert not step.select("ResourceStridedSliceAssign")
    for layer in model.layers[1:]:
        copies = attached(model).entries[id(layer.kernel)].locals.values()
        assert len(copies) == REPLICAS
        assert len({_address(one) for one in copies}) == 1


def test_the_plan_states_what_was_read_of_a_step() -> None:
    model = prepared(3, layers=2)
    assert all(one.memory.gradients is None for one in model.plan().devices())
    found = kdist.inspect(model, batch_size=ROWS)
    plan = model.plan()
    assert plan.memory == found.memory
    assert [one.memory for one in plan.devices()] == list(found.memory)
    assert all(one.gradients and one.gathered and one.activations for one in plan.memory)
    assert f"memory of a step with {ROWS} rows, at most" in str(plan)
    assert model.plan(ROWS).memory == plan.memory
    # Nothing was read of other rows, nor of other buckets, nor after another compile.
    assert {one.rows for one in model.plan(2 * ROWS).memory} == {None}
    attached(model).set_fusion(kdist.FusionConfig(mode="none"))
    batch = np.ones((ROWS, WIDTH), np.float32)
    model.train_on_batch(batch, batch)
    assert not attached(model).live
    assert all(one.gradients is None and one.slots for one in model.plan().memory)
    model.compile("sgd", "mse")
    assert all(one.gradients is None for one in model.plan().memory)


def _address(variable: keras.Variable) -> int:
    """Where the buffer of a variable is."""
    return int(np.asarray(memoryview(tf.convert_to_tensor(variable.value))).ctypes.data)


def test_views_own_nothing_and_codes_are_what_is_kept() -> None:
    from kdist.storage.row_views import rows_view
    from kdist.storage.variables import make_local

    variable = keras.Variable(np.zeros((4, 2), np.float32))
    local = make_local(variable, tf.zeros((4, 2)))
    view = rows_view(variable, local, (slice(0, 2),))
    assert (memory.nbytes(local), memory.nbytes(view)) == (32, 0)


# -- a step --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, pytest.param(1, marks=pytest.mark.long)])
def test_whole_gradients(level: int, at_level: Callable) -> None:
    """All gradients at once, and never together with new values: 4 bytes more per parameter."""
    live = analysed(at_level(level))
    assert most(live, "gradient") == CUT + WHOLE
    assert most(live, "gathered") <= CUT + WHOLE
    assert most(live, "gradient", "gathered") == CUT + WHOLE


def test_new_values_take_the_place_of_gradients_at_level_1() -> None:
    """But for a bucket, which the device that joins it has as one and in parts."""
    layers = 16
    model = prepared(1, layers=layers, bucket_bytes=3 * KERNEL)
    assert bucket(model) == 2 * KERNEL
    live = analysed(model)
    everything = layers * (KERNEL + BIAS)
    assert most(live, "gradient") == everything
    joined = layers * KERNEL / REPLICAS
    assert everything < most(live, "gradient", "gathered") <= everything + joined


@pytest.mark.parametrize("level", [2, 3])
def test_the_sum_is_the_formula_s(level: int, at_level: Callable) -> None:
    model = at_level(level)
    live = analysed(model)
    assert gradients_at_level_2(live, model)
    assert (values_at_level_2 if level == 2 else parameters_at_level_3)(live, model)
    formula = (4 + 12 / REPLICAS if level == 2 else 16 / REPLICAS) / 4 * CUT + 16 / 4 * WHOLE
    at_work = 2 * chunk(model)
    in_flight = chunk(model) + bucket(model)
    for m in kdist.inspect(model, ROWS).memory:
        assert m.both is not None
        assert m.parameters + m.slots - SCALARS + m.both <= formula + at_work + in_flight
    # No empty promise, even for so small a model.
    level_1 = (8 + 8 / REPLICAS) / 4 * CUT + 16 / 4 * WHOLE
    assert formula + at_work + in_flight < level_1


@pytest.mark.parametrize("level", [2, 3])
def test_copies_on_devices_with_memory_of_their_own(level: int) -> None:
    """There what is received is a copy: one more chunk, and two more buckets, in flight."""
    model = prepared(level, partition="slice")  # as it is there
    live = with_edges(analysed(model), lambda op: op, shared_memory=False)
    seg, buck = chunk(model), bucket(model)
    assert most(live, "gradient") <= CUT / REPLICAS + REPLICAS * WHOLE + seg + 3 * buck
    assert most(live, "gathered") <= 2 * WHOLE + (4 * buck if level == 2 else 4 * seg)


class Subclassed(keras.Model):
    """A chain of layers that its own `call` runs."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = [keras.layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]

    def call(self, x: Any) -> Any:
        for layer in self.chain:
            x = layer(x)
        return x


class OwnLoss(keras.Model):
    """A Functional model that computes its loss itself."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, weight: Any = None, **_: Any
    ) -> Any:
        return keras.ops.mean((y - y_pred) ** 2) * keras.ops.mean(y_pred**2)


def subclassed() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = Subclassed()
    model.build((None, WIDTH))
    return model


def with_own_loss() -> keras.Model:
    model = build(LAYERS)
    return OwnLoss(model.inputs, model.outputs)


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("make", [subclassed, with_own_loss])
def test_any_model_is_cut(make: Callable[[], keras.Model], level: int) -> None:
    model = prepared(level, make=make)
    live = analysed(model)
    assert gradients_at_level_2(live, model)
    if level == 3:
        assert parameters_at_level_3(live, model)


CUT_INSIDE = {r".*kernel": (None, "model")}


def inner(level: int) -> keras.Model:
    """Large enough for what a step holds to be parameters and gradients."""
    mesh = kdist.mesh(data=2, model=2)
    return prepared(level, layers=16, mesh=mesh, layout_map=CUT_INSIDE)


def test_slices_with_inner_axes_free_too() -> None:
    """The part of the model on a device is cut over two replicas: at level 3, half of it."""
    whole, cut = analysed(inner(0)), analysed(model := inner(3))
    chunks = attached(model).mesh_step.runner.chunks  # type: ignore[union-attr]
    assert chunks is not None
    sizes = Counter(chunks.chunk_of.values())
    assert max(sizes.values()) == 2  # a kernel and a bias
    for device in ("/device:CPU:0", "/device:CPU:3"):
        assert cut.peak(device, ["gathered"]).nbytes <= 2 * (KERNEL / 2 + BIAS)
        assert cut.peak(device).nbytes <= 0.6 * whole.peak(device).nbytes


@pytest.mark.parametrize("keep", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("inner", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_stage_has_the_parameters_of_one_chunk(inner: int, keep: bool) -> None:
    pipeline = kdist.PipelineConfig(micro_batches=2, schedule="interleaved", chunks=4)
    model = prepared(
        3,
        layers=16,
        mesh=kdist.mesh(pipe=2, data=2, model=inner),
        layout_map=CUT_INSIDE if inner > 1 else {},
        pipeline=pipeline,
        keep_gathered=keep,
        partition="slice",
    )
    live = analysed(model)
    layers = 8 if keep else 2  # of a stage, of a chunk of it
    for device in range(4 * inner):
        gathered = live.peak(f"/device:CPU:{device}", ["gathered"]).nbytes
        # Nobody asks for the gradient of the model's inputs: its first kernel is not kept for that.
        first = keep and device < 2 * inner
        assert gathered == (layers - first) * KERNEL / inner


@pytest.mark.parametrize("inner", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_stage_frees_the_gradients_of_a_chunk_when_it_is_done(inner: int) -> None:
    """At level 2: two chunks of four, of which one is on its way, and half of what is summed."""
    pipeline = kdist.PipelineConfig(micro_batches=2, schedule="interleaved", chunks=4)
    whole, freed = (
        analysed(
            prepared(
                level,
                layers=16,
                mesh=kdist.mesh(pipe=2, data=2, model=inner),
                layout_map=CUT_INSIDE if inner > 1 else {},
                pipeline=pipeline,
            )
        )
        for level in (1, 2)
    )
    stage = 8 * KERNEL / inner
    for device in (f"/device:CPU:{n}" for n in range(4 * inner)):
        everything = whole.peak(device, ["gradient"]).nbytes
        assert stage <= everything <= stage + 8 * BIAS
        biases = everything - stage
        assert freed.peak(device, ["gradient"]).nbytes <= stage / 2 + 2 * KERNEL / inner + biases
        most, all_along = freed.peak(device).nbytes, whole.peak(device).nbytes
        # A kernel's part is gone by the time that most is there: over inner axes that is while the
        # second chunk from the front computes, beside one that is on its way.
        assert most <= all_along - KERNEL / inner + COUNTERS
        assert inner > 1 or most <= 0.85 * all_along


def test_keep_gathered_keeps_all() -> None:
    live = analysed(prepared(3, replicas=2, layers=4, keep_gathered=True, partition="slice"))
    # But the first layer's kernel, at which no backward pass looks.
    assert live.peak("/device:CPU:0", ["gathered"]).nbytes == 3 * KERNEL


def test_whole_parameters_dealt_out() -> None:
    model = prepared(3, replicas=2, layers=4, partition="parameter")
    live = analysed(model)
    # Half of the gradients; the chunk at work, and what is in flight.
    most_gradients = live.peak("/device:CPU:0", ["gradient"]).nbytes
    assert most_gradients <= 2 * KERNEL + 4 * BIAS + chunk(model) + bucket(model)
    # What one device has is passed on as it is: gathering takes no memory where it is shared.
    assert live.peak("/device:CPU:0", ["gathered"]).nbytes <= 4 * BIAS
    own = with_edges(live, lambda op: op, shared_memory=False)
    assert own.peak("/device:CPU:0", ["gathered"]).nbytes <= 2 * chunk(model)


# -- inspect -------------------------------------------------------------------------------------


def test_looking_changes_nothing() -> None:
    model = prepared(2, replicas=2, layers=2)
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    model.train_on_batch(x, x)
    before = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    metrics = [v.numpy() for m in model.metrics for v in m.variables]
    kdist.inspect(model)
    after = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert metrics == [v.numpy() for m in model.metrics for v in m.variables]


def test_it_prints_and_draws(at_level: Callable, tmp_path: Path) -> None:
    inspection = kdist.inspect(at_level(3), ROWS)
    text = str(inspection)
    for title in ("weights", "optimizer state", "gradients", "gathered", "both", "step"):
        assert title in text
    assert "not counted" not in text
    pytest.importorskip("matplotlib")
    inspection.save_memory(tmp_path / "memory.png", "level 3")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"run_eagerly": True}, "no graph"), ({"jit_compile": True}, "XLA"), ({}, "not trained")],
)
def test_what_cannot_be_read_is_said(options: dict[str, Any], reason: str) -> None:
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2))
    model = kdist.parallelize(build(2), config)
    model.compile("sgd", "mse", **options)
    if options:
        batch = np.zeros((ROWS, WIDTH), np.float32)
        attached(model).prepare("train", (batch, batch, None))
    inspection = kdist.inspect(model)
    assert reason in inspection.not_analysed
    assert {m.gradients for m in inspection.memory} == {None}
    assert f"not counted: {inspection.not_analysed}" in str(inspection)


def test_a_look_up_in_a_program_of_one_device() -> None:
    """Its nodes become the step's own, and name neighbours by the names that they had before."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Embedding(20, 4)])
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=1))).compile("sgd", "mse")
    model.train_on_batch(np.zeros((4, 6), "int32"), np.zeros((4, 6, 4)))
    (found,) = kdist.inspect(model, 4).memory
    rows = 4 * 6 * 4 * 4
    assert rows <= (found.activations or 0) <= 6 * rows
