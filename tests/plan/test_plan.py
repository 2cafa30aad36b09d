"""The plan's numbers, against arithmetic by hand, the buffers that exist and the executed step."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.display.tables import readable
from kdist.graphs import executed
from kdist.plan.between_replicas import inner_parts
from kdist.plan.plan import Plan, Traffic, make_plan
from kdist.sharding.device import Device
from kdist.sharding.layout import WeightLayout
from kdist.sharding.mesh import Topology
from kdist.sharding.owners import assign_owners
from kdist.sharding.placement import Placement, place

import keras
import numpy as np
import pytest
import rich.console

from ..parity import CUTS, mlp
from ..runtime.step_parts import first_step

X, Y = np.ones((8, 6), np.float32), np.ones((8, 3), np.float32)
SLICED = {"up/kernel": (None, "data"), "down/kernel": ("data", None)}


def topology(**axes: int) -> Topology:
    return Topology.from_mesh(kdist.mesh(**axes))


def placed(mesh: Topology, *dims: Any) -> Placement:
    """A float32 weight of 8 x 8, 256 bytes."""
    return place("weight", (8, 8), 4, WeightLayout(dims), mesh)


def plan_of(mesh: Topology, weights: list[Placement], whole: bool = False) -> Plan:
    units = assign_owners(weights, [whole] * len(weights), mesh)
    return make_plan(mesh, weights, range(len(weights)), units)


def traffic(plan: Plan) -> dict[str, tuple[int, int]]:
    return {t.what: (t.messages, t.nbytes) for t in plan.traffic()}


def trained(axes: dict[str, int], cuts: Any, optimizer: str = "Adam") -> tuple[Any, ...]:
    """A trained model, the parts of its step, and the step as it was executed."""
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts)
    model = kdist.parallelize(mlp(), config)
    model.compile(getattr(keras.optimizers, optimizer)(), "mse")
    parts, functions = first_step(model, X, Y)
    step = executed.largest([f for f in functions if len(f.select(executed.ASSIGNMENTS)) > 5])
    return model, parts, step


# -- by hand -------------------------------------------------------------------------------------


def test_a_weight_that_is_whole_everywhere() -> None:
    mesh = topology(data=4)
    plan = plan_of(mesh, [placed(mesh, None, None)])
    # Three gradients come to the owner, three new values go out; an all-reduce moves as much.
    assert traffic(plan) == {"reduce": (3, 768), "broadcast": (3, 768)}
    assert [d.parameter_bytes for d in plan.devices()] == [256] * 4
    assert [d.updated_bytes for d in plan.devices()] == [256, 0, 0, 0]
    assert {t.axis for t in plan.traffic()} == {"data"}


def test_a_weight_that_is_cut_over_an_inner_axis() -> None:
    mesh = topology(data=2, model=2)
    plan = plan_of(mesh, [placed(mesh, None, "model")])
    # Two halves, each updated by one of its two holders.
    assert traffic(plan) == {"reduce": (2, 256), "broadcast": (2, 256)}
    assert [d.parameter_bytes for d in plan.devices()] == [128] * 4
    assert sorted(d.updated_bytes for d in plan.devices()) == [0, 0, 128, 128]


def test_a_weight_that_is_sliced_over_data() -> None:
    mesh = topology(data=4)
    plan = plan_of(mesh, [placed(mesh, "data", None)])
    # Every device gets three quarters before use, and owns the update of its own.
    assert traffic(plan) == {"reduce": (12, 768), "gather": (12, 768)}
    assert [(d.parameter_bytes, d.updated_bytes) for d in plan.devices()] == [(64, 64)] * 4


def test_an_update_of_a_whole_tensor_gets_all_its_parts() -> None:
    mesh = topology(data=2, model=2)
    plan = plan_of(mesh, [placed(mesh, None, "model")], whole=True)
    # Four halves of a gradient exist, the owner's own among them; each device keeps a half.
    assert traffic(plan) == {"reduce": (3, 384), "broadcast": (3, 384)}
    assert [d.updated_bytes for d in plan.devices()] == [256, 0, 0, 0]


def test_parts_of_a_gradient() -> None:
    mesh = topology(data=2, model=2)
    cut = [((0, 0), 128), ((0, 1), 128), ((1, 0), 128), ((1, 1), 128)]
    assert inner_parts(placed(mesh, None, "model")) == cut
    assert inner_parts(placed(mesh, None, None)) == [((0, 0), 256), ((1, 0), 256)]
    assert inner_parts(placed(mesh, "data", "model")) == cut


def test_updates_are_balanced_by_bytes() -> None:
    mesh = topology(data=4)
    sizes = (64, 48, 40, 16, 16, 8)
    weights = [place(f"w{n}", (n,), 4, WeightLayout((None,)), mesh) for n in sizes]
    plan = plan_of(mesh, weights)
    assert [d.updated_bytes // 4 for d in plan.devices()] == [64, 48, 40, 40]
    assert sum(d.updates for d in plan.devices()) == len(sizes)


def test_one_replica_sends_nothing() -> None:
    mesh = topology(model=2)
    assert plan_of(mesh, [placed(mesh, None, "model")]).traffic() == []


def test_without_replicas_values_go_over_inner_axes() -> None:
    mesh = topology(model=2)
    (one,) = plan_of(mesh, [placed(mesh, None, None)]).traffic()
    assert (one.what, one.axis, one.messages) == ("broadcast", "model", 1)


# -- against what exists and what ran ------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "cuts"),
    [
        ({"data": 4}, None),
        ({"data": 4}, SLICED),
        ({"data": 2, "model": 2}, CUTS),
        ({"model": 4}, CUTS),
    ],
    ids=["data", "sliced over data", "data x model", "model"],
)
def test_bytes_are_those_of_the_buffers(axes: dict[str, int], cuts: Any) -> None:
    model, _, _ = trained(axes, cuts)
    parallel = attached(model)
    weights, slots = Counter[str](), Counter[str]()
    for entry in parallel.entries.values():
        for local in entry.locals.values():
            value = local.value
            weights[Device.parse(value.device).name] += value.numpy().nbytes
    for one in parallel.update.jobs.local[0]:
        for variable in one.optimizer.variables:
            if variable.shape != ():
                slots[Device.parse(variable.value.device).name] += variable.numpy().nbytes
    plans = model.plan().devices()
    assert dict(weights) == {d.device: d.parameter_bytes for d in plans}
    # Adam keeps two moments of what it updates.
    assert dict(slots) == {d.device: 2 * d.updated_bytes for d in plans if d.updates}


@pytest.mark.parametrize(
    ("axes", "cuts", "optimizer"),
    [
        ({"data": 4}, SLICED, "Adam"),
        ({"data": 2, "model": 2}, CUTS, "Lamb"),
        ({"model": 2}, CUTS, "Lamb"),
    ],
    ids=["sliced over data", "whole updates, data x model", "whole updates, model"],
)
def test_traffic_is_what_the_step_sends(axes: Any, cuts: Any, optimizer: str) -> None:
    model, parts, step = trained(axes, cuts, optimizer)
    names = {"reduce": "gradient", "join": "join", "broadcast": "value", "gather": "gather"}
    table = parts.table(step)
    assert not [what for what in table if what.startswith("unexplained")], table
    sent = {
        what: (table[name], parts.nbytes(step, name))
        for what, name in names.items()
        if name in table
    }
    assert sent == traffic(model.plan())


@pytest.mark.parametrize(
    ("axes", "optimizer", "state_on"),
    [({"data": 2, "model": 2}, "Lamb", "device"), ({"data": 2, "model": 2}, "Adam", "host")],
    ids=["whole updates", "state on the host"],
)
def test_whole_copies_that_updates_need_are_weights_of_a_device(
    axes: dict[str, int], optimizer: str, state_on: Any
) -> None:
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=CUTS,
        optimizer=kdist.OptimizerConfig(state_on=state_on),
    )
    model = kdist.parallelize(mlp(), config)
    model.compile(getattr(keras.optimizers, optimizer)(), "mse")
    planned = {one.device: one.parameter_bytes for one in model.plan().devices()}
    model.train_on_batch(X, Y)
    assert {one.device: one.parameters for one in kdist.inspect(model).memory} == planned


def test_the_plan_before_training_is_the_plan_after() -> None:
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=CUTS)
    model = kdist.parallelize(mlp(), config)
    model.compile("adam", "mse")
    before = model.plan()
    model.train_on_batch(X, Y)
    assert model.plan() == before
    assert attached(model).update.jobs.units == before.units


def test_an_optimizer_decides_what_is_updated_whole() -> None:
    config = kdist.ParallelConfig(mesh=kdist.mesh(model=2), layout_map=CUTS)
    model = kdist.parallelize(mlp(), config)
    model.compile("adam", "mse")
    assert {u.shard is None for u in model.plan().units} == {False}
    model.compile(keras.optimizers.Lamb(), "mse")
    assert {u.shard is None for u in model.plan().units} == {True, False}


def test_a_model_without_weights_has_no_plan() -> None:
    model = keras.Sequential([keras.layers.Dense(2)])
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    with pytest.raises(ValueError, match="Build the model.*Received: model="):
        model.plan()


# -- printed -------------------------------------------------------------------------------------


def printed(plan: Plan) -> str:
    text = io.StringIO()
    plan.summary(rich.console.Console(file=text, width=100))
    return text.getvalue()


def test_the_summary_has_the_numbers() -> None:
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=CUTS)
    model = kdist.parallelize(mlp(), config)
    plan = model.plan()
    lines = printed(plan).splitlines()
    assert lines[0].startswith("Plan") and "data" in lines[0] and "model" in lines[0]
    assert "weights: 4, 1 of them whole on every device" in printed(plan)
    (kernel,) = [line for line in lines if "up/kernel" in line]
    assert "(6, 8)" in kernel and "(6, 4)" in kernel and "'model'" in kernel
    devices = [line for line in lines if "/device:CPU:" in line]
    for line, device in zip(devices, plan.devices(), strict=True):
        assert device.device in line and readable(device.parameter_bytes) in line
        assert readable(device.updated_bytes) in line
    for one in plan.traffic():
        (line,) = [line for line in lines if one.what in line]
        assert str(one.messages) in line and readable(one.nbytes) in line


def test_the_summary_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = topology(data=2)
    plan_of(mesh, [placed(mesh, None, None)]).summary()
    assert "broadcast" in capsys.readouterr().out


def test_notes_are_printed() -> None:
    mesh = topology(data=2)
    assert "note: why" in printed(make_plan(mesh, [], [], [], notes=["why"]))


def test_traffic_is_comparable() -> None:
    assert Traffic("reduce", "data", 1, 3, 768) == Traffic("reduce", "data", 1, 3, 768)
