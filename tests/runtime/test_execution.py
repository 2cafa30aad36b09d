"""A pipeline executes its schedule, where it should, and sends what it should."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.graphs.executed import PRODUCTS, largest, watch
from kdist.pipeline import Forward, Gather, get_schedule
from kdist.runtime.flow import Flow
from kdist.runtime.recorder import TimelineRecorder

import keras
import numpy as np
import pytest

from .pipeline_parts import WIDTH, chain, data, pipelined, recorded


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("gpipe", {}), ("1f1b", {"data": 2}), ("interleaved", {}), ("zero_bubble", {})],
)
def test_the_executed_order_is_the_schedule(schedule: str, options: Any) -> None:
    recorder = recorded(pipelined(schedule, **options))
    planned = get_schedule(schedule, stages=2, micro_batches=4)
    for replica in range(options.get("data", 1)):
        assert recorder.executed(replica) == [list(row) for row in planned.stages]
        times = recorder.times(replica)
        for row in planned.stages:
            for before, after in zip(row, row[1:]):
                assert times[before][2] <= times[after][1], (before, after)


def test_without_one_control_edge_the_order_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = Forward(0, 2)  # after the first backward, which has a long way to go
    original = Flow.run

    def run(self: Flow, one: Any, recorder: Any) -> Any:
        first, last = original(self, one, recorder)
        return (None if one == removed else first), last

    monkeypatch.setattr(Flow, "run", run)
    x = inputs = keras.Input((WIDTH,))
    # The second stage takes long, so that a forward of the first that waits for nothing is early.
    for name, units in (("small", WIDTH), ("large", 1024), ("larger", 1024), ("head", WIDTH)):
        x = keras.layers.Dense(units, name=name)(x)
    stages = {"small": 0, "large": 1}
    model = kdist.PipelineModel(keras.Model(inputs, x), 2, 4, "1f1b", assignment=stages)
    model.compile("sgd", "mse")
    recorder = attached(model).recorder = TimelineRecorder()
    planned = get_schedule("1f1b", stages=2, micro_batches=4)
    # Nothing forces the planned order any more; a busy machine may still keep it by chance.
    for _ in range(20):
        model.train_on_batch(*data(rows=1024))
        assert recorder.executed()[1] == list(planned.stages[1])
        if recorder.executed()[0] != list(planned.stages[0]):
            return
    pytest.fail("without the edge the order is the same in 20 steps")


def test_a_schedule_from_a_file(tmp_path: Any) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,,0B1,0B0\n,1F0,1F1,1B1,1B0\n")
    recorder = recorded(pipelined(str(path), micro=2))
    assert [one.cell(2) for one in recorder.executed()[0]] == ["0F0", "0F1", "0B1", "0B0"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_only_neighbours_talk(replicas: int) -> None:
    stages, micro = 3, 4
    model = kdist.PipelineModel(chain(), stages, micro, data=replicas)
    model.compile("sgd", "mse")
    attached(model).prepare("train", data())
    step = largest(watch(lambda: model.train_on_batch(*data())))
    device = {f"/device:CPU:{i}": divmod(i, replicas) for i in range(stages * replicas)}
    sent: Counter[tuple[str, int, int]] = Counter()
    for transfer in step.transfers:
        found = re.match(r"replica(\d+)/(\d+)([FB])(\d+)/\w*PartitionedCall", transfer.node)
        if transfer.control or not found:
            continue
        (a, r), (b, q) = device[transfer.source], device[transfer.target]
        assert r == q == int(found[1]) and a == int(found[2])
        sent[found[3], a, b] += 1
    # One tensor per boundary and micro-batch, forward and back, in every replica.
    each = micro * replicas
    assert sent == {
        ("F", 0, 1): each,
        ("F", 1, 2): each,
        ("B", 2, 1): each,
        ("B", 1, 0): each,
    }


@pytest.mark.parametrize("keep", [False, True])
def test_level_3_gathers_once_a_step_as_planned(keep: bool) -> None:
    config = kdist.OptimizerConfig(level=3, threshold_kb=0, keep_gathered=keep)
    model = pipelined("1f1b", data=2, optimizer=config)
    attached(model).prepare("train", data())
    step = largest(watch(lambda: model.train_on_batch(*data())))
    sent = [t.nbytes for t in step.transfers if gathered(t)]
    (planned,) = [row for row in model.plan().traffic() if row.what == "gather"]
    assert (len(sent), sum(sent)) == (planned.messages, planned.nbytes)


CUTS = {"layer[0246]/kernel": (None, "model")}


@pytest.mark.parametrize(
    ("chunks", "inner", "keep", "mode"),
    [
        (2, 1, False, "auto"),
        (2, 1, False, "none"),
        pytest.param(2, 2, False, "auto", marks=pytest.mark.long),
        pytest.param(2, 2, False, "none", marks=pytest.mark.long),
        pytest.param(4, 1, True, "auto", marks=pytest.mark.long),
        pytest.param(4, 1, True, "none", marks=pytest.mark.long),
    ],
)
def test_level_3_gathers_a_chunk_s_parameters_each_time_as_planned(
    chunks: int, inner: int, keep: bool, mode: Any
) -> None:
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(pipe=2, data=2, model=inner),
        layout_map=CUTS if inner > 1 else {},
        optimizer=kdist.OptimizerConfig(
            level=3, threshold_kb=0, keep_gathered=keep, partition="slice"
        ),
        pipeline=kdist.PipelineConfig(micro_batches=4, schedule="interleaved", chunks=chunks),
        fusion=kdist.FusionConfig(mode=mode),
    )
    model = kdist.parallelize(chain(), config)
    model.compile("sgd", "mse")
    attached(model).prepare("train", data())
    step = largest(watch(lambda: model.train_on_batch(*data())))
    sent = [t.nbytes for t in step.transfers if gathered(t)]
    plan = model.plan()
    (planned,) = [row for row in plan.traffic() if row.what == "gather"]
    assert (len(sent), sum(sent)) == (planned.messages, planned.nbytes)
    # A message per gather to each device from its peer; what is fused is of one chunk.
    gathers = plan.work.of(Gather)
    assert len(sent) == len(gathers) * 2 * inner
    each = Counter(w for one in gathers for w in one.weights)
    assert set(each) == set(range(16)) and (max(each.values()) == 1) == keep
    # What is cut over the inner axis has other holders than what is not.
    apart = 0 if inner == 1 else chunks // 2
    most = max(len(one.weights) for one in gathers)
    assert most == (1 if mode == "none" else 16 // (2 * chunks) - apart)


def gathered(sent: Any) -> bool:
    """Whether a transfer is one of a gather."""
    return re.match(r"\dG(_\d+)?/", sent.node) is not None


def test_every_stage_computes_on_its_device_with_its_weights() -> None:
    model = kdist.PipelineModel(chain(), 4, 2)
    model.compile("adam", "mse")
    attached(model).prepare("train", data())
    step = largest(watch(lambda: model.train_on_batch(*data())))
    products = Counter(n.device for n in step.select(PRODUCTS))
    assert set(products) == {f"/device:CPU:{i}" for i in range(4)}
    # Two layers a stage, two micro-batches: forward, weight gradient, input gradient.
    assert products["/device:CPU:1"] == products["/device:CPU:2"] == 2 * 2 * 3
    assert products["/device:CPU:0"] == 2 * (2 * 3 - 1)
    held = [m.parameters for m in kdist.inspect(model).memory]
    assert held == [2 * (WIDTH * WIDTH + WIDTH) * 4] * 4
    slots = [m.slots for m in kdist.inspect(model).memory]
    assert all(2 * h <= s <= 2 * h + 64 for h, s in zip(held, slots))


def test_zero_bubble_computes_each_gradient_once() -> None:
    counts = []
    for schedule in ("1f1b", "zero_bubble"):
        model = pipelined(schedule)
        attached(model).prepare("train", data())
        step = largest(watch(lambda model=model: model.train_on_batch(*data())))
        counts.append(Counter(n.device for n in step.select(PRODUCTS)))
    assert counts[0] == counts[1]


def test_a_tied_weight_is_one(float64: None) -> None:
    def build() -> keras.Model:
        tokens = inputs = keras.Input((4,), dtype="int32")
        table = keras.layers.ReversibleEmbedding(16, WIDTH, tie_weights=True, name="table")
        x = keras.layers.Dense(WIDTH, "tanh", name="middle")(table(tokens))
        return keras.Model(inputs, table(x, reverse=True))

    plain, model = build(), build()
    model.set_weights(plain.get_weights())
    kdist.PipelineModel(model, 2, 2, assignment={"table": 0, "table#1": 1})
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 16, (2, 4, 4))
    for one in (plain, model):
        one.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        one.train_on_batch(x, y)
    entry = attached(model).entries[id(model.get_layer("table").weights[0])]
    first, second = (np.array(local.value) for local in entry.locals.values())
    np.testing.assert_array_equal(first, second)
    assert [at[0] for at in entry.locals] == [0, 1]
    # The gradients of both stages count.
    for a, b in zip(plain.get_weights(), model.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_predict_returns_whole_outputs_in_order() -> None:
    model, plain = chain(), chain()
    plain.set_weights(model.get_weights())
    x, _ = data(13)
    model = kdist.PipelineModel(model, 2, 3, data=2)
    np.testing.assert_allclose(
        model.predict(x, batch_size=9, verbose=0), plain.predict(x, verbose=0), atol=1e-5
    )


def test_set_stage_and_a_mapping() -> None:
    model = chain(4)
    kdist.set_stage(model.get_layer("layer0"), 0)
    kdist.set_stage(model.get_layer("layer2"), 1)
    kdist.PipelineModel(model, 2, 2)
    assert attached(model).staged.partition.stages == (("layer0", "layer1"), ("layer2", "layer3"))
    model = chain(4)
    kdist.set_stage(model.get_layer("layer2"), 0)
    kdist.PipelineModel(model, 2, 2, assignment={"layer[01]": 0, "layer[23]": 1})
    assert attached(model).staged.partition.stages == (("layer0", "layer1"), ("layer2", "layer3"))


class Around(keras.layers.Layer):
    """A layer that calls another."""

    def __init__(self) -> None:
        super().__init__(name="around")
        self.inner = keras.layers.Dense(WIDTH, name="inner")

    def call(self, x: Any) -> Any:
        return self.inner(x)


def test_a_stage_that_cannot_be_set_is_refused() -> None:
    around, inputs = Around(), keras.Input((WIDTH,))
    model = keras.Model(inputs, keras.layers.Dense(WIDTH, name="head")(around(inputs)))
    kdist.set_stage(model.layers[0], 0)  # inputs go where they are used
    kdist.set_stage(around.inner, 1)
    with pytest.raises(ValueError, match="layer around it.*Received: layer 'inner', stage 1"):
        kdist.PipelineModel(model, 2, 2)
    model = chain(4)
    kdist.set_stage(model.get_layer("layer0"), 1)
    kdist.PipelineModel(model, 2, 2, assignment=[model.layers[1:3], model.layers[3:]])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="Lists of layers.*Received: set_stage of layer 'layer0'"):
        model.train_on_batch(*data())


def test_the_callback_records_what_was_executed(tmp_path: Any, capsys: Any) -> None:
    model = pipelined("1f1b")
    path = tmp_path / "step.json"
    timeline = kdist.callbacks.PipelineTimeline([path])
    history = model.fit(*data(), batch_size=16, epochs=2, verbose=0, callbacks=[timeline])
    assert "bubble" in capsys.readouterr().out and path.exists()
    (bubble,) = {history.history["pipeline_bubble"][-1], float(timeline.timeline.bubble)}
    assert 0 < bubble < 1
    kinds = Counter(e.kind for e in timeline.timeline.events)
    assert kinds == {"forward": 8, "backward": 8, "communication": 8}
    assert "formula for equal stages 20.0%" in timeline.chart().caption
    assert attached(model).recorder is None
    model.fit(*data(), verbose=0)  # without clocks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": {"data": 2}}, "go together"),
        ({"mesh": {"pipe": 2}, "pipeline": None}, "go together"),
        ({"pipeline": "1f1b"}, "pipeline is a kdist.PipelineConfig"),
        ({"layout_map": {"layer0/kernel": ("pipe", None)}}, "cuts no tensor"),
    ],
)
def test_a_wrong_configuration_is_refused(change: Any, message: str) -> None:
    options = {
        "mesh": {"pipe": 2},
        "pipeline": kdist.PipelineConfig(micro_batches=2),
        **change,
    }
    options["mesh"] = kdist.mesh(**options["mesh"])
    with pytest.raises(ValueError, match=message):
        kdist.ParallelConfig(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batches": 0}, "micro_batches is an integer"),
        ({"schedule": "nope"}, "schedule is one of"),
        ({"chunks": 0}, "chunks is an integer"),
        ({"assignment": {"layer0": -1}}, "integers from 0 on"),
        ({"assignment": {"layer9": 0}}, "matches the whole name"),
        ({"assignment": {"layer0": 1, "layer1": 0}}, "layer"),
        ({"stages": 9}, "Every stage needs a layer|needs 9 devices"),
        ({"stages": 0}, "stages is an integer"),
        ({"mesh": None}, "fields of kdist.ParallelConfig"),
    ],
)
def test_a_wrong_pipeline_is_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kdist.PipelineModel(chain(), **{"stages": 2, "micro_batches": 2, **change})


def test_a_timeline_is_of_pipelines() -> None:
    with pytest.raises(ValueError, match="PipelineTimeline is for"):
        plain = kdist.parallelize(chain(2), kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
        plain.compile("sgd", "mse")
        plain.fit(*data(), verbose=0, callbacks=[kdist.callbacks.PipelineTimeline()])


def test_xla_refuses_what_a_loop_keeps() -> None:
    x = inputs = keras.Input((5, 3))
    x = keras.layers.LSTM(4, use_cudnn=False)(keras.layers.Dense(3)(x))
    model = kdist.PipelineModel(keras.Model(inputs, x), 2, 2)
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="unroll the loop.*lstm.*while"):
        model.train_on_batch(np.zeros((4, 5, 3)), np.zeros((4, 4)))


def test_a_pipeline_prints(capsys: Any) -> None:
    model = pipelined("interleaved")
    model.plan().summary()
    assert "pipeline: interleaved, 2 stages, 4 micro-batches" in capsys.readouterr().out
    assert "interleaved, 4 micro-batches" in str(attached(model).config)
    assert dataclasses.is_dataclass(attached(model).config.pipeline)


def test_a_loop_of_ones_own(float64: None) -> None:
    x, y = data()
    expected = chain(4)
    start = expected.get_weights()
    expected.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    model = kdist.PipelineModel(chain(4), 2, 3, data=2)
    model.set_weights(start)
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    for _ in range(4):
        loss, gradients = kdist.gradients(model, x, y)
        kdist.apply_gradients(model, gradients)
        np.testing.assert_allclose(loss, expected.train_on_batch(x, y), rtol=1e-6)
        expected.reset_metrics()
    for a, b in zip(model.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
