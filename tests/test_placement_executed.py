"""Where the parts of a training step run and what travels, read from what TensorFlow executed.

Each check is a function, so that the tests at the end can show that it fails on an engine that is
wrong in just that way while its losses stay right.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import kdist
from kdist import executed, parallel, plain, spmd_runner
from kdist.batch import SplitBatch
from kdist.executed import ASSIGNMENTS, PRODUCTS, ExecutedFunction
from kdist.mesh import Topology
from kdist.optimizer import jobs
from kdist.parallel import attached
from kdist.step import Step

import keras
import numpy as np
import pytest
import tensorflow as tf

from .step_parts import Parts, first_step, recording

ROWS, FEATURES, HIDDEN, OUTPUTS, BLOCKS = 16, 8, 32, 4, 2
# A step of Adam writes the weight and its two moments.
MOMENTS = 2
WRITES_PER_UPDATE = 1 + MOMENTS
METRIC_VARIABLES = 2  # mean absolute error: sum and count
LOSS_VARIABLES = 2
# Forward one product a Dense layer; backward two, and one less where the input needs no gradient:
# here every Dense layer's input comes out of layers with weights.
FORWARD, BACKWARD = 2 * BLOCKS + 1, 2 * (2 * BLOCKS + 1)
FIRST = "/device:CPU:0"
CUTS = {
    r".*up_\d/kernel": (None, "model"),
    r".*up_\d/bias": ("model",),
    r".*down_\d/kernel": ("model", None),
}
X = np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(ROWS, OUTPUTS)).astype(np.float32)
ONE_GRAPH = [{"data": 4}, {"data": 8}]
DTENSOR = [{"data": 2, "model": 2}, {"data": 2, "model": 4}]


class Trained(NamedTuple):
    """A model after its first step, and what that executed."""

    model: keras.Model
    parts: Parts
    functions: list[ExecutedFunction]

    @property
    def step(self) -> ExecutedFunction:
        """The step's one graph; over DTensor all of it that comes after the programs."""
        return executed.largest([f for f in self.functions if self.updates(f)])

    @staticmethod
    def updates(function: ExecutedFunction) -> bool:
        """Whether a function writes many variables."""
        return len(function.select(ASSIGNMENTS)) > 5

    @property
    def topology(self) -> Topology:
        return attached(self.model).topology


def blocks(stateful: bool = False) -> keras.Model:
    """Residual blocks that widen and narrow, as in a transformer's feed-forward layers."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    x = inputs = keras.Input((FEATURES,))
    for n in range(BLOCKS):
        hidden = layers.LayerNormalization(name=f"norm_{n}")(x)
        hidden = layers.Dense(HIDDEN, "gelu", name=f"up_{n}")(hidden)
        if stateful:
            hidden = layers.BatchNormalization(name=f"batch_norm_{n}")(hidden)
            hidden = layers.Dropout(0.5, name=f"dropout_{n}")(hidden)
        x = layers.Add(name=f"add_{n}")([x, layers.Dense(FEATURES, name=f"down_{n}")(hidden)])
    return keras.Model(inputs, layers.Dense(OUTPUTS, name="head")(x), name="blocks")


def compiled(axes: dict[str, int], stateful: bool = False) -> keras.Model:
    cuts = CUTS if "model" in axes else None
    # Kernels travel alone; vectors, which have few bytes, together.
    fusion = kdist.FusionConfig(mode="size", size_mb=1 / 1024)
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts, fusion=fusion)
    model = kdist.parallelize(blocks(stateful), config)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def trained(axes: dict[str, int], stateful: bool = False) -> Trained:
    model = compiled(axes, stateful)
    return Trained(model, *first_step(model, X, Y))


def name(axes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())


@pytest.fixture(scope="module")
def runs() -> Iterator[Callable[[dict[str, int]], Trained]]:
    """One first step per mesh, for all tests that only read it."""
    made: dict[str, Trained] = {}

    def run(axes: dict[str, int]) -> Trained:
        if name(axes) not in made:
            made[name(axes)] = trained(axes)
        return made[name(axes)]

    yield run
    made.clear()


@pytest.fixture(params=ONE_GRAPH, ids=name)
def one_graph(request: pytest.FixtureRequest, runs: Callable) -> Trained:
    return runs(request.param)


@pytest.fixture(params=DTENSOR, ids=name)
def dtensor(request: pytest.FixtureRequest, runs: Callable) -> Trained:
    return runs(request.param)


@pytest.fixture(params=[*ONE_GRAPH, *DTENSOR], ids=name)
def any_mesh(request: pytest.FixtureRequest, runs: Callable) -> Trained:
    return runs(request.param)


# -- the checks ----------------------------------------------------------------------------------


def check_every_device_computes(run: Trained) -> None:
    """Each device runs all products of its slice's program, forward and backward, once."""
    products = [n for f in run.functions for n in f.select(PRODUCTS)]
    for backward, expected in ((False, FORWARD), (True, BACKWARD)):
        found = Counter(n.device for n in products if n.backward is backward)
        assert found == dict.fromkeys(run.topology.devices, expected)


def weight_bytes(run: Trained) -> dict[str, int]:
    """Bytes of weights that an optimizer wrote, per device."""
    written: Counter[str] = Counter()
    for node in run.step.select(ASSIGNMENTS):
        if run.parts.made_in.get(node.name) == "update" and run.parts.writes_weight(node.name):
            value = run.parts.graph.get_operation_by_name(node.name).inputs[1]
            written[node.device] += value.shape.num_elements() * value.dtype.size
    return dict(written)


def check_updates(run: Trained) -> None:
    """Optimizer math is where the plan says, balanced by bytes, and every copy is written."""
    plan = run.model.plan()
    devices = {d.device: d for d in plan.devices()}
    assert weight_bytes(run) == {d.device: d.updated_bytes for d in devices.values()}
    dealt = [sum(plan.unit_bytes(plan.units[n]) for n in b.units[0]) for b in plan.buckets]
    biggest = max(*dealt, *(plan.unit_bytes(u) for u in plan.units))
    loads = [d.updated_bytes for d in devices.values()]
    assert max(loads) - min(loads) <= biggest
    copies = Counter[str]()
    for unit in plan.units:
        placement = plan.weights[plan.trainable[unit.variable]]
        for s, k in placement.shards[unit.shard].holders:
            if (s, k) != unit.owner:
                copies[run.topology.slices[s].devices[k]] += 1
    expected = {
        d.device: WRITES_PER_UPDATE * d.updates + bool(d.updates) + copies[d.device]
        for d in devices.values()
    }
    for bucket in plan.buckets:
        # Its moments are one vector each.
        for (s, k), units in zip(bucket.owners, bucket.units):
            expected[run.topology.slices[s].devices[k]] -= MOMENTS * (len(units) - 1)
    expected[FIRST] += METRIC_VARIABLES + LOSS_VARIABLES
    assert run.step.count(ASSIGNMENTS) == expected


def expected_transfers(
    run: Trained, leaves: int, statistics: int = 0, seeds: int = 0
) -> dict[str, int]:
    """The transfers of a step, by what they are for.

    Args:
        run: The step; its first slice begins on the first device, where tensors without a device
            of their own are.
        leaves: Tensors of a batch that the step cuts over the slices.
        statistics: Non-trainable weights that the forward pass updates.
        seeds: Seed generators.
    """
    topology, plan = run.topology, run.model.plan()
    others = topology.data_size - 1
    traffic = {t.what: t.messages for t in plan.traffic()}
    updating = {topology.slices[u.owner[0]].devices[u.owner[1]] for u in plan.units}
    expected = {
        # What the plan counts: each unit's gradient to its owner, each new value back.
        "gradient": traffic["reduce"],
        "value": traffic["broadcast"],
        # Each slice but the first gets its part of the batch, and returns its part of the loss.
        "data": leaves * others,
        "loss": others,
        # The state of the metrics goes from slice to slice and back to the first.
        "metric": METRIC_VARIABLES * topology.data_size,
        # Once per device that updates something.
        "learning rate": len(updating - {FIRST}),
        "seed": seeds * others,
        # Statistics go to the first slice, and their mean to all.
        "state": 2 * statistics * others,
        # Every device tells the first when it is done.
        "control": len(topology.devices) - 1,
    }
    return {what: count for what, count in expected.items() if count}


def check_transfers(run: Trained, leaves: int = 2, **state: int) -> None:
    """The step's transfers are the planned ones, the few others by formula, and no more."""
    assert run.parts.table(run.step) == expected_transfers(run, leaves, **state)
    planned = {t.what: t.nbytes for t in run.model.plan().traffic()}
    assert run.parts.nbytes(run.step, "gradient") == planned["reduce"]
    assert run.parts.nbytes(run.step, "value") == planned["broadcast"]


def check_batch_is_cut(run: Trained, whole: int) -> None:
    """Of the batch, each slice but the first is sent its rows, not all of them.

    Args:
        run: The step.
        whole: Bytes of what the step cuts.
    """
    size = run.topology.data_size
    assert run.parts.nbytes(run.step, "data") == whole * (size - 1) // size


# -- one graph over all devices ------------------------------------------------------------------


def test_every_device_computes_forward_and_backward(one_graph: Trained) -> None:
    check_every_device_computes(one_graph)
    assert executed.computing_devices([one_graph.step]) == set(one_graph.topology.devices)


def test_updates_are_where_the_plan_says(any_mesh: Trained) -> None:
    check_updates(any_mesh)


def test_transfers_are_the_planned_ones(one_graph: Trained) -> None:
    check_transfers(one_graph)
    check_batch_is_cut(one_graph, X.nbytes + Y.nbytes)


def test_programs_are_kept_as_one_node_each(one_graph: Trained) -> None:
    products = one_graph.step.select(PRODUCTS)
    assert len({n.call for n in products}) == one_graph.topology.data_size
    assert "" not in {n.call for n in products}


def test_inlined_programs_compute_on_the_same_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the bodies are no calls, each product's device is TensorFlow's own word."""
    monkeypatch.setattr(
        plain.PlainRunner, "_function", lambda self, fn, jit: tf.function(fn, autograph=False)
    )
    run = trained({"data": 4})
    assert {n.call for n in run.step.select(PRODUCTS)} == {""}
    found = Counter(n.device for n in run.step.select(PRODUCTS))
    assert found == dict.fromkeys(run.topology.devices, FORWARD + BACKWARD)


def test_state_travels_once_each_way() -> None:
    run = trained({"data": 4}, stateful=True)
    check_transfers(run, statistics=2 * BLOCKS, seeds=BLOCKS)


def test_fit_sends_what_a_single_batch_sends() -> None:
    model = compiled({"data": 4})
    with recording(model) as parts:
        functions = executed.watch(lambda: model.fit(X, Y, batch_size=ROWS, verbose=0))
    run = Trained(model, parts, functions)
    check_transfers(run)
    check_batch_is_cut(run, X.nbytes + Y.nbytes)


def test_batches_of_unknown_size_send_their_shares_too() -> None:
    model = compiled({"data": 4})
    with recording(model) as parts:
        rows = ROWS + ROWS // 2
        x, y = np.resize(X, (rows, FEATURES)), np.resize(Y, (rows, OUTPUTS))
        functions = executed.watch(lambda: model.fit(x, y, batch_size=ROWS, verbose=0))
    run = Trained(model, parts, functions)
    expected = expected_transfers(run, leaves=2)
    # Each slice's number of rows; its share of the rows, and of each of the one loss's terms.
    expected["data"] += 3
    expected["share"] = 2 * 3
    assert run.parts.table(run.step) == expected


# -- DTensor slices ------------------------------------------------------------------------------


def programs(run: Trained) -> list[ExecutedFunction]:
    return [f for f in run.functions if f.select(PRODUCTS)]


def test_every_device_computes_its_part(dtensor: Trained) -> None:
    check_every_device_computes(dtensor)
    assert not dtensor.step.select(PRODUCTS)
    part = HIDDEN // dtensor.topology.inner_size
    for device in dtensor.topology.devices:
        shapes = Counter(
            (re.search(r"(up|down|head)", n.name).group(), n.shape)
            for f in programs(dtensor)
            for n in f.select(PRODUCTS)
            if n.device == device and n.name.endswith("MatMul/MatMul_1") | n.backward
        )
        rows = ROWS // dtensor.topology.data_size
        # The gradients of the two kernels are parts of them, of whole rows of this slice.
        assert shapes["up", (FEATURES, part)] >= BLOCKS
        assert shapes["down", (part, FEATURES)] >= BLOCKS
        assert shapes["down", (rows, part)] >= BLOCKS


def test_transfers_after_the_programs_are_the_planned_ones(dtensor: Trained) -> None:
    # The programs have the inputs; what is sent here are the labels, which the metric needs.
    check_transfers(dtensor, leaves=1)
    check_batch_is_cut(dtensor, Y.nbytes)


def test_nothing_else_travels_around_a_dtensor_step(dtensor: Trained) -> None:
    """Weights are read where they are; a program gets the number of its device and no more."""
    slices = dtensor.topology.slices
    others = [f for f in dtensor.functions if len(f.nodes) > 20 and f is not dtensor.step]
    readers = [f for f in others if not f.select(PRODUCTS)]
    assert len(readers) == 1
    assert len(readers[0].select("ReadVariableOp")) == len(dtensor.topology.devices) * len(
        dtensor.model.weights
    )
    assert readers[0].transfers == ()
    for function, one in zip(programs(dtensor), slices, strict=True):
        assert set(function.count(PRODUCTS)) == set(one.devices)
        sent = Counter((t.node, t.source, t.target) for t in function.transfers)
        assert sent == {("device_id", FIRST, d): 1 for d in one.devices if d != FIRST}


def test_collectives_are_those_of_megatron(dtensor: Trained) -> None:
    """One all-reduce forward and one backward per block (Shoeybi et al. 2019), and no other."""
    inspection = kdist.inspect(dtensor.model)
    for n in range(BLOCKS):
        assert inspection.count("all-reduce", f"down_{n}", "forward") == 1
        assert inspection.count("all-reduce", f"up_{n}", "backward") == 1
    assert len(inspection.collectives) == 2 * BLOCKS
    rows = ROWS // dtensor.topology.data_size
    assert {c.shape for c in inspection.collectives} == {(rows, FEATURES)}
    assert {c.axis for c in inspection.collectives} == {("model",)}


# -- that the checks can fail --------------------------------------------------------------------


@functools.cache
def plain_loss() -> float:
    """The first loss of the same model on one device."""
    model = blocks()
    model.compile("sgd", "mse")
    return float(model.evaluate(X, Y, batch_size=ROWS, verbose=0))


def assert_only(failing: Callable[[Trained], Any], run: Trained) -> None:
    """The loss is right, and a check fails."""
    loss = float(run.model.get_metrics_result()["loss"])
    assert loss == pytest.approx(plain_loss(), rel=1e-4)
    with pytest.raises(AssertionError):
        failing(run)


def test_work_on_the_first_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = property(lambda self: [self.topology.devices[0]] * self.topology.data_size)
    monkeypatch.setattr(plain.PlainRunner, "devices", devices)
    assert_only(check_every_device_computes, trained({"data": 4}))


def test_a_moved_update_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    update = parallel.DistributedUpdate

    def moved(optimizer: Any, entries: Any, topology: Any, units: Any, *rest: Any, **options: Any):
        owner = ((units[0].owner[0] + 1) % 4, 0)
        first = dataclasses.replace(units[0], owner=owner)
        return update(optimizer, entries, topology, (first, *units[1:]), *rest, **options)

    monkeypatch.setattr(parallel, "DistributedUpdate", moved)
    assert_only(check_updates, trained({"data": 4}))


def test_optimizer_math_on_another_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an `apply` outside of its device's scope."""
    local = jobs.LocalOptimizer

    def elsewhere(logical: Any, device: str, *rest: Any) -> Any:
        one = local(logical, device, *rest)
        one.device = FIRST
        return one

    monkeypatch.setattr(jobs, "LocalOptimizer", elsewhere)
    assert_only(check_transfers, trained({"data": 4}))


@pytest.mark.parametrize("part", ["_total", "_logs"])
def test_a_stray_transfer_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(Step, part)

    def through_another_device(self: Step, *args: Any) -> Any:
        result = right(self, *args)
        with tf.device("/device:CPU:3"):
            return tf.nest.map_structure(lambda t: t + 0.0 * tf.sin(t), result)

    monkeypatch.setattr(Step, part, through_another_device)
    assert_only(check_transfers, trained({"data": 4}))


def test_a_gradient_that_is_sent_to_all_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an all-reduce where a reduce is planned."""
    right = plain.add_gradients

    def everywhere(parts: Any, by_batch: bool) -> Any:
        with tf.device("/device:CPU:2"):
            there = tf.reduce_sum(tf.sin(right(parts, by_batch)))
        return right(parts, by_batch) + 0.0 * there

    monkeypatch.setattr(plain, "add_gradients", everywhere)
    assert_only(check_transfers, trained({"data": 4}))


def test_a_whole_batch_for_every_slice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Step.split

    def cut_there(self: Step, data: Any) -> SplitBatch:
        batch = right(self, data)
        rows = ROWS // self.topology.data_size
        parts = []
        for r, device in enumerate(self.runner.devices):
            with tf.device(device):
                x, y, _ = (None if t is None else t[r * rows : (r + 1) * rows] for t in batch.whole)
            parts.append((x, y, None))
        return dataclasses.replace(batch, parts=parts)

    monkeypatch.setattr(Step, "split", cut_there)
    assert_only(lambda run: check_batch_is_cut(run, X.nbytes + Y.nbytes), trained({"data": 4}))


def test_weights_that_pass_the_first_device_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As results of a `tf.function` do."""
    wrap = lambda function, signature: tf.function(function, autograph=False)  # noqa: E731
    monkeypatch.setattr(spmd_runner.tf.compat.v1, "wrap_function", wrap)
    run = trained({"data": 2, "model": 2})
    assert_only(test_nothing_else_travels_around_a_dtensor_step, run)


def test_another_cut_is_found() -> None:
    cuts = {r".*up_\d/kernel": ("model", None), r".*down_\d/kernel": (None, "model")}
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=cuts)
    model = kdist.parallelize(blocks(), config)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    run = Trained(model, *first_step(model, X, Y))
    assert_only(test_collectives_are_those_of_megatron, run)
    assert_only(test_every_device_computes_its_part, run)
