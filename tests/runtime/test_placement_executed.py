"""Where the parts of a training step run and what travels, read from what TensorFlow executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from kdist.graphs import executed
from kdist.graphs.executed import PRODUCTS
from kdist.runtime import plain_runner

import numpy as np
import pytest
import tensorflow as tf

from .placement_checks import (
    BACKWARD,
    BLOCKS,
    FEATURES,
    FORWARD,
    OUTPUTS,
    ROWS,
    Trained,
    X,
    Y,
    check_batch_is_cut,
    check_collectives,
    check_every_device_computes,
    check_every_part,
    check_inner_transfers,
    check_transfers,
    check_updates,
    compiled,
    expected_transfers,
    trained,
)
from .step_parts import recording

ONE_GRAPH = [{"data": 4}, {"data": 8}]
DTENSOR = [{"data": 2, "model": 2}, {"data": 2, "model": 4}]


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


# -- one graph over all devices ------------------------------------------------------------------


def test_every_device_computes_forward_and_backward(one_graph: Trained) -> None:
    check_every_device_computes(one_graph)
    assert executed.computing_devices([one_graph.step]) == set(one_graph.topology.devices)


def test_updates_are_where_the_plan_says(any_mesh: Trained) -> None:
    check_updates(any_mesh)


def test_transfers_are_the_planned_ones(any_mesh: Trained) -> None:
    check_transfers(any_mesh)
    check_batch_is_cut(any_mesh, X.nbytes + Y.nbytes)


def test_programs_are_kept_as_one_node_for_each_chunk(one_graph: Trained) -> None:
    """The forward pass is one with the head's gradients; each other Dense layer has a chunk."""
    products = one_graph.step.select(PRODUCTS)
    assert len({n.call for n in products}) == one_graph.topology.data_size * (1 + 2 * BLOCKS)
    assert "" not in {n.call for n in products}


def test_programs_without_overlap_are_kept_as_one_node_each() -> None:
    run = trained({"data": 4}, overlap=False)
    check_every_device_computes(run)
    calls = {n.call for n in run.step.select(PRODUCTS)}
    assert len(calls) == 4
    assert "" not in calls


def test_inlined_programs_compute_on_the_same_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the bodies are no calls, each product's device is TensorFlow's own word."""
    monkeypatch.setattr(
        plain_runner.PlainRunner,
        "_function",
        lambda self, fn, jit, seeds=0: tf.function(fn, autograph=False),
    )
    run = trained({"data": 4}, overlap=False)
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
    # Each slice's number of rows; its share of each of the one loss's terms.
    expected["data"] += 3
    expected["share"] = 3
    assert run.parts.table(run.step) == expected


# -- slices with inner axes ----------------------------------------------------------------------


def test_every_device_computes_its_part(dtensor: Trained) -> None:
    check_every_part(dtensor)


def test_a_slice_s_devices_exchange_what_its_collectives_need(dtensor: Trained) -> None:
    check_inner_transfers(dtensor)


def test_collectives_are_those_of_megatron(dtensor: Trained) -> None:
    check_collectives(dtensor)
