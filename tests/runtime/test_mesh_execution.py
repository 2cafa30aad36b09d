"""Stages with inner axes: what is called where, what travels, what is refused."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.graphs import executed
from kdist.pipeline import get_schedule
from kdist.runtime.flow import Flow
from kdist.runtime.order import execution_order
from kdist.runtime.recorder import TimelineRecorder

import keras
import numpy as np
import pytest
import tensorflow as tf

WIDTH = 8
CUTS = {
    "layer[02]/kernel": (None, "model"),
    "layer[02]/bias": ("model",),
    "layer[13]/kernel": ("model", None),
}


def chain(**options: Any) -> keras.Model:
    x = inputs = keras.Input((WIDTH,))
    for i in range(4):
        x = keras.layers.Dense(WIDTH, "tanh", name=f"layer{i}", **options)(x)
    return keras.Model(inputs, x)


# The boundary between the stages is cut too, where those of CUTS send it whole.
CUT_BOUNDARY = {
    "layer[13]/kernel": (None, "model"),
    "layer[13]/bias": ("model",),
    "layer[02]/kernel": ("model", None),
}


def on_meshes(
    network: keras.Model,
    schedule: str = "1f1b",
    micro: int = 2,
    cuts: Any = CUTS,
    **axes: int,
) -> Any:
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**{"pipe": 2, "data": 1, "model": 2, **axes}),
        layout_map=cuts,
        pipeline=kdist.PipelineConfig(micro_batches=micro, schedule=schedule),
    )
    return kdist.parallelize(network, config)


def data(rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, WIDTH)), rng.normal(size=(rows, WIDTH))


def of_layers(found: Any) -> list[Any]:
    """Collectives without the names of their nodes, which count up."""
    return [dataclasses.replace(one, node="") for one in found.collectives]


def test_collectives_are_those_of_the_cut_layers_inside_a_stage() -> None:
    model = on_meshes(chain(), data=2)
    model.compile("sgd", "mse")
    before = kdist.inspect(model)
    model.train_on_batch(*data())
    found = kdist.inspect(model)
    assert of_layers(before) == of_layers(found)
    assert found.fallbacks == ()
    # A row-cut layer sums its output, a column-cut one the gradient of its input; the very first
    # layer's input has none. Once each, however many micro-batches and replicas.
    assert Counter((c.kind, c.layer, c.phase) for c in found.collectives) == {
        ("all-reduce", "layer1", "forward"): 1,
        ("all-reduce", "layer3", "forward"): 1,
        ("all-reduce", "layer2", "backward"): 1,
    }
    assert {c.axis for c in found.collectives} == {("model",)}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "interleaved"])
def test_looking_before_the_first_step_changes_no_step(schedule: str) -> None:
    trained = []
    for looked_at in (False, True):
        keras.utils.set_random_seed(0)
        model = on_meshes(chain(), schedule)
        model.compile("adam", "mse")
        before = kdist.inspect(model, 8) if looked_at else None
        model.fit(*data(16), batch_size=8, epochs=2, verbose=0)
        trained.append(model.get_weights())
    assert of_layers(before) == of_layers(kdist.inspect(model, 8))
    for one, other in zip(*trained, strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_live_on_the_devices_of_their_stage_in_parts() -> None:
    model = on_meshes(chain(), data=2)
    parallel = attached(model)
    for i in range(4):
        entry = parallel.entries[id(model.get_layer(f"layer{i}").kernel)]
        slices = parallel.topology.group(i // 2)
        assert sorted(entry.locals) == [(s, k) for s in slices for k in range(2)]
        assert {tuple(local.shape) for local in entry.locals.values()} == {
            (WIDTH, WIDTH // 2) if i % 2 == 0 else (WIDTH // 2, WIDTH)
        }


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_calls_follow_the_order_that_cannot_deadlock(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: dict[int, list[Any]] = {0: [], 1: []}
    original = Flow.run

    def run(self: Flow, one: Any, recorder: Any) -> Any:
        called[self.replica].append(one)
        return original(self, one, recorder)

    monkeypatch.setattr(Flow, "run", run)
    model = on_meshes(chain(), schedule, data=2)
    model.compile("sgd", "mse")
    model.train_on_batch(*data())
    wanted = execution_order(get_schedule(schedule, stages=2, micro_batches=2))
    assert called == {0: list(wanted), 1: list(wanted)}


@pytest.mark.parametrize("cuts", [CUTS, CUT_BOUNDARY], ids=["whole", "cut"])
def test_each_device_sends_its_part_to_its_peer(cuts: Any) -> None:
    model = on_meshes(chain(), cuts=cuts)
    model.compile("sgd", "mse")
    functions = executed.watch(lambda: model.train_on_batch(*data()))
    first, second = (one.devices for one in attached(model).topology.slices)
    shape = (4, WIDTH // 2 if cuts is CUT_BOUNDARY else WIDTH)
    sent = Counter(
        (t.source, t.target)
        for t in executed.largest(functions).transfers
        if (t.shape, t.dtype) == (shape, "float32") and (t.source in first) != (t.target in first)
    )
    # Two micro-batches: an activation there and its gradient back, from each device to its peer.
    peers = list(zip(first, second, strict=True))
    assert sent == dict.fromkeys([*peers, *((b, a) for a, b in peers)], 2)


def test_a_loop_of_ones_own(float64: None) -> None:
    plain = chain(kernel_regularizer=keras.regularizers.L2(0.1))
    model = on_meshes(chain(kernel_regularizer=keras.regularizers.L2(0.1)), data=2)
    model.set_weights(plain.get_weights())
    for one in (plain, model):
        one.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = data(6)
    loss, gradients = kdist.gradients(model, x, y)
    kdist.apply_gradients(model, gradients)
    np.testing.assert_allclose(loss, plain.train_on_batch(x, y), rtol=1e-6)
    for a, b in zip(plain.get_weights(), model.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("inner", [1, 2])
def test_statistics_go_from_micro_batch_to_micro_batch(inner: int, float64: None) -> None:
    x = inputs = keras.Input((WIDTH,))
    norm = keras.layers.BatchNormalization(momentum=0.7, name="norm")
    x = norm(x)
    for i in range(4):
        x = keras.layers.Dense(WIDTH, name=f"layer{i}")(x)
    model = on_meshes(keras.Model(inputs, x), model=inner)
    model.compile("sgd", "mse")
    mean = np.zeros(WIDTH)
    for rows in (3, 1):  # as micro-batches of 2 and 1 rows, then of 1 and none
        x, y = data(rows)
        model.train_on_batch(x, y)
        for part in filter(len, np.array_split(x, 2)):
            mean = 0.7 * mean + 0.3 * part.mean(0)
        np.testing.assert_allclose(norm.moving_mean, mean, rtol=1e-9)


def test_masks_losses_and_the_loss_scale(float64: None) -> None:
    def build() -> keras.Model:
        x = inputs = keras.Input((4,), dtype="int32")
        x = keras.layers.Embedding(16, WIDTH, mask_zero=True, name="table")(x)
        for i in range(2):
            x = keras.layers.Dense(WIDTH, "tanh", name=f"layer{i}")(x)
        outputs = {name: keras.layers.Dense(1, name=name)(x) for name in ("a", "b")}
        return keras.Model(inputs, outputs)

    plain, model = build(), on_meshes(build(), cuts={"layer1/kernel": ("model", None)})
    model.set_weights(plain.get_weights())
    tokens = np.random.default_rng(0).integers(1, 16, (3, 4))
    tokens[0, 1:] = tokens[2, 3:] = 0  # so micro-batches count unlike their rows
    y = {name: np.full((3, 4, 1), value) for name, value in (("a", 1.0), ("b", 3.0))}
    logs = []
    for one in (plain, model):
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 1024.0)
        one.compile(optimizer, {"a": "mse", "b": "mae"}, loss_weights={"a": 0.3, "b": 0.7})
        logs.append(one.train_on_batch(tokens, y, return_dict=True))
    assert set(logs[0]) == {"loss", "a_loss", "b_loss"}
    for name, value in logs[0].items():
        np.testing.assert_allclose(logs[1][name], value, rtol=1e-6)
    for a, b in zip(plain.get_weights(), model.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_loop_is_an_island_of_each_half_of_its_stage(schedule: str, float64: None) -> None:
    """Its lists of values go from no function to another: the backward half runs it once more."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        x = inputs = keras.Input((WIDTH,))
        x = keras.layers.Dense(WIDTH, "tanh", name="layer0")(x)
        x = keras.layers.Reshape((4, WIDTH // 4))(x)
        x = keras.layers.LSTM(WIDTH, name="loop")(x)
        for i in range(1, 4):
            x = keras.layers.Dense(WIDTH, "tanh", name=f"layer{i}")(x)
        return keras.Model(inputs, x)

    plain, model = build(), on_meshes(build(), schedule, data=2)
    model.set_weights(plain.get_weights())
    x, y = data()
    for one in (plain, model):
        one.compile(keras.optimizers.SGD(0.1), "mse")
    plain.train_on_batch(x, y)
    with pytest.warns(UserWarning, match="StatelessWhile in layer 'loop'.*else stays cut"):
        model.train_on_batch(x, y)
    for a, b in zip(plain.get_weights(), model.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-12)
    found = kdist.inspect(model)
    assert found.fallbacks == ()
    assert len(found.islands) >= 2 and {island.layer for island in found.islands} == {"loop"}
    assert 0.5 < sum(island.share for island in found.islands) < 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_each_stage_runs_the_schedule_s_instructions_in_their_order(schedule: str) -> None:
    model = on_meshes(chain(), schedule, micro=4, data=2)
    model.compile("sgd", "mse")
    recorder = attached(model).recorder = TimelineRecorder()
    for _ in range(2):
        model.train_on_batch(*data(16))
    wanted = get_schedule(schedule, stages=2, micro_batches=4)
    for replica in range(2):
        assert recorder.executed(replica) == [list(row) for row in wanted.stages]
        times = recorder.times(replica)
        assert all(arrived <= start <= end for arrived, start, end in times.values())


def test_clocks_wait_for_the_work_of_all_devices() -> None:
    """What TensorFlow inlines has no end of its own: a call's end would be its beginning."""
    width = 512
    x = inputs = keras.Input((width,))
    for i in range(4):
        x = keras.layers.Dense(width, "tanh", name=f"layer{i}")(x)
    model = on_meshes(keras.Model(inputs, x))
    model.compile("sgd", "mse")
    recorder = attached(model).recorder = TimelineRecorder()
    x = np.zeros((1024, width), np.float32)
    for _ in range(2):
        model.train_on_batch(x, x)
    times = recorder.times()
    assert min(end - start for _, start, end in times.values()) > 5e-4


def test_a_timeline_is_drawn() -> None:
    model = on_meshes(chain())
    model.compile("sgd", "mse")
    timeline = kdist.callbacks.PipelineTimeline(verbose=0)
    model.fit(*data(), verbose=0, callbacks=[timeline])
    assert timeline.timeline is not None
    kinds = Counter(e.kind for e in timeline.timeline.events)
    assert kinds == {"forward": 4, "backward": 4, "communication": 4}


def test_predict_gives_rows_in_order() -> None:
    plain, model = chain(), on_meshes(chain(), data=2)
    model.set_weights(plain.get_weights())
    x, _ = data(7)
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-6)
    assert isinstance(model.predict_on_batch(tf.constant(x)), np.ndarray)
