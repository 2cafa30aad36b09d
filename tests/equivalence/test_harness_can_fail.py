"""The harness goes red: each wrong run that it exists to catch is caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from .features import BY_NAME as FEATURES
from .harness import Run, compare, train
from .matrix import spread
from .optimizer_zoo import OPTIMIZERS
from .outcome import FLOAT64, EquivalenceError, Outcome, check, half
from .zoo import BY_NAME

PARTS = ("history", "evaluation", "predictions", "weights", "slots")


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    run = Run(case=BY_NAME["gpt"], mesh_axes={}, optimizer=OPTIMIZERS["adam"], epochs=1)
    return train(run, "plain")


def _changed(outcome: Outcome, part: str, name: str, change: Callable) -> Outcome:
    arrays = dict(getattr(outcome, part))
    arrays[name] = change(np.array(arrays[name]))
    return dataclasses.replace(outcome, **{part: arrays})


def _largest(outcome: Outcome, part: str) -> str:
    arrays = {n: a for n, a in getattr(outcome, part).items() if np.asarray(a).dtype.kind == "f"}
    return max(arrays, key=lambda name: float(np.abs(arrays[name]).max()))


@pytest.mark.parametrize("part", PARTS)
def test_one_entry_off_by_1e_8_is_caught(outcome: Outcome, part: str) -> None:
    name = _largest(outcome, part)

    def change(array: np.ndarray) -> np.ndarray:
        flat = array.reshape(-1)
        flat[np.abs(flat).argmax()] *= 1 + 1e-8
        return flat.reshape(array.shape)

    with pytest.raises(EquivalenceError, match="allowed") as caught:
        check(outcome, _changed(outcome, part, name, change))
    assert name in str(caught.value)


def test_every_weight_and_slot_is_looked_at(outcome: Outcome) -> None:
    for part in ("weights", "slots"):
        for name, array in getattr(outcome, part).items():
            wrong = _changed(outcome, part, name, lambda a: a + np.asarray(1, a.dtype))
            with pytest.raises(EquivalenceError) as caught:
                check(outcome, wrong, zero_gradient_paths=BY_NAME["gpt"].zero_gradient_paths)
            assert name in str(caught.value), array.shape


def test_second_moments_are_held_to_their_own_scale(outcome: Outcome) -> None:
    name = next(n for n in outcome.slots if n.endswith("up_kernel_velocity"))
    assert np.abs(outcome.slots[name]).max() < 1e-3
    with pytest.raises(EquivalenceError):
        check(outcome, _changed(outcome, "slots", name, lambda a: a * (1 + 1e-8)))


def test_an_accuracy_may_differ_by_undecided_examples_alone(outcome: Outcome) -> None:
    def of(accuracy: float, undecided: float = 1 / 16) -> Outcome:
        history = {"loss": np.ones(2), "accuracy": np.array([0.5, accuracy])}
        history["undecided"] = np.array([0.0, undecided])
        return dataclasses.replace(outcome, history=history)

    policy = half("mixed_float16")
    check(of(0.5), of(0.5 + 1 / 16, undecided=0.0), policy)
    for expected, actual in ((of(0.5), of(0.5 + 2 / 16)), (of(0.5, 0.0), of(0.5 + 1 / 16))):
        with pytest.raises(EquivalenceError, match="accuracy"):
            check(expected, actual, policy)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_caught(outcome: Outcome, value: float) -> None:
    name = _largest(outcome, "weights")
    with pytest.raises(EquivalenceError):
        check(outcome, _changed(outcome, "weights", name, lambda a: np.full_like(a, value)))


def test_dtype_and_shape_are_part_of_equality(outcome: Outcome) -> None:
    name = _largest(outcome, "weights")
    for change in (lambda a: a.astype("float32"), lambda a: a[:-1]):
        with pytest.raises(EquivalenceError, match="expected"):
            check(outcome, _changed(outcome, "weights", name, change))


@pytest.mark.parametrize("part", PARTS)
def test_lost_and_reordered_names_are_caught(outcome: Outcome, part: str) -> None:
    arrays = dict(getattr(outcome, part))
    first = next(iter(arrays))
    lost = {name: array for name, array in arrays.items() if name != first}
    wrong = [lost, {**arrays, "one_more": np.zeros(())}]
    if len(arrays) > 1:
        wrong.append(dict(reversed(arrays.items())))
    for other in wrong:
        with pytest.raises(EquivalenceError, match="names or their order differ"):
            check(outcome, dataclasses.replace(outcome, **{part: other}))


def test_only_zero_gradient_parameters_may_drift(outcome: Outcome) -> None:
    paths = BY_NAME["gpt"].zero_gradient_paths
    step = outcome.drift

    def move(distance: float) -> Callable[[np.ndarray], np.ndarray]:
        return lambda array: array + distance

    key = "block0_attention/key/bias"
    check(outcome, _changed(outcome, "weights", key, move(step)), zero_gradient_paths=paths)
    with pytest.raises(EquivalenceError):
        check(outcome, _changed(outcome, "weights", key, move(3 * step)), zero_gradient_paths=paths)
    with pytest.raises(EquivalenceError):
        other = _changed(outcome, "weights", "block0_attention/query/bias", move(step))
        check(outcome, other, zero_gradient_paths=paths)


class _Biased(keras.optimizers.SGD):
    """SGD that gets one variable's gradient wrong by 1e-8 of itself."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        # The backend's own variable arrives here: `up/kernel` is known by its shape.
        factor = 1 + 1e-8 if tuple(variable.shape) == (12, 16) else 1.0
        super().update_step(gradient * factor, variable, learning_rate)


def test_a_gradient_off_by_1e_8_is_caught() -> None:
    options = {"learning_rate": 0.1, "momentum": 0.9, "name": "sgd"}
    run = Run(case=BY_NAME["mlp"], mesh_axes={}, optimizer=lambda: keras.optimizers.SGD(**options))
    wrong = dataclasses.replace(run, optimizer=lambda: _Biased(**options))
    with pytest.raises(EquivalenceError, match="up_kernel_momentum"):
        check(train(run, "plain"), train(wrong, "plain"))


UNEQUAL = [("mlp", 13), ("encoder", 16), ("resnet", 13)]


@pytest.mark.parametrize(("name", "samples"), spread(UNEQUAL, UNEQUAL[:2]))
def test_an_unweighted_mean_over_unequal_parts_is_caught(name: str, samples: int) -> None:
    # The encoder's parts have equal examples and unequal valid tokens: that is unequal too.
    with pytest.raises(EquivalenceError, match="batch/loss"):
        compare(
            BY_NAME[name],
            {"data": 4},
            optimizer=OPTIMIZERS["sgd"],
            engine="equal_parts",
            samples=samples,
            tolerance=dataclasses.replace(FLOAT64, parts=("history",)),
        )


def test_whole_batch_statistics_do_not_pass_for_parts() -> None:
    with pytest.raises(EquivalenceError, match="moving_variance"):
        compare(BY_NAME["resnet"], {"data": 2}, optimizer=OPTIMIZERS["sgd"], engine="plain")


# What a wrong engine would leave out: each must change the outcome, or its rows prove nothing.
NEUTRAL = {"none", "run_eagerly", "loss_scale_factor"}
CHANGES = [(name,) for name in FEATURES if name not in NEUTRAL]


@pytest.mark.parametrize("feature", spread(CHANGES, [("add_loss",), ("constraint",)]))
def test_a_feature_left_out_is_caught(feature: str) -> None:
    chosen = FEATURES[feature]
    case = next(case for case in BY_NAME.values() if chosen.fits(case))
    # AdamW decays weights by itself: what is left out there is the exclusion alone.
    factory = OPTIMIZERS["adamw" if feature == "weight_decay_exclude" else "adam"]
    run = Run(case=case, mesh_axes={"data": 2}, optimizer=factory)
    without = train(run, "reference")
    with pytest.raises(EquivalenceError):
        check(train(dataclasses.replace(run, features=(chosen,)), "reference"), without)
