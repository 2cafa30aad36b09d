"""Sums over cards are NCCL's: what is built where TensorFlow would find them. Nothing runs here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist
from kdist._compat import dtensor_internals
from kdist.storage import nccl

import keras
import numpy as np
import pytest
import tensorflow as tf

Found = Callable[..., None]


class Gpu:
    """A logical device of a card."""

    device_type = "GPU"

    def __init__(self, number: int) -> None:
        self.name = f"/device:GPU:{number}"


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Found:
    """Has TensorFlow find cards, each cut into so many logical devices (None: not cut)."""
    monkeypatch.delenv(nccl.SWITCH, raising=False)

    def found(*parts: int | None, cuda: bool = True) -> None:
        logical = [Gpu(k) for k in range(sum(n or 1 for n in parts))]
        config, cpus = tf.config, tf.config.list_logical_devices("CPU")
        listed = {None: [*cpus, *logical], "CPU": cpus, "GPU": logical}
        monkeypatch.setattr(config, "list_logical_devices", lambda kind=None: listed[kind])
        monkeypatch.setattr(config, "get_visible_devices", lambda kind: list(enumerate(parts)))
        monkeypatch.setattr(
            config, "get_logical_device_configuration", lambda card: card[1] and [None] * card[1]
        )
        monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"is_cuda_build": cuda})

    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operations that `nccl.summed` makes."""
    sums: list[Any] = []
    summed = nccl.summed

    def recorded(*args: Any) -> Any:
        sums.append(summed(*args))
        return sums[-1]

    monkeypatch.setattr(nccl, "summed", recorded)
    return sums


def names(*numbers: int) -> list[str]:
    return [f"/device:GPU:{k}" for k in numbers]


def check_members(total: Any, devices: list[str], at: str) -> None:
    """What TensorFlow replaces the operation by: its makers are on the members."""
    sources = total.op.inputs
    assert [one.op.device for one in sources] == devices
    assert all(len(one.op.outputs) == 1 and one.op.type == "Identity" for one in sources)
    assert total.op.type == "NcclReduce" and total.op.device == at
    assert total.op.get_attr("reduction") == b"sum"
    assert total.op.get_attr("num_devices") == len(devices)


def test_each_summand_has_a_card_of_its_own(cards: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not nccl.applies(names(0, 1))  # nothing is found here
    cards(None, None, 2)
    assert nccl.applies(names(0, 1)) and nccl.applies(names(0, 2)) and nccl.applies(names(3, 1, 0))
    assert not nccl.applies(names(2, 3)) and not nccl.applies(names(0, 2, 3))  # one card
    assert not nccl.applies(names(0)) and not nccl.applies(names(0, 4))
    assert not nccl.applies(["/device:CPU:0", *names(1)])
    assert not nccl.applies(["", *names(1)])
    assert not nccl.applies(["/job:worker/task:1/device:GPU:0", *names(1)])
    cards(None, None, cuda=False)
    assert not nccl.applies(names(0, 1))
    cards(None, None)
    monkeypatch.setenv(nccl.SWITCH, "0")
    assert not nccl.applies(names(0, 1))


@pytest.mark.parametrize(
    ("dtype", "adds"),
    [("float16", 1), ("float32", 1), ("float64", 1), ("bfloat16", 0), ("int32", 0), ("int64", 0)],
)
def test_which_sums(cards: Found, dtype: str, adds: bool) -> None:
    cards(None, None, None)
    assert nccl.adds_up(names(0, 1), names(1)[0], dtype) == adds
    assert not nccl.adds_up(names(0, 1), names(2)[0], dtype)  # who gets it takes part
    assert not nccl.adds_up(names(0, 1), "/device:CPU:0", dtype)


def test_what_the_plan_says(cards: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl.note(["/device:CPU:0", "/device:CPU:1"]) is None
    assert nccl.note(names(0)) is None
    cards(None, None)
    assert "NCCL's; KDIST_NCCL=0" in (nccl.note(names(0, 1)) or "")
    monkeypatch.setenv(nccl.SWITCH, "0")
    assert "TensorFlow (KDIST_NCCL=0)" in (nccl.note(names(0, 1)) or "")
    monkeypatch.delenv(nccl.SWITCH)
    cards(2)
    assert "a card of this process for each" in (nccl.note(names(0, 1)) or "")


def train(axes: dict[str, int], level: int = 0, devices: list[str] | None = None) -> keras.Model:
    """A model over some devices, after a step."""
    layers = [keras.layers.Dense(16, "relu", name="up"), keras.layers.Dense(4, name="down")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    maps = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(devices=devices, **axes),
        layout_map=maps if "model" in axes else {},
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64),
    )
    kdist.parallelize(model, config).compile("sgd", "mse")
    x = np.zeros((8, 8), "float32")
    model.fit(x, x[:, :4], batch_size=8, verbose=0)
    return model


@pytest.mark.parametrize(
    ("axes", "level"), [({"data": 2}, 0), ({"data": 4}, 3), ({"data": 2, "model": 2}, 1)]
)
def test_gradients(cards: Found, made: list[Any], axes: dict[str, int], level: int) -> None:
    """Every sum of them; TensorFlow refuses the step only for want of the kernel."""
    cards(*[None] * 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="support Op 'NcclReduce'"):
        train(axes, level)
    slices = range(axes["data"])
    inner = axes.get("model", 1)
    for total in made:
        k = int(total.op.device[-1]) % inner
        check_members(total, names(*(s * inner + k for s in slices)), total.op.device)
        assert total.op.get_attr("_independent_side_effects")
    assert made and not [
        op for op in made[0].graph.get_operations() if op.type == "AddN" and "reduce" in op.name
    ]


@pytest.mark.parametrize("off", [False, True])
def test_sums_inside_layers(cards: Found, monkeypatch: pytest.MonkeyPatch, off: bool) -> None:
    cards(None, None)
    monkeypatch.setenv(nccl.SWITCH, "0" if off else "1")
    definitions: list[Any] = []
    register = dtensor_internals.Registered.__init__

    def recorded(self: Any, definition: Any, *args: Any, **options: Any) -> None:
        definitions.append(definition)
        register(self, definition, *args, **options)

    monkeypatch.setattr(dtensor_internals.Registered, "__init__", recorded)
    if off:
        train({"model": 2})  # TensorFlow puts it on the CPU
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="support Op 'NcclReduce'"):
            train({"model": 2})
    nodes = {node.name: node for one in definitions for node in one.node_def}
    sums = [node for node in nodes.values() if node.op == "NcclReduce"]
    assert bool(sums) is not off
    for node in sums:
        sources = [nodes[one.split(":")[0]] for one in node.input]
        assert [(one.op, one.device) for one in sources] == [("Identity", d) for d in names(0, 1)]
        assert node.device in names(0, 1) and node.attr["T"].type == tf.float32.as_datatype_enum
        assert (node.attr["reduction"].s, node.attr["num_devices"].i) == (b"sum", 2)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("operation", ["reduce", "all_reduce"])
def test_collectives(cards: Found, made: list[Any], operation: str, reduction: str) -> None:
    cards(None, None)
    mesh = kdist.mesh(data=2, devices=["gpu:0", "gpu:1"])
    call = getattr(kdist.comm, operation)

    def traced(x: Any, **options: Any) -> Any:
        @tf.function(autograph=False)
        def step(x: Any) -> Any:
            return call([x, x], mesh, "data", **options)

        return step.get_concrete_function(x)

    x = tf.TensorSpec((3,), tf.float32)
    traced(x, reduction=reduction)
    (total,) = made
    check_members(total, names(0, 1), names(0)[0])
    traced(x, reduction="max")
    traced(x, algorithm="direct")
    traced(tf.TensorSpec((3,), tf.int32))
    assert len(made) == 1


def test_cpus_are_as_they_were(cards: Found, made: list[Any]) -> None:
    cards(None, None)
    train({"data": 2}, devices=["cpu:0", "cpu:1"])
    assert not made
