"""What an executed step with optimizer state on the host keeps where, and sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import kdist
from kdist._compat import run_metadata
from kdist.api.attached import attached
from kdist.graphs import executed
from kdist.graphs.executed import ASSIGNMENTS
from kdist.report import memory

import keras
import numpy as np
import pytest

WIDTH, BATCH = 32, 8


def trained(level: int, mesh: dict[str, int]) -> tuple[keras.Model, executed.ExecutedFunction]:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((WIDTH,))
    for name in ("up", "down"):
        x = keras.layers.Dense(WIDTH, name=name)(x)
    cut = {"threshold_kb": 0} if level else {}
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**mesh),
        layout_map={"up/kernel": (None, "model")} if "model" in mesh else {},
        optimizer=kdist.OptimizerConfig(level=level, state_on="host", **cut),
    )
    model = kdist.parallelize(keras.Model(inputs, x), config)
    model.compile("adam", "mse")
    data = np.ones((BATCH, WIDTH), "float32")
    return model, executed.largest(executed.watch(lambda: model.train_on_batch(data, data)))


@pytest.mark.parametrize(
    ("level", "mesh"), [(0, {"data": 2}), (3, {"data": 2}), (0, {"data": 2, "model": 2})]
)
def test_slots_are_on_the_host_and_bytes_are_as_planned(level: int, mesh: dict[str, int]) -> None:
    model, step = trained(level, mesh)
    parallel = attached(model)
    host, weights = parallel.topology.host, sum(4 * np.prod(v.shape) for v in model.weights)
    found = {one.device: one for one in memory.measure(parallel, None)}
    assert {found[d].slots for d in parallel.topology.devices} == {0}
    assert found[host].slots >= 2 * weights
    assert found[host].parameters == weights
    traffic = {one.what: one for one in model.plan().traffic()}
    tensors = [t for t in step.transfers if t.shape != () and not t.control]
    down = [t for t in tensors if t.target == host]
    up = [t for t in tensors if t.source == host]
    assert len(down) == traffic["reduce"].messages
    if "model" in mesh:  # elsewhere calls hide the sizes of what they return
        assert sum(t.nbytes or 0 for t in down) == traffic["reduce"].nbytes
    assert sum(t.nbytes or 0 for t in up) == traffic["broadcast"].nbytes
    assert len(up) == traffic["broadcast"].messages
    assert step.count(ASSIGNMENTS)[host] > 0


def deep(
    level: int, compression: Any = None, **fusion: Any
) -> tuple[keras.Model, Callable[[], Any]]:
    """Six layers, of which some are a bucket, and a first step to take."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((WIDTH,))
    for n in range(6):
        x = keras.layers.Dense(WIDTH, name=f"layer_{n}")(x)
    cut = {"threshold_kb": 0} if level == 3 else {}
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=2),
        optimizer=kdist.OptimizerConfig(level=level, state_on="host", **cut),
        fusion=kdist.FusionConfig(**fusion),
        compression=compression,
    )
    model = kdist.parallelize(keras.Model(inputs, x), config)
    model.compile("adam", "mse")
    data = np.ones((BATCH, WIDTH), "float32")
    return model, lambda: model.train_on_batch(data, data)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_buckets_travel_each_way(level: int) -> None:
    """Two layers a bucket: so many messages down and up, not one per tensor."""
    model, step = deep(level, mode="size", size_mb=2 * 4 * (WIDTH + 1) * WIDTH / 2**20)
    executed_step = executed.largest(executed.watch(step))
    host = attached(model).topology.host
    tensors = [t for t in executed_step.transfers if t.shape != () and not t.control]
    assert len(model.plan().buckets) == 3
    assert sum(t.target == host for t in tensors) == 3 * 2
    assert sum(t.source == host for t in tensors) == 3 * 2
    traffic = {one.what: one for one in model.plan().traffic()}
    assert traffic["reduce"].messages == traffic["broadcast"].messages == 3 * 2
    whole = sum(4 * np.prod(v.shape) for v in model.weights)
    assert traffic["reduce"].nbytes == 2 * whole
    assert traffic["broadcast"].nbytes == (whole if level == 3 else 2 * whole)
    assert sum(t.nbytes or 0 for t in tensors if t.source == host) == traffic["broadcast"].nbytes


def _before(names: Sequence[str], nodes: dict[str, Any]) -> set[str]:
    """The nodes of one device that some of them wait for, these included."""
    waiting, seen = [*names], set()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += [one.lstrip("^").split(":")[0] for one in nodes[name].input]
    return seen


def _graphs(step: Callable[[], Any]) -> list[Any]:
    """The partition graphs of the largest function that runs."""
    found = [one.partition_graphs for one in run_metadata.function_graphs(step)]
    return max(found, key=lambda graphs: sum(len(graph.node) for graph in graphs))


def test_buckets_leave_while_others_are_computed() -> None:
    """Of the calls that compute in a replica, each bucket waits for more than the one before."""
    model, step = deep(0, mode="size", size_mb=2 * 4 * (WIDTH + 1) * WIDTH / 2**20)
    graphs = _graphs(step)
    host = attached(model).topology.host
    waits = []
    for graph in graphs:
        nodes = {one.name: one for one in graph.node}
        for node in graph.node:
            if node.op == "_Send" and node.attr["recv_device"].s.decode().endswith(host):
                before = _before([node.name], nodes)
                waits.append({n for n in before if nodes[n].op.endswith("PartitionedCall")})
    numbers = sorted(len(one) for one in waits if one)
    assert len(numbers) == 3 * 2
    assert len(set(numbers)) == 3, numbers


@pytest.mark.parametrize("level", [0, 1])
def test_values_leave_while_other_gradients_are_on_their_way(level: int) -> None:
    """What a bucket of values waits for is its own gradients, from both replicas, and no others."""
    model, step = deep(level, mode="size", size_mb=2 * 4 * (WIDTH + 1) * WIDTH / 2**20)
    graphs = _graphs(step)
    host = attached(model).topology.host
    arrived = []
    for graph in graphs:
        nodes = {one.name: one for one in graph.node}
        for node in graph.node:
            if node.op == "_Send" and node.attr["send_device"].s.decode().endswith(host):
                before = _before([node.name], nodes)
                arrived.append(frozenset(n for n in before if nodes[n].op == "_Recv"))
    values = [one for one in arrived if one]
    everywhere = frozenset.intersection(*values)  # the learning rate
    gradients = [one - everywhere for one in values]
    assert len(gradients) == 3 * 2
    assert {len(one) for one in gradients} == {2}
    assert len(frozenset.union(*gradients)) == 3 * 2
    assert len(set(gradients)) == 3


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_gradients_travel_in_16_bits(kind: Any) -> None:
    """Half the bytes down, and values up as they are: read from the executed graph."""
    down, up = {}, {}
    for compression in (None, kdist.CompressionConfig(patterns={".*kernel": kind})):
        model, first = deep(0, compression, mode="none")
        step = executed.largest(executed.watch(first))
        host = attached(model).topology.host
        tensors = [t for t in step.transfers if t.shape != () and not t.control]
        key = compression is not None
        down[key] = [t.dtype for t in tensors if t.target == host]
        up[key] = sum(t.nbytes or 0 for t in tensors if t.source == host)
    narrow = {"bf16": "bfloat16", "fp16": "float16"}[kind]
    assert set(down[False]) == {"float32"}
    assert down[True].count(narrow) == 2 * 6, "a kernel of each layer, of each replica"
    assert up[True] == up[False]
    traffic = {one.what: one for one in model.plan().traffic()}
    biases, kernels = 6 * 4 * WIDTH, 6 * 2 * WIDTH**2
    scales = 2 * 6 * 4 if kind == "fp16" else 0
    assert traffic["reduce"].nbytes == 2 * (biases + kernels) + scales


def test_factors_are_refused() -> None:
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=2),
        optimizer=kdist.OptimizerConfig(state_on="host"),
        compression=kdist.CompressionConfig(patterns={".*kernel": kdist.PowerSGD(rank=2)}),
    )
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(64 * WIDTH)])
    with pytest.raises(ValueError, match="Received: state_on='host' with PowerSGD for"):
        kdist.parallelize(model, config).plan()


def test_what_is_not_listed_is_refused() -> None:
    with pytest.raises(ValueError, match="'device' or 'host'. Received: state_on='disk'"):
        kdist.OptimizerConfig(state_on="disk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Received: partition='slice', state_on='host', level=1"):
        kdist.OptimizerConfig(level=1, partition="slice", state_on="host")
