"""A graph cut anywhere into segments equals the model's own call: outputs, masks, gradients."""

from __future__ import annotations

from typing import Any

from kdist.segment import cut_at
from kdist.segmented import SegmentedProgram, as_node

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from .equivalence.random_graphs import Net, Step, data, nets
from .equivalence.repeatable import repeatable
from .parity import in_float64

ROWS = 4


def own_call(model: keras.Model, x: Any, y: Any) -> tuple[Any, ...]:
    """Loss, gradients (0 where there is none), outputs and masks of Keras's own training pass."""
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = model.compute_loss(x, y, outputs)
    gradients = tape.gradient(
        loss, [v.value for v in model.trainable_variables], unconnected_gradients="zero"
    )
    flat = keras.tree.flatten(outputs)
    masks = [getattr(t, "_keras_mask", None) for t in flat]
    return loss, gradients, flat, masks


def in_segments(model: keras.Model, x: Any, y: Any, stops: Any) -> tuple[Any, ...]:
    """The same, of the segments that end where `stops` chooses."""

    def cut(nodes: Any, outputs: Any) -> Any:
        ends = {i for i, n in enumerate(nodes) if n.alone} | {
            i + 1 for i, n in enumerate(nodes) if n.alone
        }
        ends |= {n for n in stops if n < len(nodes)} | {len(nodes)}
        return cut_at(nodes, outputs, sorted(ends - {0}))

    program = SegmentedProgram(model, True, cut, as_node)
    terms = len(keras.tree.flatten(y))
    one = tf.constant(1.0, tf.float64)
    params = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]
    carried = [tf.convert_to_tensor(v.value) for v in program.state.carried]
    with program.replica(None):
        result = program.loss_and_gradients(
            params, carried, (x, y, None), tf.ones([terms], tf.float64), one, one, one
        )
    assert not program.inline
    gradients = [tf.zeros_like(p) for p in params]
    for i, gradient in zip(program.trained.connected, result["gradients"]):
        gradients[i] = gradient
    return result["loss"], gradients, keras.tree.flatten(result["outputs"]), result["masks"]


def check(net: Net, stops: Any) -> None:
    with in_float64():
        model = net.build()
        x, target = data(0, ROWS)
        x = [tf.constant(part) for part in x]
        y = [tf.constant(target)] * len(model.outputs)
        y = y[0] if len(y) == 1 else y
        model.compile("sgd", ["mse"] * len(model.outputs))
        model.built = True
        expected, found = own_call(model, x, y), in_segments(model, x, y, stops)
    for name, a, b in zip(("loss", "gradients", "outputs", "masks"), expected, found):
        for i, (left, right) in enumerate(zip(keras.tree.flatten(a), keras.tree.flatten(b))):
            assert (left is None) == (right is None), (name, i, left, right)
            if left is not None:
                left, right = (
                    np.asarray(tf.convert_to_tensor(t), "float64") for t in (left, right)
                )
                np.testing.assert_allclose(
                    right, left, rtol=1e-9, atol=1e-12, err_msg=f"{name} {i}"
                )


GIVEN = {"net": nets(), "stops": st.sets(st.integers(1, 12))}
POST_NORM = Net((Step("attention", 0, 0, False), Step("add", 0, 1, False)), ())
ALIAS = Net(
    (Step("nothing", 0, 0, False), Step("attention", 0, 0, False), Step("add", 0, 2, False)), ()
)


@pytest.mark.parametrize("net", [POST_NORM, ALIAS], ids=["post_norm", "one_object_twice"])
def test_attention_takes_the_mask_off_what_later_segments_read(net: Net) -> None:
    for stop in range(1, 5):
        check(net, {stop})
    check(net, set(range(8)))


@repeatable(8)
@hypothesis.given(**GIVEN)
def test_a_random_graph_cut_anywhere_equals_the_whole(net: Net, stops: set[int]) -> None:
    check(net, stops)


@pytest.mark.long
@repeatable(300)
@hypothesis.given(**GIVEN)
def test_many_random_graphs_cut_anywhere_equal_the_whole(net: Net, stops: set[int]) -> None:
    check(net, stops)
