"""`kdist.comm.GradientTape` in one process is a `tf.GradientTape`; across: `test_processes.py`."""

from __future__ import annotations

import kdist
from kdist import comm

import numpy as np
import pytest
import tensorflow as tf


def program(tape_of, **options):
    """What a tape gives for nested sources, weighted targets, twice."""
    mesh = kdist.mesh(data=2)
    w = tf.Variable([1.0, 2.0])
    with tape_of(persistent=True) as tape:
        left, right = comm.all_reduce([w * 2.0, w**2], mesh, "data", algorithm="ring")
        with tape.stop_recording():
            aside = w**3
        targets = {"a": left, "b": [right * aside]}
    found = tape.gradient(targets, {"w": w, "none": tf.constant(1.0)}, **options)
    weights = {"a": tf.constant([1.0, 3.0]), "b": [tf.constant([0.0, 2.0])]}
    return found, tape.gradient(targets, [w], output_gradients=weights)


@pytest.mark.parametrize("options", [{}, {"unconnected_gradients": "zero"}], ids=["none", "zero"])
def test_it_is_a_gradient_tape(options):
    want, got = program(tf.GradientTape, **options), program(comm.GradientTape, **options)
    tf.nest.assert_same_structure(want, got)
    for w, g in zip(tf.nest.flatten(want), tf.nest.flatten(got)):
        assert (w is None) == (g is None)
        if w is not None:
            np.testing.assert_allclose(g, w)


def test_a_process_without_a_part_of_the_loss():
    x = tf.constant(3.0)
    with comm.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x**2
    assert tape.gradient(None, x) is None
    assert float(tape.gradient(None, x, unconnected_gradients="zero")) == 0.0
    assert float(tape.gradient([None, y], x)) == 6.0
    with comm.GradientTape() as tape:
        tape.watch(x)
        before = x**2
        tape.reset()
        tape.watch(x)
        after = before * x
    assert float(tape.gradient(after, x)) == 9.0


def test_tapes_nest_with_plain_ones():
    x = tf.constant(2.0, tf.float64)
    for outer_of, inner_of in ((comm.GradientTape,) * 2, (tf.GradientTape, comm.GradientTape)):
        with outer_of() as outer:
            outer.watch(x)
            with inner_of() as inner:
                inner.watch(x)
                y = x**4
            first = inner.gradient(y, x)
        assert float(outer.gradient(first, x)) == 48.0
