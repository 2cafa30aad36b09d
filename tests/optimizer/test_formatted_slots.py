"""Slots as 16-bit codes: rounded as by hand, half the bytes, whole to the user."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

from kdist._compat import keras_optimizers, keras_trainer
from kdist._compat.keras_optimizers import families
from kdist.config.state_format import SLOTS, StateFormatConfig
from kdist.optimizer import formatted_slots
from kdist.optimizer.formatted_slots import coded, format_slots
from kdist.optimizer.local import LocalOptimizer
from kdist.optimizer.logical_slots import Span, link_slots
from kdist.storage.state_formats import FIRST_MOMENT, FORMATS, SECOND_MOMENT
from kdist.storage.variables import make_local

import keras
import numpy as np
import pytest
import tensorflow as tf

from .slot_parts import BOTH, DRAWN, SHAPES, make, variables

NEEDS_DRAW = ("Adagrad", "Adafactor")
ENCODED = sorted(set(SLOTS) - {"Ftrl"})


def gradients(step: int, dtype: str = "float64") -> list[tf.Tensor]:
    rng = np.random.default_rng(step)
    scales = 10.0 ** rng.uniform(-4, 1.5, size=5)  # squares within the range of 0-6-10
    values = [rng.normal(size=s) * scales for s in SHAPES.values()]
    return [tf.constant(v, dtype) for v in values]


def local_of(optimizer: Any, mine: list[keras.Variable], device: str = "/CPU:1") -> LocalOptimizer:
    with tf.device(device):
        local = [make_local(v, tf.identity(v.value)) for v in mine]
    return LocalOptimizer(optimizer, device, list(range(len(mine))), local, mine)


def train(local: LocalOptimizer, steps: int = 4) -> list[np.ndarray]:
    @tf.function
    def step(*grads: tf.Tensor) -> None:
        with tf.device(local.device):
            local.apply(list(grads), local.variables)

    for n in range(steps):
        step(*gradients(n, local.variables[0].dtype))
    return [v.numpy() for v in local.variables]


def round_by_hand(optimizer: Any, slots: dict[int, Any]) -> None:
    """After each assignment, a float slot gets the value that its format would give back."""

    def write(method: str, variable: Any, value: Any) -> bool:
        if id(variable) not in slots:
            return False
        tensor, form = keras_trainer.tf_variable(variable), slots[id(variable)]
        getattr(tensor, method)(value)
        tensor.assign(form.decode(form.encode(tensor), tensor.dtype))
        return True

    keras_optimizers.route_assignments(optimizer, write)


@pytest.mark.parametrize("name", [n for n in ENCODED if n not in NEEDS_DRAW])
def test_a_step_computes_with_what_is_stored(name: str, float64: None):
    """Plain float slots, rounded after every write, give the same parameters and moments."""
    local = local_of(*make(name))
    made = format_slots(local, BOTH)
    plain, mine = make(name)
    slots = {
        id(slot): made[attribute][0].format
        for attribute in made
        for slot in getattr(plain, attribute)
        if slot is not None
    }
    round_by_hand(plain, slots)
    expected = tf.function(lambda *grads: plain.apply(list(grads), mine))
    for n in range(4):
        expected(*gradients(n))
    for got, want in zip(train(local), mine):
        np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=1e-12)
    kept = families(local.optimizer)
    assert set(made) <= set(kept)
    for attribute, slots_of in families(plain).items():
        for got, want in zip(kept[attribute], slots_of):
            if want is not None:
                np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-12, atol=0)
                assert got.dtype == "float64" and got.shape == want.shape


def test_adam_by_hand(float64: None):
    """Two steps of Adam's formula in numpy, moments through the formats."""
    local = local_of(*make("Adam", amsgrad=False))
    format_slots(local, BOTH)
    got = train(local, 2)
    for i, w in enumerate(v.numpy() for v in variables()):
        m, v = np.zeros_like(w), np.zeros_like(w)
        for t in (1, 2):
            g = gradients(t - 1)[i].numpy()
            m = trip(FIRST_MOMENT, m + (g - m) * (1 - 0.9))
            v = trip(SECOND_MOMENT, v + (g * g - v) * (1 - 0.999))
            # Keras casts its factors through float32 before it raises them to the step.
            beta_1, beta_2 = float(np.float32(0.9)), float(np.float32(0.999))
            alpha = 0.01 * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
            w = w - alpha * m / (np.sqrt(v) + 1e-7)
        np.testing.assert_allclose(got[i], w, rtol=0, atol=1e-12)


def trip(form: Any, x: np.ndarray) -> np.ndarray:
    return form.decode(form.encode(x), tf.float64).numpy()


@pytest.mark.parametrize("name", NEEDS_DRAW)
def test_sums_are_rounded_by_drawing(name: str, float64: None):
    """Within a few roundings of the float optimizer, and the same numbers in a second run."""
    results = []
    for config in (DRAWN, DRAWN, dataclasses.replace(DRAWN, seed=7)):
        local = local_of(*make(name))
        format_slots(local, config)
        results.append(train(local))
    plain, mine = make(name)
    for n in range(4):
        plain.apply(gradients(n), mine)
    for a, b, c, whole, start in zip(*results, mine, variables()):
        np.testing.assert_array_equal(a, b)
        assert np.any(a != c)
        change = np.abs(whole.numpy() - start.numpy())
        assert np.all(np.abs(a - whole.numpy()) <= change.max() * 8 * 2.0**-10)


@pytest.mark.parametrize("config", [BOTH, DRAWN], ids=lambda c: c.rounding)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_slots_are_compiled_to_the_same_codes(
    config: StateFormatConfig, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    """Every code, and values all over the range, in one step on a device that is not the first."""
    results = []
    values = np.concatenate(
        [FORMATS[f].decode(np.arange(1 << 16), tf.float64) for f in ("1-6-9", "0-6-10")]
    )
    with np.errstate(all="ignore"):
        values = np.concatenate([values, np.nextafter(values, 0), 1.0001 * values]).astype(dtype)
    for start in (formatted_slots.COMPILED_FROM, 1 << 62):
        monkeypatch.setattr(formatted_slots, "COMPILED_FROM", start)
        table = [keras.Variable(np.zeros(values.shape), dtype=dtype, name="w")]
        optimizer = keras.optimizers.Adam(beta_1=0.0)
        optimizer.build(table)
        local = local_of(optimizer, table, "/CPU:3")
        made = format_slots(local, config)
        for family in made.values():
            assert family[0].compiled == (start < values.size)
            family[0].assign(tf.constant(values))
        set_ = [family[0].codes.numpy() for family in made.values()]
        tf.function(lambda local=local: local.apply([tf.constant(values)], local.variables))()
        results.append([*set_, *[family[0].codes.numpy() for family in made.values()]])
        assert all("CPU:3" in family[0].codes.device for family in made.values())
    for compiled, plain in zip(*results):
        np.testing.assert_array_equal(compiled, plain)


def test_float32_bytes_are_halved_in_the_buffers(float64: None):
    local = local_of(*make("Adam", "float32", amsgrad=False))
    slots = families(local.optimizer)
    before = {id(keras_trainer.tf_variable(v)) for f in slots.values() for v in f}
    assert len(before) == 4
    float_bytes = sum(v.numpy().nbytes for f in slots.values() for v in f)
    gone = [weakref.ref(keras_trainer.tf_variable(v)) for f in slots.values() for v in f]
    made = format_slots(local, BOTH)
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4
    train(local, 1)
    buffers = [slot.codes for family in made.values() for slot in family]
    assert {b.dtype for b in buffers} == {tf.uint16}
    assert all("CPU:1" in b.device for b in buffers)
    assert sum(b.numpy().nbytes for b in buffers) == float_bytes // 2
    assert sum(s.nbytes for family in made.values() for s in family) == float_bytes // 2


def test_fp32_changes_nothing():
    local = local_of(*make("Adam", "float32"))
    before = vars(local.optimizer)["assign"]
    assert format_slots(local, StateFormatConfig()) == {}
    assert vars(local.optimizer)["assign"] is before
    made = format_slots(local, StateFormatConfig(second="0-6-10"))
    assert sorted(made) == ["_velocities", "_velocity_hats"]
    assert coded(local.optimizer._momentums[0]) is None
    assert coded(local.optimizer._velocities[0]) is made["_velocities"][0]


def test_the_users_optimizer_shows_whole_floats(float64: None):
    """A kernel in two shards on two devices: read, trained and loaded through the logical slots."""
    logical, mine = make("Adam", amsgrad=False)
    kernel = mine[0]
    cuts = [(slice(0, 3), slice(0, 5)), (slice(3, 6), slice(0, 5))]
    locals_ = []
    for n, cut in enumerate(cuts):
        with tf.device(f"/CPU:{n}"):
            shard = make_local(kernel, tf.identity(kernel.value[cut]))
        units = [n] if n else [0, 2]
        whole = [kernel] if n else [kernel, mine[1]]
        held = [shard] if n else [shard, make_local(mine[1], tf.identity(mine[1].value))]
        locals_.append(LocalOptimizer(logical, f"/CPU:{n}", units, held, whole))
    made = [format_slots(one, BOTH) for one in locals_]
    parts = [(0, cuts[0], (3, 5)), (0, cuts[1], (3, 5)), (1, None, (5,))]
    link_slots(logical, locals_, [[Span(v, index, None, shape)] for v, index, shape in parts])
    assert sum(s.nbytes for m in made for f in m.values() for s in f) == 2 * 35 * 2
    value = np.random.default_rng(1).uniform(size=(6, 5))
    logical._velocities[0].assign(value)
    stored = trip(SECOND_MOMENT, value)
    assert np.any(stored != value)
    np.testing.assert_array_equal(logical._velocities[0].numpy(), stored)
    np.testing.assert_array_equal(locals_[1].optimizer._velocities[0].numpy(), stored[3:])
    store: dict[str, np.ndarray] = {}
    logical.save_own_variables(store)
    assert all(v.dtype in (np.float64, np.int64) for v in store.values())
    logical._velocities[0].assign(np.zeros((6, 5)))
    logical.load_own_variables(store)
    np.testing.assert_array_equal(logical._velocities[0].numpy(), stored)


def biggest_step(second: str) -> float:
    """The largest parameter change of one Adam step for gradients of 1e-9, in learning rates."""
    optimizer, mine = make("Adam", "float32", amsgrad=False, epsilon=1e-12)
    local = local_of(optimizer, mine)
    format_slots(local, StateFormatConfig(second=second)) if second != "fp32" else None
    start = [tf.zeros_like(v) for v in local.variables]
    for v, zero in zip(local.variables, start):
        v.assign(zero)
    for _ in range(3):
        local.apply([tf.fill(s, 1e-9) for s in SHAPES.values()], local.variables)
    return max(float(np.abs(v.numpy()).max()) for v in local.variables) / 0.01 / 3


def test_a_second_moment_that_underflows_does_not_blow_up_the_step(
    monkeypatch: pytest.MonkeyPatch,
):
    """With v at 1e-21 and 1.4e-17 the smallest number: as 0, the step is 1e3 times as long."""
    assert 0.95 < biggest_step("fp32") < 1.0  # epsilon is 3 % of sqrt(v)
    assert biggest_step("0-6-10") < 0.95
    to_nearest = dataclasses.replace(SECOND_MOMENT, keep_positive=False)
    monkeypatch.setitem(FORMATS, "0-6-10", to_nearest)
    assert biggest_step("0-6-10") > 10.0


def test_drawing_follows_what_nearest_loses(float64: None):
    """bf16, beta_2 0.999, gradients that stop: v must fall to 0.999^400 = 0.67 of itself."""
    optimizer, _ = make("Adam", amsgrad=False)
    table = [keras.Variable(np.zeros(4000), dtype="float64", name="w")]
    optimizer = keras.optimizers.Adam(learning_rate=0.0)
    optimizer.build(table)
    local = local_of(optimizer, table)
    format_slots(local, StateFormatConfig(second="bf16", rounding="stochastic"))
    slot = local.optimizer._velocities[0]
    slot.assign(tf.ones(4000, tf.float64))

    @tf.function
    def decay() -> None:
        for _ in tf.range(400):
            local.apply([tf.zeros(4000, tf.float64)], local.variables)

    decay()
    assert np.mean(slot.numpy()) == pytest.approx(0.999**400, rel=0.01)


def test_rows_of_an_embedding(float64: None):
    """Sparse gradients touch their rows alone; rows that stand twice count twice."""
    table = [keras.Variable(np.ones((6, 2)), dtype="float64", name="table")]
    optimizer = keras.optimizers.Adagrad(learning_rate=0.1)
    optimizer.build(table)
    local = local_of(optimizer, table)
    (slot,) = format_slots(local, DRAWN)["_accumulators"]
    start = slot.codes.numpy()
    rows = tf.IndexedSlices(
        tf.constant([[0.5, 1.0], [2.0, 0.25], [1.0, 1.0]], "float64"), [1, 4, 1]
    )
    rows = tf.IndexedSlices(rows.values, tf.constant(rows.indices), tf.constant([6, 2]))
    tf.function(lambda: local.apply([rows], local.variables))()
    codes = slot.codes.numpy()
    np.testing.assert_array_equal(codes[[0, 2, 3, 5]], start[[0, 2, 3, 5]])
    value = local.optimizer._accumulators[0].numpy()
    exact = trip(SECOND_MOMENT, np.full(2, 0.1))
    np.testing.assert_allclose(value[1], exact + [1.25, 2.0], rtol=2.0**-10)
    np.testing.assert_allclose(value[4], exact + [4.0, 0.0625], rtol=2.0**-10)
    before = value.copy()
    tf.function(lambda: local.optimizer.assign_sub(local.optimizer._accumulators[0], rows))()
    after = local.optimizer._accumulators[0].numpy()
    np.testing.assert_allclose(after[4], np.maximum(before[4] - [2.0, 0.25], 0), rtol=2.0**-9)
    tf.function(lambda: local.optimizer.assign(local.optimizer._accumulators[0], rows))()
    after = local.optimizer._accumulators[0].numpy()
    np.testing.assert_allclose(after[4], [2.0, 0.25])
    np.testing.assert_array_equal(after[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


def test_slots_of_16_bits_are_refused():
    local = local_of(*make("Adam", "bfloat16"))
    with pytest.raises(ValueError, match="dtype 'bfloat16'"):
        format_slots(local, BOTH)
