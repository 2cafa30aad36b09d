import math

from kdist.sharding.axes import check_inner_axes_local
from kdist.sharding.device import Device
from kdist.sharding.mesh import Slice, Topology, mesh

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from ..runtime.mesh_parts import topology


def device_mesh(shape, axis_names, devices):
    return keras.distribution.DeviceMesh(shape, axis_names, devices)


@pytest.mark.parametrize(
    ("name", "string"),
    [
        ("cpu:0", "/device:CPU:0"),
        ("CPU:3", "/device:CPU:3"),
        ("/device:CPU:3", "/device:CPU:3"),
        ("gpu:12", "/device:GPU:12"),
        ("/job:localhost/replica:0/task:0/device:CPU:1", "/device:CPU:1"),
        ("/job:worker/replica:0/task:1/device:GPU:0", "/job:worker/task:1/device:GPU:0"),
        ("process:2/cpu:1", "/job:process/task:2/device:CPU:1"),
    ],
)
def test_device_names_of_every_spelling(name, string):
    assert Device.parse(name).name == string
    assert Device.parse(Device.parse(name).name) == Device.parse(name)


@pytest.mark.parametrize("name", ["", "cpu", "0", "cpu:x", "cpu:0:1", "/job:a/cpu"])
def test_other_device_names_are_refused(name):
    with pytest.raises(ValueError, match="A device is written.*Received: device="):
        Device.parse(name)


def test_mesh_takes_the_first_devices_in_order():
    made = mesh(data=2, model=2)
    assert isinstance(made, keras.distribution.DeviceMesh)
    assert tuple(made.shape) == (2, 2)
    assert tuple(made.axis_names) == ("data", "model")
    assert made.devices.tolist() == [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]


def test_mesh_of_named_devices():
    made = mesh(devices=["cpu:3", "/device:CPU:1"], model=2)
    assert Topology.from_mesh(made).devices == ("/device:CPU:3", "/device:CPU:1")


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", None, True])
def test_mesh_size_is_a_positive_integer(size):
    with pytest.raises(ValueError, match="size of axis 'data' must be an integer of at least 1"):
        mesh(data=size)


def test_mesh_needs_an_axis():
    with pytest.raises(ValueError, match="at least one axis"):
        mesh()


def test_mesh_of_more_devices_than_there_are_names_the_fix():
    with pytest.raises(ValueError, match=r"there are 8 CPU.*kdist\.init\(cpu_devices=64\)"):
        mesh(data=8, model=8)


def test_mesh_devices_of_another_number():
    with pytest.raises(ValueError, match="4 positions .* 2 given"):
        mesh(devices=["cpu:0", "cpu:1"], data=4)
    with pytest.raises(ValueError, match="one string given"):
        mesh(devices="cpu:0", data=5)


def test_mesh_refuses_duplicate_devices():
    with pytest.raises(ValueError, match="CPU:1 stands more than once"):
        mesh(devices=["cpu:1", "/device:CPU:1"], data=2)


def test_mesh_refuses_unknown_devices():
    with pytest.raises(ValueError, match="do not exist: CPU:99.*Use the names of these: CPU:0"):
        mesh(devices=["cpu:0", "cpu:99"], data=2)


def test_mesh_refuses_data_and_batch_together():
    with pytest.raises(ValueError, match="two names of the one axis"):
        mesh(data=2, batch=2)


def test_slices_of_stages_and_replicas():
    made = topology(data=2, pipe=2, model=2)
    # Position (data, pipe, model) is device 4 * data + 2 * pipe + model.
    assert [[int(d[-1]) for d in piece.devices] for piece in made.slices] == [
        [0, 1],
        [4, 5],
        [2, 3],
        [6, 7],
    ]
    assert [(piece.stage, piece.index) for piece in made.slices] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (made.num_stages, made.data_size, made.inner_size) == (2, 2, 2)
    assert made.inner_axes == (("model", 2),)
    assert made.group(1) == (2, 3) and made.slice_number(1, 0) == 2


def test_mesh_refuses_words_of_dtensor_as_names():
    with pytest.raises(ValueError, match="An axis name is"):
        mesh(unsharded=2)


def test_topology_of_data_and_model():
    made = topology(data=2, model=3)
    assert made.axis_names == ("data", "model")
    assert made.shape == (2, 3)
    assert made.data_axis == "data"
    assert made.inner_axes == (("model", 3),)
    assert made.data_size == 2
    assert made.inner_size == 3
    assert made.slices == (
        Slice(0, ("/device:CPU:0", "/device:CPU:1", "/device:CPU:2")),
        Slice(1, ("/device:CPU:3", "/device:CPU:4", "/device:CPU:5")),
    )
    assert made.devices == tuple(f"/device:CPU:{i}" for i in range(6))


def test_slices_where_data_is_not_the_first_axis():
    made = topology(model=2, data=2, seq=2)
    # Position (model, data, seq) is device 4 * model + 2 * data + seq.
    assert [[d[-1] for d in piece.devices] for piece in made.slices] == [
        ["0", "1", "4", "5"],
        ["2", "3", "6", "7"],
    ]
    assert made.inner_axes == (("model", 2), ("seq", 2))


def test_topology_without_a_data_axis_has_one_slice():
    made = topology(model=4)
    assert made.data_axis is None
    assert made.data_size == 1
    assert made.inner_size == 4
    assert made.slices[0].index == 0


def test_topology_of_data_alone():
    made = topology(batch=4)
    assert made.data_axis == "batch"
    assert made.inner_axes == ()
    assert made.inner_size == 1


def test_axes_of_size_one_are_kept():
    made = topology(pipe=1, data=1, model=2, seq=1)
    assert made.inner_axes == (("model", 2), ("seq", 1))
    assert made.num_stages == 1
    assert made.data_size == 1


def test_axis_size_and_the_synonym():
    made = topology(batch=2, model=3)
    assert made.axis_size("model") == 3
    assert made.axis_size("batch") == made.axis_size("data") == 2
    assert made.canonical("data") == "batch"
    with pytest.raises(ValueError, match="no axis 'seq'.*batch=2, model=3.*Received: axis='seq'"):
        made.axis_size("seq")


def test_no_synonym_without_a_data_axis():
    with pytest.raises(ValueError, match="no axis 'data'"):
        topology(model=2).axis_size("data")


@pytest.mark.parametrize("other", [None, "mesh", {"data": 2}])
def test_topology_of_something_else(other):
    with pytest.raises(ValueError, match=r"keras\.distribution\.DeviceMesh.*Received: mesh="):
        Topology.from_mesh(other)


def test_topology_of_more_devices_than_exist():
    made = device_mesh((4,), ["data"], [f"cpu:{i}" for i in range(4)])
    with pytest.raises(ValueError, match=r"4 devices and there are 2.*init\(cpu_devices=4\)"):
        Topology.from_mesh(made, available=["cpu:0", "cpu:1"])


def test_topology_reads_the_devices_of_tensorflow_by_default():
    made = device_mesh((2,), ["data"], ["cpu:6", "cpu:7"])
    assert Topology.from_mesh(made).devices == ("/device:CPU:6", "/device:CPU:7")


def test_topology_of_unknown_devices():
    made = device_mesh((2,), ["data"], ["gpu:0", "gpu:1"])
    with pytest.raises(ValueError, match="2 devices and there are 0 of type GPU"):
        Topology.from_mesh(made, available=["cpu:0", "cpu:1"])


def test_topology_of_mixed_devices():
    made = device_mesh((2,), ["data"], ["cpu:0", "gpu:0"])
    with pytest.raises(ValueError, match="mixes CPU and GPU"):
        Topology.from_mesh(made, available=["cpu:0", "gpu:0"])


def test_topology_of_duplicate_axes():
    made = device_mesh((2, 2), ["model", "model"], [f"cpu:{i}" for i in range(4)])
    with pytest.raises(ValueError, match="distinct names"):
        Topology.from_mesh(made, available=made.devices.flatten())


def test_a_mesh_that_does_not_cover_its_devices_keeps_the_message_of_keras():
    with pytest.raises(ValueError, match="Shape does not match the number of devices"):
        Topology.from_mesh(device_mesh((2, 2), ["data", "model"], ["cpu:0", "cpu:1"]))


def test_data_axis_may_cross_processes_in_a_mesh():
    names = [f"/job:worker/task:{t}/device:CPU:{i}" for t in range(2) for i in range(2)]
    made = Topology.from_mesh(device_mesh((2, 2), ["data", "model"], names), available=names)
    assert made.slices[1].devices == tuple(names[2:])


def test_inner_axis_may_not_cross_processes():
    names = [f"/job:worker/task:{t}/device:CPU:{i}" for t in range(2) for i in range(2)]
    with pytest.raises(ValueError, match="Axis 'model' of size 2 spans several processes"):
        Topology.from_mesh(device_mesh((2, 2), ["model", "data"], names), available=names)


@pytest.mark.parametrize(
    ("axes", "processes", "wrong"),
    [
        ({"data": 2, "model": 2}, [0, 0, 1, 1], None),
        ({"data": 2, "model": 2}, [0, 1, 0, 1], "model"),
        ({"data": 2, "model": 2}, [0, 0, 0, 1], "model"),
        ({"model": 2, "data": 2}, [0, 1, 0, 1], None),
        ({"data": 4}, [0, 1, 2, 3], None),
        ({"model": 2}, [0, 1], "model"),
        ({"data": 1, "seq": 2, "model": 2}, [0, 0, 1, 1], "seq"),
        ({"data": 2, "model": 1}, [0, 1], None),
    ],
)
def test_check_inner_axes_local(axes, processes, wrong):
    arguments = (list(axes), list(axes.values()), "data" if "data" in axes else None, processes)
    if wrong is None:
        check_inner_axes_local(*arguments)
    else:
        with pytest.raises(ValueError, match=f"Axis '{wrong}' .* spans several processes"):
            check_inner_axes_local(*arguments)


def test_topology_prints_a_table():
    assert str(topology(data=2, model=2)).splitlines() == [
        "mesh data=2, model=2: 4 devices, 2 slices of 2",
        "slice  devices",
        "    0  CPU:0 CPU:1",
        "    1  CPU:2 CPU:3",
    ]


def test_a_long_table_is_shortened():
    lines = str(topology(data=100)).splitlines()
    assert len(lines) == 19
    assert lines[-1].endswith("84 more")


def test_topology_is_a_value():
    assert topology(data=2, model=2) == topology(data=2, model=2)
    assert hash(topology(data=2)) == hash(topology(data=2))
    assert topology(data=2) != topology(batch=2)


@hypothesis.given(
    st.permutations(["data", "model", "seq", "expert"]),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
    st.integers(1, 4),
)
def test_slices_hold_each_device_once_at_its_coordinate(names, sizes, count):
    axes = dict(list(zip(names, sizes, strict=True))[:count])
    made = topology(**axes)
    total = math.prod(axes.values())
    assert sorted(made.devices) == sorted(f"/device:CPU:{i}" for i in range(total))
    assert made.data_size * made.inner_size == total == len(made.devices)
    inner_shape = tuple(size for _, size in made.inner_axes)
    for piece in made.slices:
        for flat, device in enumerate(piece.devices):
            coordinate = dict(
                zip(
                    [n for n, _ in made.inner_axes],
                    np.unravel_index(flat, inner_shape),
                    strict=True,
                )
            )
            coordinate["data"] = piece.index
            position = np.ravel_multi_index([coordinate[n] for n in axes], tuple(axes.values()))
            assert device == f"/device:CPU:{position}"


def cards_and(cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU, and so many CPU devices."""
    devices = {"GPU": [tf.config.LogicalDevice("/device:GPU:0", "GPU")]}
    devices["CPU"] = [tf.config.LogicalDevice(f"/device:CPU:{k}", "CPU") for k in range(cpus)]

    def found(kind: str | None = None) -> list[tf.config.LogicalDevice]:
        return devices[kind] if kind else [*devices["CPU"], *devices["GPU"]]

    monkeypatch.setattr(tf.config, "list_logical_devices", found)


def test_with_too_few_gpus_it_says_how_to_have_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cards_and(1, monkeypatch)
    with pytest.raises(ValueError, match=r"4 devices and there are 1 GPU") as caught:
        mesh(data=4)
    assert "kdist.init(cpu_devices=4)" in str(caught.value)
    assert "set_logical_device_configuration" in str(caught.value)


def test_with_too_few_gpus_it_takes_cpus_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cards_and(8, monkeypatch)
    with pytest.warns(UserWarning, match="needs 4 devices, and there are 1 GPUs: it takes CPUs"):
        made = mesh(data=2, model=2)
    assert [*made.devices.flatten()] == [f"cpu:{k}" for k in range(4)]
    assert [*mesh(data=1).devices.flatten()] == ["gpu:0"]


@pytest.mark.parametrize(("name", "meant"), [("dp", "data"), ("FSDP", "data"), ("pp", "pipe")])
def test_names_of_other_systems_are_told(name: str, meant: str) -> None:
    with pytest.warns(UserWarning, match=f"'{name}' is an inner axis.* is '{meant}'"):
        mesh(**{name: 2})


def test_names_of_inner_axes_are_the_users(recwarn: pytest.WarningsRecorder) -> None:
    mesh(data=2, tp=2)
    assert not recwarn.list
