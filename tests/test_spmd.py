import os
import threading

from kdist import lowered, spmd, spmd_limits
from kdist.mesh import Topology
from kdist.mesh import mesh as make_device_mesh
from kdist.without_effect import uncut_dim

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh

X = np.arange(64, dtype="float32").reshape(8, 8) / 64
LAYOUTS = [(None, None), ("model", None), (None, "model")]


def whole(tensor, mesh):
    gathered = dtensor.relayout(tensor, dtensor.Layout.replicated(mesh, tensor.shape.rank))
    return dtensor.unpack(gathered)[0].numpy()


def specs(tensor):
    return tuple(
        None if s == dtensor.UNSHARDED else s for s in dtensor.fetch_layout(tensor).sharding_specs
    )


def kinds(mesh, program, *inputs):
    """Result, and kinds of the collectives of the lowered program."""
    function = tf.function(program, autograph=False)
    with lowered.record() as recorder, dtensor.default_mesh(mesh):
        result = function(*inputs)
        tf.nest.map_structure(lambda t: dtensor.unpack(t)[0].numpy(), result)
    return result, [c.kind for c in lowered.collectives(recorder, mesh)]


def test_layouts_leave_the_data_axis_out():
    mesh, topology = inner_mesh(data=2, model=4)
    layout = spmd.layout_for(mesh, ("data", ("data", "model"), None), topology)
    assert list(layout.sharding_specs) == ["unsharded", "model", "unsharded"]
    # `batch` is another name of the data axis.
    assert list(spmd.layout_for(mesh, ("batch",), topology).sharding_specs) == ["unsharded"]


def test_several_inner_axes_on_one_dim_are_refused():
    mesh, topology = inner_mesh(a=2, b=2)
    with pytest.raises(ValueError, match=r"'a' and 'b' on different dims.*Received: layout="):
        spmd.layout_for(mesh, (("a", "b"), None), topology)


def moving_program(layout, arriving):
    """Moves its input to a layout; the gradient comes back to that place in another one."""

    @tf.custom_gradient
    def arrive(value):
        def gradient(upstream):
            rest = dtensor.Layout.replicated(arriving.mesh, 2)
            return dtensor.relayout(dtensor.relayout(upstream, rest), arriving)

        return tf.identity(value), gradient

    def program(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            moved = spmd.relayout(x * 2.0, layout, alltoall=False)
            loss = tf.reduce_sum(tf.square(arrive(moved)))
        return moved, tape.gradient(loss, x)

    return program


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_relayout_without_alltoall_has_none_forward_or_backward(source, target):
    mesh, _ = inner_mesh(model=4)
    layout = dtensor.Layout([axis or dtensor.UNSHARDED for axis in target], mesh)

    for arriving in LAYOUTS:
        program = moving_program(layout, dtensor.Layout([a or "unsharded" for a in arriving], mesh))
        (moved, gradient), found = kinds(mesh, program, cut(X, mesh, *source))
        assert "all-to-all" not in found
        assert specs(moved) == target
        assert specs(gradient) == source
        np.testing.assert_array_equal(whole(moved, mesh), 2 * X)
        np.testing.assert_allclose(whole(gradient, mesh), 8 * X, rtol=1e-6)


def test_two_settings_in_one_process_differ():
    mesh, topology = inner_mesh(data=2, model=4)

    def program(x):
        return spmd.relayout_active(x * 2.0, ("data", "model"))

    for alltoall in (True, False, True):
        with spmd.tracing(mesh, topology, alltoall=alltoall) as trace:
            result, found = kinds(mesh, program, cut(X, mesh, "model", None))
        assert trace.used
        assert found == (["all-to-all"] if alltoall else ["all-gather"])
        assert specs(result) == (None, "model")
        np.testing.assert_array_equal(whole(result, mesh), 2 * X)


def test_alltoall_that_the_environment_forbids_is_refused(monkeypatch):
    mesh, topology = inner_mesh(model=2)
    monkeypatch.setenv(spmd.ALLTOALL_SWITCH, "0")
    with (
        pytest.raises(ValueError, match=r"unset DTENSOR_USE_ALL_TO_ALL.*Received.*'0'"),
        spmd.tracing(mesh, topology, alltoall=True),
    ):
        pass
    with spmd.tracing(mesh, topology, alltoall=False):
        pass


def test_relayout_of_integers_and_bools():
    mesh, _ = inner_mesh(model=4)
    layout = dtensor.Layout([dtensor.UNSHARDED, "model"], mesh)
    for value in (X.astype("int32"), X > 0.5):
        result, _ = kinds(
            mesh, lambda x: spmd.relayout(x, layout, alltoall=False), cut(value, mesh, *LAYOUTS[1])
        )
        assert specs(result) == (None, "model")
        np.testing.assert_array_equal(
            np.concatenate([t.numpy() for t in dtensor.unpack(result)], 1), value
        )


@pytest.mark.parametrize(
    ("axes", "devices", "operation"),
    [
        ({"model": 4}, [0, 1, 2, 3], "CollectiveGatherV2"),
        ({"model": 4}, [3, 1, 0, 2], "CollectiveReduceV2"),
        ({"a": 2, "b": 2}, [0, 1, 2, 3], "CollectiveReduceV2"),
    ],
)
def test_gathers_use_the_fast_operation_only_where_it_is_right(
    axes, devices, operation, monkeypatch
):
    monkeypatch.setenv(spmd.GATHER_SWITCH, "1")
    names = [f"cpu:{d}" for d in devices]
    topology = Topology.from_mesh(make_device_mesh(**axes, devices=names))
    mesh = spmd.make_mesh(topology.slices[0].devices, topology)
    dims = (*axes, None)[:2]
    program = tf.function(
        lambda x: dtensor.relayout(x + 1.0, dtensor.Layout.replicated(mesh, 2)), autograph=False
    )
    with lowered.record() as recorder, spmd.lowering(mesh):
        parts = [t.numpy() for t in dtensor.unpack(program(cut(X, mesh, *dims)))]
    for part in parts:
        np.testing.assert_array_equal(part, X + 1)
    nodes = [n for ds in recorder.programs.values() for d in ds for n in d.node_def]
    assert {n.op for n in nodes if n.op.startswith("Collective")} == {operation}
    assert {c.kind for c in lowered.collectives(recorder, mesh)} == {"all-gather"}
    assert os.environ[spmd.GATHER_SWITCH] == "1"


def test_without_a_trace_nothing_happens():
    x = tf.constant(X)
    assert spmd.active() is None
    assert spmd.relayout_active(x, ("model", None)) is x


def test_a_trace_belongs_to_its_thread():
    mesh, topology = inner_mesh(model=2)
    seen = []
    with spmd.tracing(mesh, topology, alltoall=False) as trace:
        other = threading.Thread(target=lambda: seen.append(spmd.active()))
        other.start()
        other.join()
        assert spmd.active() is trace
    assert seen == [None] and spmd.active() is None


def test_counts_and_missing_entries():
    mesh, topology = inner_mesh(data=2, model=4)
    x = cut(np.zeros((8, 8, 3), "float32"), mesh, None, None, None)
    for strategy in ((2, 4), ("data", "model"), (None, "model", None)):
        with spmd.tracing(mesh, topology, alltoall=False) as trace:
            result, _ = kinds(mesh, lambda x, s=strategy: spmd.relayout_active(x, s), x)
        assert specs(result) == (None, "model", None)
        assert trace.uncut == []
    with pytest.raises(ValueError, match="entries"), spmd.tracing(mesh, topology, alltoall=False):
        spmd.relayout_active(tf.zeros((4,)), (None, "model"))


def test_a_dim_that_does_not_divide_stays_whole():
    mesh, topology = inner_mesh(model=4)
    x = cut(np.zeros((6, 8), "float32"), mesh, None, None)
    with spmd.tracing(mesh, topology, alltoall=False) as trace:
        result, _ = kinds(mesh, lambda x: spmd.relayout_active(x, ("model", None), "x"), x)
    assert specs(result) == (None, None)
    assert trace.uncut == [uncut_dim("x", 0, 6, 4, ("model",))]


def test_pack_and_replicate():
    mesh, _ = inner_mesh(model=4)
    tensor = spmd.replicate(np.float32(3.5), mesh)
    assert [float(t) for t in dtensor.unpack(tensor)] == [3.5] * 4
    np.testing.assert_array_equal(whole(cut(X, mesh, None, "model"), mesh), X)


def test_a_linked_variable_is_one_memory():
    mesh, _ = inner_mesh(model=4)
    layout = dtensor.Layout([dtensor.UNSHARDED, "model"], mesh)
    parts = []
    for k, part in enumerate(np.split(X, 4, axis=1)):
        with tf.device(f"CPU:{k}"):
            parts.append(tf.constant(part))
    linked = spmd.LinkedVariable(parts, layout)
    assert linked.shape == (8, 8) and linked.dtype == tf.float32

    @tf.function(autograph=False)
    def program(handle):
        return spmd.read(handle, (8, 8), tf.float32) * 2.0

    @tf.function(autograph=False)
    def update():
        for k, variable in enumerate(linked.parts):
            with tf.device(f"CPU:{k}"):
                variable.assign_add(tf.fill((8, 2), float(k)))

    for step in range(3):
        with dtensor.default_mesh(mesh):
            result = program(linked.handle)
        assert specs(result) == (None, "model")
        expected = X + step * np.repeat(np.arange(4.0), 2)
        np.testing.assert_allclose(whole(result, mesh), 2 * expected, rtol=1e-6)
        np.testing.assert_allclose(linked.parts[3].numpy(), expected[:, 6:], rtol=1e-6)
        assert linked.parts[3].device.endswith("CPU:3")
        update()


# -- layers and operations ----------------------------------------------------------------------


def loss_and_gradients(layer, variables, params, x):
    with tf.GradientTape() as tape:
        tape.watch(params)
        with keras.StatelessScope(zip(variables, params, strict=True)):
            y = layer(x)
        loss = tf.reduce_sum(y * tf.sin(y + 1.0))
    return [tf.convert_to_tensor(g) for g in tape.gradient(loss, params)]


def images():
    return np.random.randn(2, 6, 6, 4).astype("float32")


def sequences():
    return np.random.randn(4, 5, 8).astype("float32")


GATHERED = {
    "Conv1D": (lambda: keras.layers.Conv1D(4, 3), sequences),
    "Conv2D": (lambda: keras.layers.Conv2D(4, 3), images),
    "Conv2DTranspose": (lambda: keras.layers.Conv2DTranspose(4, 3), images),
    "DepthwiseConv2D": (lambda: keras.layers.DepthwiseConv2D(3), images),
    "SeparableConv2D": (lambda: keras.layers.SeparableConv2D(4, 3), images),
    "BatchNormalization": (lambda: keras.layers.BatchNormalization(), images),
    "LSTM": (lambda: keras.layers.LSTM(4), sequences),
    "GRU": (lambda: keras.layers.GRU(4, unroll=True), sequences),
    "SimpleRNN": (lambda: keras.layers.SimpleRNN(4), sequences),
}
AS_THEY_ARE = {
    "Dense": (lambda: keras.layers.Dense(4), sequences),
    "EinsumDense": (
        lambda: keras.layers.EinsumDense("abc,cd->abd", (None, 4), bias_axes="d"),
        sequences,
    ),
    "LayerNormalization": (lambda: keras.layers.LayerNormalization(), sequences),
    "GroupNormalization": (lambda: keras.layers.GroupNormalization(2), images),
}


@pytest.mark.parametrize("name", [*GATHERED, *AS_THEY_ARE])
def test_layers_on_cut_weights_equal_plain(name):
    make, data = {**GATHERED, **AS_THEY_ARE}[name]
    mesh, _ = inner_mesh(model=2)
    layer, x = make(), data()
    layer.build(x.shape)
    variables = layer.trainable_variables
    gathered = isinstance(layer, spmd_limits.GATHER_ON_READ)
    assert gathered == (name in GATHERED)
    values = [np.random.randn(*v.shape).astype("float32") / 3 for v in variables]
    expected = loss_and_gradients(layer, variables, [tf.constant(v) for v in values], x)
    # Each weight cut along its last dim.
    dims = [(None,) * (v.ndim - 1) + ("model",) * (v.shape[-1] % 2 == 0) for v in values]
    dims = [d + (None,) * (v.ndim - len(d)) for d, v in zip(dims, values, strict=True)]
    params = [cut(v, mesh, *d) for v, d in zip(values, dims, strict=True)]

    def program(params, x):
        with tf.GradientTape() as tape:
            tape.watch(params)
            used = list(params)
            if gathered:
                used = [
                    spmd.relayout(p, dtensor.Layout.replicated(mesh, p.shape.rank), alltoall=False)
                    for p in params
                ]
            with keras.StatelessScope(zip(variables, used, strict=True)):
                y = layer(x)
            loss = tf.reduce_sum(y * tf.sin(y + 1.0))
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, params)]

    with dtensor.default_mesh(mesh):
        found = tf.function(program, autograph=False)(params, spmd.replicate(x, mesh))
    for one, reference, d in zip(found, expected, dims, strict=True):
        scale = np.abs(reference).max()
        np.testing.assert_allclose(whole(one, mesh), reference, atol=2e-5 * scale)
        if gathered:
            assert specs(one) == d


class Applied(keras.layers.Layer):
    """A dense layer, then an operation: the operation needs a gradient."""

    def __init__(self, operation):
        super().__init__()
        self.dense = keras.layers.Dense(8)
        self.operation = operation

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.operation(self.dense(x))


ops = keras.ops
# Those with an operation type end the process, or break DTensor, if they are tried.
OPERATIONS = {
    "new axis": (lambda x: x[None], "StridedSliceGrad"),
    "inner new axis": (lambda x: x[:, None], "StridedSliceGrad"),
    "map": (lambda x: ops.map(lambda e: e * e, x), "TensorListElementShape"),
    "scan": (
        lambda x: ops.scan(lambda c, e: (c + e, c * e), ops.zeros_like(x[0]), x)[1],
        "TensorListElementShape",
    ),
    "computing branches": (
        lambda x: ops.cond(ops.sum(x) > 0, lambda: ops.sin(x) * x, lambda: x * x * x),
        "OptionalFromValue",
    ),
    "python": (lambda x: x + tf.numpy_function(np.sin, [x], tf.float32), "PyFunc"),
    "branches": (lambda x: ops.cond(ops.sum(x) > 0, lambda: x * 2.0, lambda: x), None),
    "loop": (lambda x: ops.fori_loop(0, 3, lambda i, a: ops.sin(a) * a, x), None),
    "sort": (ops.sort, None),
    "slice": (lambda x: x[:, 2:6], None),
    "index": (lambda x: x[:, 0], None),
    "cumsum": (lambda x: ops.cumsum(x, 1), None),
    "reversed": (lambda x: ops.flip(x, 1), None),
}


def traced_program(operation, mesh):
    layer = Applied(operation)
    x = np.random.randn(4, 8).astype("float32")
    layer(x)
    variables = layer.trainable_variables
    program = tf.function(
        lambda params, x: loss_and_gradients(layer, variables, params, x), autograph=False
    )
    params = [v.value.read_value() for v in variables]
    return program, params, x


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_operations_that_dtensor_must_not_try_are_found_before(name):
    operation, expected = OPERATIONS[name]
    mesh, _ = inner_mesh(model=2)
    program, params, x = traced_program(operation, mesh)
    graph = program.get_concrete_function(params, tf.constant(x)).graph
    found = {kind for kind, _ in spmd_limits.unsupported_ops(graph)}
    if expected is not None:
        assert expected in found
        return
    assert found == set()
    # What the scan lets through does run, and is right.
    reference = program(params, tf.constant(x))
    with dtensor.default_mesh(mesh):
        result = program([spmd.replicate(p, mesh) for p in params], spmd.replicate(x, mesh))
    for one, other in zip(result, reference, strict=True):
        np.testing.assert_allclose(whole(one, mesh), other, atol=1e-4)


@pytest.mark.parametrize("after_dense", [True, False])
def test_a_recurrent_loop_is_found_where_its_input_needs_a_gradient(after_dense):
    inputs = keras.Input((5, 8))
    x = keras.layers.Dense(8)(inputs) if after_dense else inputs
    model = keras.Model(inputs, keras.layers.LSTM(4)(x))
    variables = model.trainable_variables
    program = tf.function(
        lambda params, x: loss_and_gradients(model, variables, params, x), autograph=False
    )
    params = [v.value.read_value() for v in variables]
    graph = program.get_concrete_function(params, tf.zeros((4, 5, 8))).graph
    found = {kind for kind, _ in spmd_limits.unsupported_ops(graph)}
    assert found == ({"TensorListElementShape"} if after_dense else set())


def test_a_failed_lowering_is_explained_and_leaves_the_mesh_working():
    mesh, _ = inner_mesh(model=2)
    filters = cut(np.ones((3, 4, 4), "float32"), mesh, None, None, "model")
    x = spmd.replicate(sequences()[..., :4], mesh)
    program = tf.function(lambda x, f: tf.nn.conv1d(x, f, 1, "VALID"))
    for _ in range(3):
        with pytest.raises(Exception) as caught, dtensor.default_mesh(mesh):  # noqa: PT011
            program(x, filters)
        reason = spmd_limits.explain(caught.value)
        assert reason is not None and reason.startswith("Conv2D: "), reason
        assert "\n" not in reason
        result, _ = kinds(mesh, lambda x: x + 1.0, cut(X, mesh, "model", None))
        np.testing.assert_array_equal(whole(result, mesh), X + 1)


def test_other_errors_are_not_explained():
    assert spmd_limits.explain(ValueError("Shapes (2,) and (3,) are incompatible")) is None
    running = tf.errors.InvalidArgumentError(None, None, "{{function_node f}} tensorflow/dtensor/x")
    assert spmd_limits.explain(running) is None
