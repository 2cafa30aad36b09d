"""Parameters that are alike share one trace of their update, on all devices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import kdist
from kdist._compat.run_metadata import function_graphs
from kdist.api.attached import attached
from kdist.optimizer.local import ELEMENTWISE, LocalOptimizer
from kdist.optimizer.logical_slots import Vectors
from kdist.optimizer.shared_steps import SharedSteps
from kdist.storage.flat_rows import Piece
from kdist.storage.row_views import RowsBacking, rows_view
from kdist.storage.variables import backing_of, make_local

import keras
import numpy as np
import pytest
import tensorflow as tf

DEVICES = ("/CPU:0", "/CPU:1")


def copies(logical: Any, share: bool, view: bool) -> list[LocalOptimizer]:
    """A local optimizer on each of two devices, of two variables of one shape and a third one."""
    whole = [keras.Variable(np.zeros(shape), name="w") for shape in ((4, 2), (4, 2), (3,))]
    logical.build(whole)
    steps, found = SharedSteps(share), []
    for k, device in enumerate(DEVICES):
        rng = np.random.default_rng(k)
        with tf.device(device):
            mine = [make_local(v, rng.normal(size=v.shape)) for v in whole]
            if view:
                mine[0] = rows_view(whole[0], mine[0], (slice(1, 3),))
                mine[1] = rows_view(whole[1], mine[1], (slice(2, 4),))
        found.append(LocalOptimizer(logical, device, [0, 1, 2], mine, whole, steps))
    return found


def train(local: list[LocalOptimizer]) -> list[np.ndarray]:
    """Three steps; the variables and the optimizers' state after them."""

    @tf.function(autograph=False)
    def step(number: Any) -> None:
        for k, one in enumerate(local):
            with tf.device(one.device):
                # By their shapes alone: a view that has been read is handed over as it is.
                sizes = [float(np.prod(v.shape)) for v in one.variables]
                gradients = [tf.sin(tf.range(n, dtype=tf.float32) + number + k) for n in sizes]
                shaped = [
                    tf.cast(tf.reshape(g, v.shape), v.dtype)
                    for g, v in zip(gradients, one.variables)
                ]
                one.apply(shaped, one.variables)

    for number in range(3):
        step(tf.constant(float(number)))
    state = [v for one in local for v in (*one.variables, *one.optimizer.variables)]
    return [np.asarray(v.value) for v in state if not v.path.endswith("learning_rate")]


@pytest.mark.parametrize("view", [False, True], ids=["variables", "rows"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_shared_updates_are_those_of_each(name: str, view: bool) -> None:
    make = getattr(keras.optimizers, name)
    local = copies(make(0.1), share=True, view=view)
    found = train(local)
    assert len(local[0].steps.traces) == 2  # of the two shapes
    for one, wanted in zip(found, train(copies(make(0.1), share=False, view=view)), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-12, atol=1e-14)


class ByName(keras.optimizers.SGD):
    """Updates some parameters twice as fast, by their names."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """See Keras."""
        fast = "fast" in getattr(variable, "path", variable.name)
        super().update_step(gradient, variable, learning_rate * (2.0 if fast else 1.0))


def trained(optimizer: Any, level: int) -> Any:
    kdist.init(cpu_devices=8)
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, name=name) for name in ("fast", "slow", "third")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=4),
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64),
        fusion=kdist.FusionConfig(mode="none"),
    )
    model = kdist.parallelize(model, config)
    model.compile(optimizer, "mse")
    model.train_on_batch(np.ones((8, 8)), np.zeros((8, 8)))
    return model


@pytest.mark.parametrize("level", [0, 1])
def test_layers_and_replicas_share_traces(level: int) -> None:
    update = attached(trained(keras.optimizers.Adam(), level)).update
    (local,) = update.jobs.local
    assert len(local) == 4
    assert {one.steps for one in local} == {local[0].steps}
    assert len(update.jobs.jobs) == (6 if level == 0 else 24)
    assert len(local[0].steps.traces) == 2


def test_optimizers_that_keras_does_not_ship_share_nothing() -> None:
    model = trained(ByName(0.1), 1)
    assert not attached(model).update.jobs.local[0][0].steps.traces


def test_rows_are_read_inside_their_update() -> None:
    """Where the rows are is an argument: devices that own different rows call one function."""
    local = copies(keras.optimizers.Adam(0.1), share=True, view=True)

    @tf.function(autograph=False)
    def step() -> None:
        for one in local:
            for view in one.variables[:2]:
                backing_of(view).hold()  # an assignment would cut them once more
            with tf.device(one.device):
                one.apply([tf.ones(v.shape, v.dtype) for v in one.variables], one.variables)

    types = Counter(op.type for op in step.get_concrete_function().graph.get_operations())
    assert types["StatefulPartitionedCall"] == 6
    assert types["StridedSlice"] == types["Slice"] == 0
    assert len(local[0].steps.traces) == 2


@pytest.mark.parametrize("level", [1, 3])
def test_each_trace_is_prepared_once_per_device(level: int) -> None:
    """TensorFlow would make a variant of a function for each call that hands over a constant."""
    model = trained(keras.optimizers.Adam(), level)
    model.make_train_function(force=True)
    graphs = function_graphs(lambda: model.train_on_batch(np.ones((8, 8)), np.zeros((8, 8))))
    calls = [
        node.attr["f"].func.name
        for graph in graphs
        for part in graph.partition_graphs
        for node in part.node
        if node.attr["f"].func.name.startswith("kdist_update_")
    ]
    assert len(calls) == 24
    assert len(set(calls)) == 2


def test_making_optimizers_reads_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras asks a variable's value who it is, and to read a view is to put its parts together."""
    reads: list[Any] = []
    read = RowsBacking.read
    monkeypatch.setattr(RowsBacking, "read", lambda self: reads.append(self) or read(self))
    local = copies(keras.optimizers.Adam(0.1, weight_decay=0.1), share=True, view=True)
    assert not reads
    assert all(len(one.optimizer.variables) == 8 for one in local)


def test_a_vector_of_which_only_pieces_are_known_keeps_the_rest() -> None:
    flat = keras.Variable([1.0, 2.0, 3.0, 4.0])
    vectors = Vectors()
    vectors.put("CPU:0", Piece(flat, 2, (1,)), np.array([7.0]))
    vectors.put("CPU:0", Piece(flat, 0, (1,)), np.array([8.0]))
    vectors.finish()
    assert flat.numpy().tolist() == [8, 2, 7, 4]
