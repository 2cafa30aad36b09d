"""What a layer is called with, told apart."""

from __future__ import annotations

from typing import Any

from kdist._compat import keras_trainer
from kdist.calls.arguments import CallArguments, any_symbolic, without_rows

import keras
import numpy as np
import pytest
import tensorflow as tf

X, Y, TABLE = tf.ones((4, 2)), tf.zeros((4, 3)), tf.ones((7, 2))


def test_tensors_with_as_many_rows_as_the_first_are_cut() -> None:
    given = CallArguments.of([tf.constant(1.0), {"b": Y, "a": X}], {"table": TABLE, "scale": 2.0})
    assert given.kinds == ("shared", "rows", "rows", "static", "shared")
    assert [t.shape[-1] for t in given.rows] == [2, 3]  # a dict's leaves are in order of its keys
    args, kwargs = given.filled([X + 1, Y + 1], [None, None], [tf.constant(5.0), TABLE])
    assert float(args[0]) == 5.0 and float(args[1]["b"][0, 0]) == 1.0
    assert kwargs["scale"] == 2.0 and kwargs["table"] is TABLE


def test_variables_and_arrays_are_tensors() -> None:
    variable = keras.Variable(np.ones((4, 2)))
    given = CallArguments.of([np.ones((4, 1)), variable], {"training": True, "mask": None})
    assert given.kinds == ("rows", "rows", "static", "static")
    assert all(isinstance(t, tf.Tensor) for t in given.rows)


def test_masks_go_with_their_tensors() -> None:
    x = tf.ones((4, 2))
    keras_trainer.set_mask(x, tf.constant([[True, False]] * 4))
    given = CallArguments.of([x, Y], {})
    assert given.masks[0] is not None and given.masks[1] is None
    (again, _), _ = given.filled([tf.ones((2, 2)), Y], [tf.zeros((2, 2), bool), None], [])
    assert keras_trainer.get_mask(again).shape == (2, 2)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (([X], {"training": True}), ([X + 1], {"training": True}), True),
        (([X], {"training": True}), ([X], {"training": False}), False),
        (([X, Y], {}), ([X], {"y": Y}), False),
        (([X, Y], {}), ([X, TABLE], {}), False),
        (([X, 1.0], {}), ([X, [1.0]], {}), False),
        (([X, 1], {}), ([X, 1.0], {}), False),
        (([X, {"a": 1}], {}), ([X, {"b": 1}], {}), False),
        (([{"a": X, "b": Y}], {}), ([{"a": X, "c": Y}], {}), False),
    ],
)
def test_keys_tell_calls_apart(one: Any, other: Any, alike: bool) -> None:
    assert (CallArguments.of(*one).key() == CallArguments.of(*other).key()) == alike


def test_ways_begin_with_the_likeliest() -> None:
    """The first tensor's rows, all of them; then fewer; then those of another size."""
    given = CallArguments.of([X, Y, TABLE], {"training": True})
    found = [[n for n, kind in enumerate(one.kinds) if kind == "rows"] for one in given.ways()]
    assert found == [[0, 1], [0], [1], [2]]
    assert next(given.ways()).kinds == given.kinds
    other = given.sorted_by(("shared", "shared", "rows", "static"))
    assert other.rows[0] is TABLE and other.shared[1] is Y
    assert given.shapes() != other.shapes()


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda x: {"a": x, "b": x[:, 0]}, ""),
        (lambda x: keras.ops.mean(x), "a tensor of shape ()"),
        (lambda x: (x, keras.ops.reshape(x, (-1,))), "a tensor of shape (2026,)"),
        (lambda x: keras.ops.transpose(x), "a tensor of shape (2, 1013)"),
        (lambda x: (x, None), "None"),
        (lambda x: x @ keras.ops.transpose(x), "a tensor of shape (1013, 1013)"),
        (lambda x: keras.ops.pad(x, ((0, 0), (0, 1007))), ""),
    ],
)
def test_outputs_without_rows_are_found(call: Any, found: str) -> None:
    assert without_rows(CallArguments.of([X], {}), call) == found


def test_symbols() -> None:
    assert any_symbolic({"x": [keras.KerasTensor((2,))]})
    assert not any_symbolic({"x": [X, None, 2]})
