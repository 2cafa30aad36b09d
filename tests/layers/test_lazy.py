"""Lazy optimizers equal their arithmetic in NumPy, row by row, and touch no other row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kdist
from kdist.layers.lazy import LAZY, Lazy, LazyAdam

import keras
import numpy as np
import pytest
import tensorflow as tf

ROWS, COLUMNS = 7, 3
STEPS = ([5, 1, 5], [1, 1, 2], [6, 5, 0], [2, 2, 2])
"""Rows that are looked up; 3 and 4 never are."""

Update = Callable[[dict[str, np.ndarray], np.ndarray, int], None]
"""Rows of the table, "w", and of the state are changed by their gradient, in a step from 1 on."""


def _cast(value: float) -> float:
    """`ops.cast` of a Python number in Keras: by way of float32."""
    return float(np.float32(value))


def _sgd(rate: float = 0.1, momentum: float = 0.0, nesterov: bool = False) -> Update:
    def update(rows: dict[str, np.ndarray], g: np.ndarray, step: int) -> None:
        rows["m"] = _cast(momentum) * rows["m"] - rate * g
        ahead = _cast(momentum) * rows["m"] - rate * g
        rows["w"] = rows["w"] + (ahead if nesterov else rows["m"])

    return update


def _scheduled(rows: dict[str, np.ndarray], g: np.ndarray, step: int) -> None:
    """Of a schedule, which computes in float32."""
    rows["w"] = rows["w"] * (1 - _cast(0.1) * _cast(0.2)) - _cast(0.1) * g


def _adagrad(rate: float = 0.1, epsilon: float = 1e-7) -> Update:
    def update(rows: dict[str, np.ndarray], g: np.ndarray, step: int) -> None:
        rows["accumulator"] = rows["accumulator"] + g**2
        rows["w"] = rows["w"] - rate * g / np.sqrt(rows["accumulator"] + epsilon)

    return update


def _adam(rate: float = 0.1, decay: float = 0.0, amsgrad: bool = False) -> Update:
    """Kingma and Ba (2015), as PyTorch's SparseAdam applies it; decay of Loshchilov and Hutter."""

    def update(rows: dict[str, np.ndarray], g: np.ndarray, step: int) -> None:
        rows["w"] = rows["w"] * (1 - rate * _cast(decay))
        rows["m"] = 0.9 * rows["m"] + 0.1 * g
        rows["v"] = 0.999 * rows["v"] + 0.001 * g**2
        root = rows["v"]
        if amsgrad:
            rows["v_hat"] = root = np.maximum(rows["v_hat"], rows["v"])
        alpha = rate * np.sqrt(1 - _cast(0.999) ** step) / (1 - _cast(0.9) ** step)
        rows["w"] = rows["w"] - alpha * rows["m"] / (np.sqrt(root) + 1e-7)

    return update


def _ftrl(rate: float = 0.1, l1: float = 0.01, l2: float = 0.02, beta: float = 0.1) -> Update:
    """McMahan et al. (2013)."""

    def update(rows: dict[str, np.ndarray], g: np.ndarray, step: int) -> None:
        old, new = rows["accumulator"], rows["accumulator"] + g**2
        linear = rows["linear"] + g - (np.sqrt(new) - np.sqrt(old)) / rate * rows["w"]
        quadratic = np.sqrt(new) / rate + 2 * (l2 + beta / (2 * rate))
        rows["w"] = (np.clip(linear, -l1, l1) - linear) / quadratic
        rows["accumulator"], rows["linear"] = new, linear

    return update


_O = keras.optimizers
FIRST = {"accumulator": _cast(0.1)}
FTRL = {"l1_regularization_strength": 0.01, "l2_regularization_strength": 0.02, "beta": 0.1}
CASES: Mapping[str, tuple[Callable[[], Any], Update, dict[str, float]]] = {
    "sgd": (lambda: _O.SGD(0.1), _sgd(), {}),
    "momentum": (lambda: _O.SGD(0.1, 0.9), _sgd(momentum=0.9), {}),
    "nesterov": (lambda: _O.SGD(0.1, 0.9, True), _sgd(momentum=0.9, nesterov=True), {}),
    "adagrad": (lambda: _O.Adagrad(0.1), _adagrad(), FIRST),
    "ftrl": (lambda: _O.Ftrl(0.1, **FTRL), _ftrl(), FIRST),
    "adam": (lambda: _O.Adam(0.1), _adam(), {}),
    "amsgrad": (lambda: _O.Adam(0.1, amsgrad=True), _adam(amsgrad=True), {}),
    "adamw": (lambda: _O.AdamW(0.1, weight_decay=0.2), _adam(decay=0.2), {}),
    "sgd decay": (
        lambda: _O.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 1.0), weight_decay=0.2),
        _scheduled,
        {},
    ),
}


def _gradients(seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(np.array(rows), rng.normal(size=(3, COLUMNS))) for rows in STEPS]


def _expected(update: Update, first: Mapping[str, float], change: Any = lambda g: g) -> np.ndarray:
    names = ("m", "v", "v_hat", "accumulator", "linear")
    whole = {name: np.full((ROWS, COLUMNS), first.get(name, 0.0)) for name in names}
    whole["w"] = _start()
    for step, (indices, values) in enumerate(_gradients(), 1):
        dense = np.zeros((ROWS, COLUMNS))
        np.add.at(dense, indices, values)
        looked_up = np.unique(indices)
        rows = {name: value[looked_up] for name, value in whole.items()}
        update(rows, change(dense)[looked_up], step)
        for name, value in rows.items():
            whole[name][looked_up] = value
    return whole["w"]


def _start() -> np.ndarray:
    return np.random.default_rng(9).normal(size=(ROWS, COLUMNS))


def _trained(optimizer: Any, given: Any = None) -> tuple[np.ndarray, Any]:
    table = keras.Variable(_start(), dtype="float64", name="table")
    optimizer.build([table])

    @tf.function(autograph=False)
    def step(rows: Any, values: Any) -> None:
        optimizer.apply([tf.IndexedSlices(values, rows, tf.constant([ROWS, COLUMNS]))], [table])

    for rows, values in given or _gradients():
        step(tf.constant(rows), tf.constant(values))
    return table.numpy(), optimizer


@pytest.mark.parametrize("name", CASES)
def test_equals_numpy(name: str, float64: None) -> None:
    make, update, first = CASES[name]
    found, optimizer = _trained(kdist.lazy(make()))
    np.testing.assert_allclose(found, _expected(update, first), rtol=1e-12)
    np.testing.assert_array_equal(found[[3, 4]], _start()[[3, 4]])
    assert int(optimizer.iterations) == len(STEPS)


CLIPPED = {
    "clipvalue": lambda g: np.clip(g, -0.3, 0.3),
    "clipnorm": lambda g: g * min(1, 0.3 / np.linalg.norm(g)),
    "global_clipnorm": lambda g: g * min(1, 0.3 / np.linalg.norm(g)),
}


@pytest.mark.parametrize("option", CLIPPED)
def test_clips_what_rows_sum_up_to(option: str, float64: None) -> None:
    found, _ = _trained(kdist.lazy(_O.Adagrad(0.1, **{option: 0.3})))
    expected = _expected(_adagrad(), FIRST, CLIPPED[option])
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("every", [None, 3])
def test_averages_are_of_all_rows(every: int | None, float64: None) -> None:
    """Keras's averages of the weights that lazy steps leave, also in rows nobody looks up."""
    options = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": every}
    found, optimizer = _trained(kdist.lazy(_O.SGD(0.1, **options)))
    weights, average = _start(), np.zeros((ROWS, COLUMNS))
    for step, (rows, values) in enumerate(_gradients(), 1):
        np.subtract.at(weights, rows, 0.1 * values)
        average = weights.copy() if step == 1 else 0.5 * average + 0.5 * weights
        if every and step % every == 0:
            weights = average.copy()
    np.testing.assert_allclose(found, weights, rtol=1e-12)
    (averages,) = optimizer._model_variables_moving_average
    np.testing.assert_allclose(averages.numpy(), average, rtol=1e-12)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_accumulates_rows_of_several_batches(name: str, zero: bool, float64: None) -> None:
    """A step on the mean of two batches' sums is a step of batches with the rows of both.

    A row is looked up, too, if what it adds up to is zero.
    """
    make, given = CASES[name][0], _gradients()
    pairs = [(*given[i], *given[i + 1]) for i in (0, 2)]
    if zero:
        rows, values, *_ = pairs[0]
        pairs[1] = rows, values, rows, -values
    joined = [(np.concatenate([a, c]), np.concatenate([b, d]) / 2) for a, b, c, d in pairs]
    split = [(rows, values) for a, b, c, d in pairs for rows, values in ((a, b), (c, d))]
    accumulating, whole = make(), kdist.lazy(make())
    accumulating.gradient_accumulation_steps = 2
    accumulating = kdist.lazy(accumulating)
    found, expected = _trained(accumulating, split)[0], _trained(whole, joined)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    assert not np.array_equal(found, _start())
    totals = [one.numpy() for one in accumulating._accumulated_gradients]
    assert not any(np.any(one) or np.signbit(one).any() for one in totals)


def test_averages_while_rows_accumulate(float64: None) -> None:
    """As in Keras, which SGD's sums of rows equal."""
    options = {"use_ema": True, "ema_momentum": 0.5, "gradient_accumulation_steps": 2}
    found = []
    for optimizer in (_O.SGD(0.1, **options), kdist.lazy(_O.SGD(0.1, **options))):
        table = keras.Variable(_start(), dtype="float64")
        optimizer.build([table])
        for rows, values in _gradients():
            gradient = tf.IndexedSlices(values, tf.constant(rows), tf.constant([ROWS, COLUMNS]))
            lazy = isinstance(optimizer, Lazy)
            optimizer.apply([gradient if lazy else tf.convert_to_tensor(gradient)], [table])
        (average,) = optimizer._model_variables_moving_average
        found.append((table.numpy(), average.numpy()))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_other_gradients_update_as_in_keras(name: str, float64: None) -> None:
    make = CASES[name][0]
    found = []
    for optimizer in (make(), kdist.lazy(make())):
        kernel = keras.Variable(_start(), dtype="float64")
        optimizer.build([kernel])
        for _, values in _gradients():
            optimizer.apply([tf.constant(np.resize(values, (ROWS, COLUMNS)))], [kernel])
        found.append(kernel.numpy())
    np.testing.assert_allclose(*found, rtol=1e-15)


@pytest.mark.parametrize("own", LAZY, ids=lambda one: one.__name__)
def test_no_tensor_of_the_size_of_the_table(own: Any) -> None:
    """Of table and state, operations read rows and write rows."""
    options = {"momentum": 0.9} if own is keras.optimizers.SGD else {}
    optimizer = kdist.lazy(own(clipvalue=1.0, **options))
    optimizer.weight_decay = 0.1
    table = keras.Variable(np.zeros((1000, 4), "float32"))
    optimizer.build([table])

    @tf.function(autograph=False)
    def step(rows: Any, values: Any) -> None:
        optimizer.apply([tf.IndexedSlices(values, rows, tf.constant([1000, 4]))], [table])

    graph = step.get_concrete_function(
        tf.TensorSpec([5], tf.int32), tf.TensorSpec([5, 4], tf.float32)
    ).graph
    for operation in graph.get_operations():
        for result in operation.outputs:
            assert 1000 not in result.shape.as_list() if result.shape.rank else True, operation
    slots = [v for v in optimizer.variables if tuple(v.shape) == (1000, 4)]
    used = {id(v.value.handle) for v in (table, *slots)}
    readers = [
        user.type
        for outside, inside in graph.captures
        if id(outside) in used
        for user in inside.consumers()
    ]
    assert len(slots) > 0
    assert set(readers) == {"ResourceGather", "ResourceScatterUpdate"}


def test_settings_are_kept() -> None:
    given = _O.AdamW(0.5, beta_1=0.8, name="mine")
    given.exclude_from_weight_decay(var_names=["table"])
    found = kdist.lazy(given)
    assert found.get_config() == given.get_config()
    _, trained = _trained(found)
    assert not trained._use_weight_decay(trained._trainable_variables[0])
    again = keras.optimizers.deserialize(keras.optimizers.serialize(kdist.lazy("adam")))
    assert type(again) is LazyAdam
    assert type(kdist.lazy(again)) is LazyAdam


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: kdist.lazy("nadam"), "Nadam"),
        (lambda: kdist.lazy(_O.LossScaleOptimizer(_O.Adam())), "LossScaleOptimizer"),
    ],
)
def test_what_is_refused(make: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        make()
