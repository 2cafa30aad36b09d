import os
import threading

from kdist.config.idle_layouts import uncut_dim
from kdist.dtensor import relayout

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from .dtensor_parts import cut, inner_mesh, kinds, run, specs, whole

X = np.arange(64, dtype="float32").reshape(8, 8) / 64
LAYOUTS = [(None, None), ("model", None), (None, "model")]


def test_layouts_leave_the_data_axis_out():
    mesh, topology = inner_mesh(data=2, model=4)
    layout = relayout.layout_for(mesh, ("data", ("data", "model"), None), topology)
    assert list(layout.sharding_specs) == ["unsharded", "model", "unsharded"]
    # `batch` is another name of the data axis.
    assert list(relayout.layout_for(mesh, ("batch",), topology).sharding_specs) == ["unsharded"]


def test_several_inner_axes_on_one_dim_must_be_merged():
    mesh, topology = inner_mesh(a=2, b=2)
    with pytest.raises(ValueError, match=r"they have no axes together.*Received: axes="):
        relayout.layout_for(mesh, (("a", "b"), None), topology)


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
            moved = relayout.relayout(x * 2.0, layout, alltoall=False)
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
        np.testing.assert_array_equal(whole(moved), 2 * X)
        np.testing.assert_allclose(whole(gradient), 8 * X, rtol=1e-6)


def test_two_settings_in_one_process_differ():
    mesh, topology = inner_mesh(data=2, model=4)

    def program(x):
        return relayout.relayout_active(x * 2.0, ("data", "model"))

    for alltoall in (True, False, True):
        with relayout.tracing(mesh, topology, alltoall=alltoall):
            result, found = kinds(mesh, program, cut(X, mesh, "model", None))
        assert found == (["all-to-all"] if alltoall else ["all-gather"])
        assert specs(result) == (None, "model")
        np.testing.assert_array_equal(whole(result), 2 * X)


def test_alltoall_that_the_environment_forbids_is_refused(monkeypatch):
    mesh, topology = inner_mesh(model=2)
    monkeypatch.setenv(relayout.ALLTOALL_SWITCH, "0")
    with (
        pytest.raises(ValueError, match=r"unset DTENSOR_USE_ALL_TO_ALL.*Received.*'0'"),
        relayout.tracing(mesh, topology, alltoall=True),
    ):
        pass
    with relayout.tracing(mesh, topology, alltoall=False):
        pass


def test_relayout_of_integers_and_bools():
    mesh, _ = inner_mesh(model=4)
    layout = dtensor.Layout([dtensor.UNSHARDED, "model"], mesh)
    for value in (X.astype("int32"), X > 0.5):
        result, _ = kinds(
            mesh,
            lambda x: relayout.relayout(x, layout, alltoall=False),
            cut(value, mesh, *LAYOUTS[1]),
        )
        assert specs(result) == (None, "model")
        np.testing.assert_array_equal(np.concatenate([t.numpy() for t in result.parts], 1), value)


@pytest.mark.parametrize(
    ("axes", "operation"),
    [({"model": 4}, "CollectiveGatherV2"), ({"a": 2, "b": 2}, "CollectiveReduceV2")],
)
def test_gathers_use_the_fast_operation_only_where_it_is_right(axes, operation, monkeypatch):
    monkeypatch.setenv(relayout.GATHER_SWITCH, "1")
    mesh, _ = inner_mesh(**axes)
    rest = dtensor.Layout.replicated(mesh, 2)
    result, program = run(
        mesh, lambda x: dtensor.relayout(x + 1.0, rest), cut(X, mesh, *(*axes, None)[:2])
    )
    for part in result.parts:
        np.testing.assert_array_equal(part, X + 1)
    nodes = program.definition.node_def
    assert {n.op for n in nodes if n.op.startswith("Collective")} == {operation}
    assert {c.kind for c in program.collectives} == {"all-gather"}
    assert os.environ[relayout.GATHER_SWITCH] == "1"


def test_without_a_trace_nothing_happens():
    x = tf.constant(X)
    assert relayout.active() is None
    assert relayout.relayout_active(x, ("model", None)) is x


def test_a_trace_belongs_to_its_thread():
    mesh, topology = inner_mesh(model=2)
    seen = []
    with relayout.tracing(mesh, topology, alltoall=False) as trace:
        other = threading.Thread(target=lambda: seen.append(relayout.active()))
        other.start()
        other.join()
        assert relayout.active() is trace
    assert seen == [None] and relayout.active() is None


def test_counts_and_missing_entries():
    mesh, topology = inner_mesh(data=2, model=4)
    x = cut(np.zeros((8, 8, 3), "float32"), mesh, None, None, None)
    for strategy in ((2, 4), ("data", "model"), (None, "model", None)):
        with relayout.tracing(mesh, topology, alltoall=False) as trace:
            result, _ = kinds(mesh, lambda x, s=strategy: relayout.relayout_active(x, s), x)
        assert specs(result) == (None, "model", None)
        assert trace.uncut == []
    with (
        pytest.raises(ValueError, match="entries"),
        relayout.tracing(mesh, topology, alltoall=False),
    ):
        relayout.relayout_active(tf.zeros((4,)), (None, "model"))


def test_a_dim_that_does_not_divide_stays_whole():
    mesh, topology = inner_mesh(model=4)
    x = cut(np.zeros((6, 8), "float32"), mesh, None, None)
    with relayout.tracing(mesh, topology, alltoall=False) as trace:
        result, _ = kinds(mesh, lambda x: relayout.relayout_active(x, ("model", None), "x"), x)
    assert specs(result) == (None, None)
    assert trace.uncut == [uncut_dim("x", 0, 6, 4, ("model",))]
