"""Warnings show the user's line, not kdist's; and TensorFlow's advice, where it is none."""

from __future__ import annotations

import inspect
import logging
import types
import warnings
from collections.abc import Callable

from kdist.display.notices import without_retracing
from kdist.display.warn import warn

import pytest
import tensorflow as tf


def within(module: str, call: object) -> object:
    """A function that calls another, as one of some module."""
    names = {"__name__": module, "call": call}
    exec("def through():\n    call()", names)
    return names["through"]


@pytest.mark.parametrize("modules", [[], ["kdist.runtime.step"], ["kdist.api", "keras.src.models"]])
def test_it_points_at_who_called(modules: list[str]) -> None:
    inner = types.FunctionType(
        (lambda: warn("something")).__code__, {"__name__": "kdist.api", "warn": warn}
    )
    for module in modules:
        inner = within(module, inner)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        inner()
        line = inspect.currentframe().f_lineno - 1
    assert [(one.filename, one.lineno) for one in said] == [(__file__, line)]


def test_a_line_of_the_users_own_step_is_his() -> None:
    step = within("my_training", within("kdist.calls", lambda: warn("something")))
    with pytest.warns(UserWarning) as said:
        step()
    assert said[0].filename == __file__  # the lambda, which is nearest


def test_of_a_function_that_autograph_converts_the_call_is_shown() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        if x > 0:
            warn("something")
        return x

    converted = tf.function(step)
    with pytest.warns(UserWarning, match="something") as said:
        converted(tf.ones(()))
    assert said[0].filename == __file__


def test_advice_on_retracing_is_dropped_within_the_block_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("tensorflow"), "propagate", True)

    def traced_often(make: Callable[[], Callable]) -> None:
        for n in range(8):
            tf.function(make())(tf.ones((n,)))

    with without_retracing():
        traced_often(lambda: lambda x: x + 1.0)
    assert not caplog.records
    traced_often(lambda: lambda x: x + 2.0)
    assert any("triggered tf.function retracing" in one.getMessage() for one in caplog.records)
