"""`kdist.inspect`: what it reports is what exists and what was lowered."""

from __future__ import annotations

import dataclasses
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.sharding.device import Device

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import CUTS, mlp

X, Y = np.ones((8, 6), np.float32), np.ones((8, 3), np.float32)
HYBRID = {"data": 2, "model": 2}
# The four weights of the network: up 6 x 8 and 8, down 8 x 3 and 3; float32.
UP, UP_BIAS, DOWN, DOWN_BIAS = 6 * 8 * 4, 8 * 4, 8 * 3 * 4, 3 * 4
# A device's own step counter (int64) and learning rate (float32).
SCALARS = 8 + 4


def parallel(axes: dict[str, int], cuts: Any = CUTS, **options: Any) -> keras.Model:
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts, **options)
    return kdist.parallelize(mlp(), config)


def trained(axes: dict[str, int], cuts: Any = CUTS, optimizer: Any = "adam") -> keras.Model:
    model = parallel(axes, cuts)
    model.compile(optimizer, "mse")
    model.train_on_batch(X, Y)
    return model


@pytest.fixture(scope="module")
def hybrid() -> keras.Model:
    return trained(HYBRID)


# -- memory --------------------------------------------------------------------------------------


def test_weights_take_the_bytes_of_their_cuts(hybrid: keras.Model) -> None:
    expected = UP // 2 + UP_BIAS // 2 + DOWN // 2 + DOWN_BIAS
    memory = kdist.inspect(hybrid).memory
    assert [m.device for m in memory] == [f"/device:CPU:{n}" for n in range(4)]
    assert {m.parameters for m in memory} == {expected}


def test_data_in_place_of_rows_is_refused(hybrid: keras.Model) -> None:
    with pytest.raises(ValueError, match="(?s)number of rows.*batch_size=tuple"):
        kdist.inspect(hybrid, (X, Y))  # type: ignore[arg-type]


@pytest.mark.parametrize(("optimizer", "slots"), [("sgd", 0), ("adam", 2), ("nadam", 2)])
def test_optimizer_state_is_kept_once(optimizer: str, slots: int) -> None:
    """Every device keeps the state of what it updates, and all devices together one copy."""
    model = trained(HYBRID, optimizer=optimizer)
    inspection = kdist.inspect(model)
    # Nadam has a scalar more, the product of its momentum schedule.
    scalars = SCALARS + (4 if optimizer == "nadam" else 0)
    for memory, device in zip(inspection.memory, inspection.plan.devices(), strict=True):
        updates = device.updates > 0
        assert memory.slots == slots * device.updated_bytes + updates * scalars
    devices = sum(d.updates > 0 for d in inspection.plan.devices())
    total = slots * (UP + UP_BIAS + DOWN + DOWN_BIAS) + devices * scalars
    assert sum(m.slots for m in inspection.memory) == total


def test_whole_updates_keep_a_whole_copy() -> None:
    model = trained(HYBRID, optimizer=keras.optimizers.Lamb())
    memory = kdist.inspect(model).memory
    each = UP // 2 + UP_BIAS // 2 + DOWN // 2 + DOWN_BIAS
    # The optimizer's own copies of the three cut weights, somewhere.
    assert sum(m.parameters for m in memory) == 4 * each + UP + UP_BIAS + DOWN


def test_bytes_are_those_of_buffers_on_that_device(hybrid: keras.Model) -> None:
    found = {m.device: [0, 0] for m in kdist.inspect(hybrid).memory}
    side = attached(hybrid)
    for entry in side.entries.values():
        for local in entry.locals.values():
            found[Device.parse(local.value.device).name][0] += local.numpy().nbytes
    for one in side.update.jobs.local[0]:
        for variable in one.optimizer.variables:
            found[Device.parse(variable.value.device).name][1] += variable.numpy().nbytes
    memory = kdist.inspect(hybrid).memory
    assert found == {m.device: [m.parameters, m.slots] for m in memory}


def test_a_step_has_the_rows_of_the_batches_it_trained_with() -> None:
    model = parallel({"data": 2}, cuts=None)
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((64, 6), np.float32), np.ones((64, 3), np.float32))
    found = kdist.inspect(model)
    assert found.memory == kdist.inspect(model, batch_size=64).memory
    assert "a step of 64 rows (batch_size=64)" in str(found)
    few, many = kdist.inspect(model, batch_size=2).memory[0], found.memory[0]
    assert few.activations is not None and many.activations is not None
    assert few.activations * 16 < many.activations


@pytest.mark.parametrize(
    ("options", "rows"),
    [({"batch_size": 4}, 4), ({}, 7), ({"batch_size": 6, "validation_split": 0.3}, 4)],
    ids=str,
)
def test_a_step_has_the_rows_that_fit_cuts_arrays_into(options: dict[str, Any], rows: int) -> None:
    model = parallel({"data": 2}, cuts=None)
    model.compile("sgd", "mse")
    model.fit(np.ones((7, 6), np.float32), np.ones((7, 3), np.float32), verbose=0, **options)
    assert f"a step of {rows} rows (batch_size={rows})" in str(kdist.inspect(model))


def test_batches_of_a_dataset_may_have_no_size_of_their_own() -> None:
    model = parallel({"data": 2}, cuts=None)
    model.compile("sgd", "mse")
    arrays = np.ones((7, 6), np.float32), np.ones((7, 3), np.float32)
    data = tf.data.Dataset.from_tensor_slices(arrays)
    model.fit(data.batch(4), verbose=0)
    assert "a step of 2 rows (batch_size=2)" in str(kdist.inspect(model))
    model.fit(data.batch(4, drop_remainder=True), verbose=0)
    assert "a step of 4 rows (batch_size=4)" in str(kdist.inspect(model))


def test_before_training_there_is_no_optimizer_state() -> None:
    model = parallel({"data": 4}, None)
    model.compile("adam", "mse")
    inspection = kdist.inspect(model)
    assert {m.slots for m in inspection.memory} == {0}
    assert {m.parameters for m in inspection.memory} == {UP + UP_BIAS + DOWN + DOWN_BIAS}


# -- collectives ---------------------------------------------------------------------------------


def test_collectives_of_the_training_program(hybrid: keras.Model) -> None:
    inspection = kdist.inspect(hybrid)
    assert [(c.kind, c.layer, c.phase) for c in inspection.collectives] == [
        ("all-reduce", "down", "forward")
    ]
    (one,) = inspection.collectives
    # A slice has 4 of the 8 rows.
    assert (one.shape, one.bytes, one.axis, one.dtype) == ((4, 3), 48, ("model",), "float32")


def test_counts_are_by_kind_layer_and_phase(hybrid: keras.Model) -> None:
    inspection = kdist.inspect(hybrid)
    assert inspection.count("all-reduce") == 1
    assert inspection.count("all-reduce", "down") == 1
    assert inspection.count("all-reduce", "down", "backward") == 0
    assert inspection.count("all-reduce", "up") == 0
    assert inspection.count("all-gather") == 0


def test_a_model_that_has_not_trained_is_lowered_to_look() -> None:
    model = parallel(HYBRID)
    before = [w.copy() for w in model.get_weights()]
    inspection = kdist.inspect(model, batch_size=20)
    (one,) = inspection.collectives
    # As in training, of one replica's part of the batch.
    assert (one.kind, one.layer, one.shape) == ("all-reduce", "down", (10, 3))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert kdist.inspect(model).collectives == inspection.collectives


def test_another_cut_has_other_collectives() -> None:
    inspection = kdist.inspect(trained(HYBRID, {"up/kernel": ("model", None)}))
    assert inspection.count("all-reduce", "up", "forward") == 1
    assert inspection.count("all-reduce", "down") == 0


def test_without_an_inner_axis_there_are_none() -> None:
    inspection = kdist.inspect(trained({"data": 4}, None))
    assert inspection.collectives == ()
    assert "  none" in str(inspection)


# -- the rest ------------------------------------------------------------------------------------


def test_the_plan_comes_along(hybrid: keras.Model) -> None:
    assert kdist.inspect(hybrid).plan == hybrid.plan()


def test_weights_that_are_gathered_are_named() -> None:
    sliced = kdist.inspect(trained({"data": 2}, {"up/kernel": ("data", None)}))
    assert sliced.gathered == ("up/kernel",)
    inputs = keras.Input((6, 6, 4))
    twice = keras.layers.DepthwiseConv2D(3, depth_multiplier=2, name="conv")
    model = keras.Model(inputs, twice(inputs))
    cuts = {"conv/kernel": (None, None, "model", None)}
    config = kdist.ParallelConfig(mesh=kdist.mesh(model=2), layout_map=cuts)
    inspection = kdist.inspect(kdist.parallelize(model, config))
    assert inspection.gathered == ("conv/kernel",)
    assert "gathered before use: conv/kernel" in str(inspection)
    many = dataclasses.replace(inspection, gathered=tuple(f"d{n}/kernel" for n in range(9)))
    (line,) = (one for one in str(many).splitlines() if "gathered before use" in one)
    assert line.startswith("gathered before use: 9 weights, from d0/kernel to d8/kernel")


def test_a_fallback_says_why() -> None:
    model = parallel(HYBRID)
    model.compile("sgd", "mse")
    attached(model).fallbacks.append("because")
    inspection = kdist.inspect(model)
    assert (inspection.fallbacks, inspection.collectives) == (("because",), ())
    assert "not over DTensor: because" in str(inspection)


def test_it_prints(hybrid: keras.Model) -> None:
    lines = [line.split() for line in str(kdist.inspect(hybrid)).splitlines()]
    assert ["down", "forward", "all-reduce", "model", "1", "48"] in lines
    for memory in kdist.inspect(hybrid).memory:
        (line,) = [line for line in lines if line[:1] == [memory.device]]
        assert line[1:3] == [str(memory.parameters), "B"]
    reduce, broadcast = hybrid.plan().traffic()
    for one in (reduce, broadcast):
        start = [one.what, "over", "data:", str(one.messages), "messages,"]
        assert start in [line[:5] for line in lines]


def test_a_plain_model_is_refused() -> None:
    with pytest.raises(ValueError, match="plain Keras model.*parallelize"):
        kdist.inspect(mlp())


class Own(keras.Model):
    """A model that does not say what its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.up = keras.layers.Dense(8)

    def call(self, x: Any) -> Any:
        return self.up(x)


def test_shapes_that_are_not_known_are_asked_for() -> None:
    model = kdist.parallelize(Own(), kdist.ParallelConfig(mesh=kdist.mesh(model=2)))
    with pytest.raises(ValueError, match="(?i)train.*batch.*first.*Received: model="):
        kdist.inspect(model)


def test_layers_that_send_nothing_are_not_lowered_again() -> None:
    """The step that has trained knows the model's inputs, and nothing else does."""
    model = kdist.parallelize(Own(), kdist.ParallelConfig(mesh=kdist.mesh(model=2)))
    model.compile("sgd", "mse")
    model.train_on_batch(np.zeros((4, 6)), np.zeros((4, 8)))
    assert not kdist.inspect(model).collectives


def test_collectives_of_tables_and_of_losses_say_so() -> None:
    ids = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(320, 8, name="tokens")(ids)
    model = keras.Model(ids, keras.layers.Dense(32, name="head")(x))
    layouts = {"tokens/embeddings": ("model", None), "head/kernel": (None, "model")}
    config = kdist.ParallelConfig(mesh=kdist.mesh(model=2), layout_map=layouts)
    kdist.parallelize(model, config)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.train_on_batch(np.zeros((2, 8)), np.zeros((2, 8)))
    found = kdist.inspect(model)
    (looked_up,) = [one for one in found.collectives if one.layer == "tokens"]
    assert (looked_up.kind, looked_up.shape) == ("all-reduce", (2, 8, 8))
    table = str(found)
    assert "(loss)   forward    all-reduce" in table
    assert "\n  -  " not in table
