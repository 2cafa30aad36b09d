from kdist import _private_dtensor, lowered, spmd

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh


def recorded(mesh, function, *inputs, layers=()):
    program = tf.function(function, autograph=False)
    with lowered.record() as recorder, dtensor.default_mesh(mesh):
        result = program(*inputs)
        tf.nest.map_structure(lambda t: dtensor.unpack(t)[0].numpy(), result)
    return lowered.collectives(recorder, mesh, layers), result


def two_matmuls(mesh):
    """A net, and its parameters: kernel and bias of `two` cut by columns."""
    inputs = keras.Input((16,))
    hidden = keras.layers.Dense(32, name="one")(inputs)
    net = keras.Model(inputs, keras.layers.Dense(8, name="two")(hidden), name="net")
    layouts = [(None, None), (None,), (None, "model"), ("model",)]
    params = [
        cut(v.numpy(), mesh, *dims)
        for v, dims in zip(net.trainable_variables, layouts, strict=True)
    ]
    return net, params


def forward(net, params, x, layout=None):
    """Runs the net; its second layer's input is laid out as declared."""
    scope = keras.StatelessScope(zip(net.trainable_variables, params, strict=True))
    with scope, keras.name_scope("net"):
        hidden = net.get_layer("one")(x)
        if layout is not None:
            hidden = spmd.relayout(hidden, layout, alltoall=False)
        return net.get_layer("two")(hidden)


def test_the_private_names_exist():
    assert isinstance(_private_dtensor.lowered_names(), frozenset)
    mesh, _ = inner_mesh(model=2)
    program = tf.function(lambda x: x + 1.0)
    with lowered.record() as recorder:
        program(cut(np.ones((4, 2), "float32"), mesh, "model", None))
    assert recorder.programs, "TensorFlow no longer registers lowered programs as _func_..."
    ((definition,),) = recorder.programs.values()
    assert any(node.op == "AddV2" for node in definition.node_def)


def test_two_matmuls_have_exactly_one_gather_between_them():
    mesh, _ = inner_mesh(model=4)
    net, params = two_matmuls(mesh)
    x = np.random.randn(16, 16).astype("float32")
    whole = dtensor.Layout.replicated(mesh, 2)
    found, result = recorded(
        mesh,
        lambda p, x: forward(net, p, x, whole),
        params,
        cut(x, mesh, "model", None),
        layers=("one", "two"),
    )
    (gather,) = found
    assert (gather.kind, gather.axis, gather.phase) == ("all-gather", ("model",), "forward")
    assert gather.shape == (16, 32) and gather.bytes == 16 * 32 * 4
    assert gather.dtype == "float32"
    assert gather.layer == "one", gather.node
    np.testing.assert_allclose(
        np.concatenate([t.numpy() for t in dtensor.unpack(result)], axis=1), net(x), atol=1e-5
    )


def test_no_collective_where_nothing_is_cut():
    mesh, _ = inner_mesh(model=2)
    x = cut(np.ones((4, 4), "float32"), mesh, None, None)
    assert recorded(mesh, lambda x: tf.reduce_sum(tf.matmul(x, x)), x)[0] == []


def test_backward_collectives_are_told_apart():
    mesh, _ = inner_mesh(model=4)
    net, params = two_matmuls(mesh)

    def program(params, x):
        with tf.GradientTape() as tape:
            tape.watch(params)
            loss = tf.reduce_sum(tf.square(forward(net, params, x)))
        gradients = tape.gradient(loss, params)
        return loss, [tf.convert_to_tensor(g) for g in gradients]

    x = cut(np.ones((16, 16), "float32"), mesh, "model", None)
    found, _ = recorded(mesh, program, params, x, layers=("one", "two"))
    table = {(c.phase, c.kind, c.layer) for c in found}
    assert ("forward", "all-gather", "one") in table
    assert ("backward", "all-reduce", "two") in table
    assert {c.node for c in found if "gradient_tape" in c.node} <= {
        c.node for c in found if c.phase == "backward"
    }
    forward_kinds = sorted(c.kind for c in found if c.phase == "forward")
    # The gather between the layers, and the sum of the loss over the cut columns.
    assert forward_kinds == ["all-gather", "all-reduce"]


def test_axes_of_equal_size_are_told_apart():
    mesh, _ = inner_mesh(a=2, b=2)
    x = np.ones((4, 4), "float32")
    for axis in ("a", "b"):
        found, _ = recorded(mesh, lambda x: tf.reduce_sum(x, 0), cut(x, mesh, axis, None))
        assert [c.axis for c in found] == [(axis,)]
    found, _ = recorded(mesh, tf.reduce_sum, cut(x, mesh, "a", "b"))
    assert [(c.kind, c.axis, c.bytes) for c in found] == [("all-reduce", ("a", "b"), 4)]


def test_programs_of_another_mesh_are_left_out():
    first, topology = inner_mesh(data=2, model=2)
    second = spmd.make_mesh(topology.slices[1].devices, topology)
    x = np.ones((4, 4), "float32")
    program = tf.function(lambda x: tf.reduce_sum(x))
    with lowered.record() as recorder:
        for mesh in (first, second):
            program(cut(x, mesh, "model", None))
    assert len(recorder.programs) == 2
    assert len(lowered.collectives(recorder, first)) == 1
    assert len(lowered.collectives(recorder, second)) == 1


def test_a_second_call_lowers_nothing():
    mesh, _ = inner_mesh(model=2)
    program = tf.function(lambda x: tf.reduce_sum(x) * 3.0)
    x = cut(np.ones((4, 4), "float32"), mesh, "model", None)
    program(x)
    with lowered.record() as recorder:
        program(x)
    assert recorder.programs == {}


def test_layers_of_nodes():
    layers = ("dense", "dense_1", "block/att/query")
    at = lambda node: lowered.layer_of(node, layers)  # noqa: E731
    assert at("net_1/dense_1/BiasAdd/DTensorAllGatherOp_9_1") == "dense"
    assert at("net_1/dense_1_2/MatMul/DTensorAllReduceOp_9_1") == "dense_1"
    assert at("gradient_tape/net_1/dense_1/MatMul/MatMul/DTensorAllReduceOp_9") == "dense"
    assert at("block_1/att_1/query_1/einsum/Einsum/DTensorAllReduceOp_9") == "block/att/query"
    assert at("Sum/DTensorAllReduceOp_9_1") == ""
    assert lowered.layer_of("net_1/dense_1/MatMul/DTensorAllReduceOp_9") == "net_1/dense_1"
    assert lowered.layer_of("a/dense_1/MatMul/DTensorAllReduceOp_9", ("dense_1",)) == "dense_1"


def collective(kind="all-gather", layer="one", size=64, phase="forward"):
    return lowered.Collective(kind, ("model",), (4, 4), "float32", size, "node", layer, phase)


def test_the_table_groups_and_sums():
    text = lowered.format_table([collective(), collective(size=1000), collective("all-reduce")])
    lines = [line.split() for line in text.splitlines()]
    assert ["one", "forward", "all-gather", "model", "2", "1,064"] in lines
    assert ["one", "forward", "all-reduce", "model", "1", "64"] in lines
    assert ["total", "3", "1,128"] in lines


def test_an_all_to_all_is_refused():
    lowered.check_no_all_to_all([collective()])
    with pytest.raises(ValueError, match=r"enable_alltoall=False.*kdist\.shard.*Received: 1"):
        lowered.check_no_all_to_all([collective(), collective("all-to-all")])
