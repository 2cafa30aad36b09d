"""What is known of the tensors of a stage once it has been lowered."""

from __future__ import annotations

from typing import Any

from kdist.stages.lowered import UNKNOWN, Known

import tensorflow as tf


def traced() -> tuple[list[Any], dict[str, int]]:
    """Operations of a graph: a product, a sum over nothing of it, and constants."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (4, 8), name="x")
        product = tf.multiply(x, x, name="product")
        tf.raw_ops.Sum(input=product, axis=tf.constant([], tf.int32), name="sum")
        tf.raw_ops.Fill(dims=tf.constant([4, 8]), value=tf.constant(1.0), name="ones")
        operations = graph.get_operations()
    return operations, {one.name: i for i, one in enumerate(operations)}


def test_sizes_are_those_of_a_device() -> None:
    operations, numbers = traced()
    by_name = {one.name: one for one in operations}
    known = Known(sizes={numbers["product"]: (64,)})
    assert known.size(by_name["product"].outputs[0], numbers) == 64
    assert known.size(by_name["x"].outputs[0], numbers) == 128
    assert UNKNOWN.size(by_name["product"].outputs[0], numbers) == 128


def test_what_lowering_leaves_out_is_what_it_was_given() -> None:
    operations, numbers = traced()
    by_name = {one.name: one for one in operations}
    known = Known(sizes={numbers["product"]: (64,)})
    assert known.kind(by_name["sum"], numbers) == "Identity"
    assert known.size(by_name["sum"].outputs[0], numbers) == 64
    assert known.kind(by_name["product"], numbers) == "Mul"
    assert known.kind(by_name["ones"], numbers) == "Const"
    assert UNKNOWN.kind(by_name["sum"], numbers) == "Sum"


def test_devices_take_turns_with_sums() -> None:
    """By their order in the trace, so what one function computes of them changes nothing."""
    numbers = {"first": 3, "other": 4, "second": 7, "third": 9}
    pairs = [[0, 1], [2, 3]]
    known = Known(sums={7: pairs, 3: pairs, 9: pairs})
    assert known.turns(numbers) == {"first": 0, "second": 1, "third": 2}
    assert known.elsewhere() == [{7}, {3, 9}, {7}, {3, 9}]
    assert UNKNOWN.elsewhere() == [set()]


def test_a_sum_that_lies_elsewhere_takes_nothing() -> None:
    operations, numbers = traced()
    by_name = {one.name: one for one in operations}
    known = Known(sizes={numbers["product"]: (64,)})
    there = {numbers["product"]}
    assert known.size(by_name["product"].outputs[0], numbers, there) == 0
    # Nor does what lowering left out after it.
    assert known.size(by_name["sum"].outputs[0], numbers, there) == 0
