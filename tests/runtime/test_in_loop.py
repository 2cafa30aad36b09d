"""Several steps in one graph: as one by one, and without a barrier between them where asked for."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.api import fitted_model
from kdist.api.attached import attached
from kdist.graphs.write_order import READS
from kdist.runtime.in_loop import in_loop

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import assert_close, assert_same_history, config, mlp

RNG = np.random.default_rng(0)
ROWS = 70  # nine batches, the last one of six rows
X, Y = RNG.normal(size=(ROWS, 6)), RNG.normal(size=(ROWS, 3))
MESHES = {
    "data": {"data": 4},
    "inner": {"data": 2, "model": 2},
    "pipe": {"pipe": 2, "data": 2},
    "all": {"pipe": 2, "data": 2, "model": 2},
}
BARRIER = "VarIsInitializedOp"
CASES = [
    ("data", 0, 2, 4),
    ("data", 3, 3, 4),
    ("inner", 0, 4, 4),
    ("pipe", 0, 2, 4),
    *(
        pytest.param(*case, marks=pytest.mark.wide)
        for case in (
            ("data", 1, 4, 4),
            ("data", 2, 2, 4),
            ("inner", 1, 2, 3),
            ("inner", 3, 2, 4),
            ("pipe", 3, 2, 2),
            ("all", 0, 2, 4),
            ("all", 3, 3, 4),
        )
    ),
]


def normed() -> keras.Model:
    model = mlp()
    hidden = keras.layers.LayerNormalization()(model.layers[1].output)
    return keras.Model(model.input, keras.layers.Dense(3, name="down")(hidden))


@keras.saving.register_keras_serializable("test_in_loop")
class Counting(keras.layers.Layer):
    """What it gives depends on how many steps there were before."""

    def build(self, shape: Any) -> None:
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign(self.steps + 1)
        return x * (1 + 0.1 * self.steps)


def counting() -> keras.Model:
    model = mlp()
    hidden = Counting()(model.layers[1].output)
    return keras.Model(model.input, keras.layers.Dense(3, name="down")(hidden))


def trained(model: keras.Model, together: int, each: int, source: Any = None) -> Any:
    """Histories and weights of two epochs."""
    model.unrolled_steps_per_execution = together
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.7)
    adam = keras.optimizers.Adam(schedule, use_ema=True, ema_momentum=0.9)
    eager = model.run_eagerly
    model.compile(adam, "mse", metrics=["mae"], steps_per_execution=each, run_eagerly=eager)
    given = (X, Y) if source is None else (source,)
    size = {"batch_size": 8, "shuffle": False} if source is None else {}
    history = model.fit(*given, epochs=2, verbose=0, **size)
    return history, [v.numpy() for v in (*model.weights, *model.optimizer.variables)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("mesh", "level", "together", "each"), CASES)
def test_it_equals_one_device(mesh: str, level: int, together: int, each: int) -> None:
    options: dict[str, Any] = {"optimizer": kdist.OptimizerConfig(level=level, threshold_kb=0)}
    if "pipe" in MESHES[mesh]:
        options["pipeline"] = kdist.PipelineConfig(micro_batches=2)
    parallel = kdist.parallelize(normed(), config(MESHES[mesh], **options))
    found = [trained(normed(), 1, 1), trained(parallel, together, each)]
    assert_same_history(*(history for history, _ in found))
    assert_close(*(weights for _, weights in found))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mesh", ["data", "inner"])
def test_state_of_layers_goes_from_step_to_step(mesh: str) -> None:
    parallel = kdist.parallelize(counting(), config(MESHES[mesh]))
    found = [trained(counting(), 1, 1), trained(parallel, 2, 4)]
    assert_same_history(*(history for history, _ in found))
    assert_close(*(weights for _, weights in found))


def test_logs_may_have_sizes_that_are_not_known() -> None:
    class Positive(keras.metrics.Metric):
        """The positive parts of one weight."""

        def __init__(self) -> None:
            super().__init__(name="positive")
            self.last = self.add_weight(shape=(3,), initializer="zeros", name="last")

        def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
            self.last.assign(tf.reduce_mean(y - outputs, axis=0))

        def result(self) -> Any:
            last = tf.convert_to_tensor(self.last)
            return tf.reduce_sum(tf.boolean_mask(last, last > 0), keepdims=True)[:1]

    logs = []
    for together in (1, 2):
        model = kdist.parallelize(mlp(), config(MESHES["inner"]))
        model.unrolled_steps_per_execution = together
        model.compile("sgd", "mse", metrics=[Positive()], steps_per_execution=2)
        x, y = X[:32].astype("float32"), Y[:32].astype("float32")
        logs.append(model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["positive"])
    assert logs[0] == logs[1] and logs[0][0]


@pytest.mark.parametrize("where", ["sparse or ragged", "files of its own"])
def test_where_steps_wait_all_the_same_that_is_said(
    where: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kdist.parallelize(mlp(), config(MESHES["data"]))
    if where == "files of its own":
        monkeypatch.setattr(fitted_model, "has_joined", lambda: True)
        for n in range(2):
            np.savetxt(tmp_path / f"{n}.csv", X[:16].astype("float32"))
        names = tf.data.Dataset.from_tensor_slices([str(one) for one in tmp_path.iterdir()])
        lines = tf.data.TextLineDataset(names)
        source = lines.map(_parsed).batch(8)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.FILE
        )
        source = source.with_options(options)
    else:
        source = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
        model.run_eagerly = True
    with pytest.warns(UserWarning, match=rf"unrolled_steps_per_execution has no.*{where}"):
        trained(model, 2, 4, source)


def _parsed(line: Any) -> Any:
    numbers = tf.strings.to_number(tf.strings.split(line, " "))
    return tf.ensure_shape(numbers, (6,)), tf.ensure_shape(numbers[:3], (3,))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("together", "each", "rows"), [(2, 4, 70), (3, 3, 64), (4, 5, 70)])
def test_rows_that_processes_read_are_stepped_on_alike(
    together: int, each: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All data fits whole turns, or ends within one, or at the limit of a call."""
    monkeypatch.setattr(fitted_model, "has_joined", lambda: True)
    parallel = kdist.parallelize(normed(), config({"data": 4}))
    found = []
    for model, sizes in ((normed(), (1, 1)), (parallel, (together, each))):
        source = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(8)
        found.append(trained(model, *sizes, source))
    assert_same_history(*(history for history, _ in found))
    assert_close(*(weights for _, weights in found))


def test_over_inner_axes_such_rows_are_a_call_each_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fitted_model, "has_joined", lambda: True)
    model = kdist.parallelize(mlp(), config({"data": 2, "model": 2}))
    source = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    with pytest.warns(UserWarning, match="unrolled_steps_per_execution has no effect"):
        trained(model, 2, 4, source)


@pytest.mark.parametrize("level", [0, 3])
def test_the_next_forward_pass_does_not_wait_for_the_last_values(level: int) -> None:
    """Of 8 equal layers: what the first of them takes is written, the rest need not be."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, "relu", name=f"up{i}") for i in range(8)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0)
    fusion = kdist.FusionConfig(mode="none")
    mesh = kdist.mesh(data=4)
    cfg = kdist.ParallelConfig(mesh=mesh, optimizer=optimizer, fusion=fusion)
    model = kdist.parallelize(model, cfg)
    model.unrolled_steps_per_execution = 2
    model.compile("sgd", "mse", steps_per_execution=2)
    x = np.ones((8, 64), np.float32)
    model.train_on_batch(x, x)
    step, data = attached(model).step_for(None), (tf.constant(x), tf.constant(x))
    graph = Turn(lambda _: (step.train(data, True), ()))
    waits = sorted(len(graph.waits[name]) for name in graph.programs)
    later = [n for n in waits if n]
    assert len(later) >= len(waits) / 2
    # Chunk by chunk; the last ones wait for all values that the devices of the first step made.
    assert len(set(later)) >= 6
    assert later[0] <= later[-1] / 8


class Turn:
    """The graph of a turn of two steps, as it was traced.

    Attributes:
        writes: Names of what writes variables.
        programs: Names of calls of other functions.
        waits: By operation, the writes before it.
    """

    def __init__(self, step: Any) -> None:
        traced = tf.function(
            lambda: in_loop(step, (), tf.constant(4), together=2), autograph=False
        ).get_concrete_function()
        library = traced.graph.as_graph_def().library.function
        turns = [one for one in library if "several" in one.signature.name]
        turn = max(turns, key=lambda one: len(one.node_def))
        variables = {a.name for a in turn.signature.input_arg if a.type == tf.resource}
        nodes = {node.name: node for node in turn.node_def}
        self.waits: dict[str, set[str]] = {}
        self.writes: list[str] = []
        self.programs: list[str] = []
        todo = list(nodes)
        while todo:
            node = nodes[todo[-1]]
            before = {n for i in node.input if (n := i.lstrip("^").split(":")[0]) in nodes}
            if missing := [name for name in before if name not in self.waits]:
                todo += missing
                continue
            todo.pop()
            if node.name in self.waits:
                continue
            known = set().union(*(self.waits[name] for name in before))
            self.waits[node.name] = known | before & set(self.writes)
            if variables.intersection(node.input) and node.op not in (*READS, BARRIER):
                self.writes.append(node.name)
            elif "PartitionedCall" in node.op:
                self.programs.append(node.name)
