from kdist._compat import dtensor_internals
from kdist.dtensor import lowered, relayout
from kdist.graphs.layer_names import layer_of, operation_of, together

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh, run


def recorded(mesh, function, *inputs, layers=()):
    result, program = run(mesh, function, *inputs, layers=layers)
    return list(program.collectives), result


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
            hidden = relayout.relayout(hidden, layout, alltoall=False)
        return net.get_layer("two")(hidden)


def test_the_private_names_exist():
    assert isinstance(dtensor_internals.lowered_names(), frozenset)
    mesh, _ = inner_mesh(model=2)
    program = tf.function(lambda x: x + 1.0)
    with lowered.record() as recorder, dtensor.default_mesh(mesh):
        program(dtensor.call_with_layout(tf.zeros, dtensor.Layout.replicated(mesh, 1), (4,)))
    found = [node.op for one in recorder.programs.values() for d in one for node in d.node_def]
    assert "AddV2" in found, "TensorFlow no longer registers lowered programs as _func_..."


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
        np.concatenate([t.numpy() for t in result.parts], axis=1), net(x), atol=1e-5
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
    meshes = [inner_mesh(**axes)[0] for axes in ({"model": 2}, {"seq": 2})]
    programs = []
    with lowered.record() as recorder:
        for mesh in meshes:
            layout = dtensor.Layout([mesh.dim_names[0]], mesh)
            programs.append(tf.function(tf.reduce_sum))
            with dtensor.default_mesh(mesh):
                programs[-1](dtensor.call_with_layout(tf.zeros, layout, (4,)))
    for mesh in meshes:
        (one,) = lowered.collectives(recorder, mesh)
        assert one.axis == tuple(mesh.dim_names)


def test_layers_of_nodes():
    layers = ("dense", "dense_1", "block/att/query")
    at = lambda node: layer_of(node, layers)  # noqa: E731
    assert at("net_1/dense_1/BiasAdd/DTensorAllGatherOp_9_1") == "dense"
    assert at("net_1/dense_1_2/MatMul/DTensorAllReduceOp_9_1") == "dense_1"
    assert at("gradient_tape/net_1/dense_1/MatMul/MatMul/DTensorAllReduceOp_9") == "dense"
    assert at("block_1/att_1/query_1/einsum/Einsum/DTensorAllReduceOp_9") == "block/att/query"
    assert at("Sum/DTensorAllReduceOp_9_1") == ""
    assert layer_of("net_1/dense_1/MatMul/DTensorAllReduceOp_9") == "net_1/dense_1"
    assert layer_of("a/dense_1/MatMul/DTensorAllReduceOp_9", ("dense_1",)) == "dense_1"


def test_layers_that_something_else_than_the_model_calls():
    layers = ("net/up", "net/up_1", "net/a/query", "net/b/query")
    at = lambda node: layer_of(node, layers)  # noqa: E731
    assert at("stage_call_1/up_1/Tensordot/MatMul/DTensorAllReduceOp_9_1") == "net/up"
    assert at("gradient_tape/stage_call_1/up_1_1/MatMul") == "net/up_1"
    assert at("stage_call_1/query_1/MatMul") == ""  # either of two
    assert at("stage_call_1/up") == ""  # an operation of that name
    assert at("stage_call_1/a_1/query_1/MatMul") == "net/a/query"


def test_layers_of_one_node_are_told_together():
    assert together([]) == together([""]) == ""
    assert together(["", "net/up", "net/up"]) == "net/up"
    assert together(["block/query", "", "block/key"]) == "block/query+key"
    assert together(["up", "gate"]) == "up+gate"
    assert together(["block", "block/up"]) == "block+block/up"


def collective(kind="all-gather", layer="one", size=64, phase="forward"):
    return lowered.Collective(kind, ("model",), (4, 4), "float32", size, "node", layer, phase)


def test_the_table_groups_and_sums():
    text = lowered.format_table([collective(), collective(size=1000), collective("all-reduce")])
    lines = [line.split() for line in text.splitlines()]
    assert ["one", "forward", "all-gather", "model", "2", "1,064"] in lines
    assert ["one", "forward", "all-reduce", "model", "1", "64"] in lines
    assert ["total", "3", "1,128"] in lines
    assert "block[red]x" in lowered.format_table([collective(layer="block[red]x")])


def test_operations_are_read_from_what_dtensor_made_of_their_names() -> None:
    traced = {"a/dense_1/MatMul", "AddN_5", "AddN"}
    assert operation_of("a/dense_1/MatMul", traced) == "a/dense_1/MatMul"
    assert operation_of("a/dense_1/MatMul/DTensorAllReduceOp_9_1", traced) == "a/dense_1/MatMul"
    assert operation_of("AddN_5_968_2", traced) == "AddN_5"
    assert operation_of("AddN_7", traced) == "AddN"
    assert operation_of("b/Sum/DTensorAllGather", traced) == "b/Sum/DTensorAllGather"
