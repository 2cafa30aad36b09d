"""What `kdist.comm` uses of TensorFlow's tapes; joining a cluster is held by `tests/comm`."""

from __future__ import annotations

from kdist._compat import collective_runtime

import tensorflow as tf


def test_a_tape_records_what_depends_on_what_it_watches():
    x, other = tf.constant(1.0), tf.constant(2.0)
    assert not collective_runtime.recorded([x])
    with tf.GradientTape() as tape:
        tape.watch(x)
        assert collective_runtime.recorded([other, 2.0 * x])
        assert not collective_runtime.recorded([other])
        with collective_runtime.unrecorded():
            assert not collective_runtime.recorded([x])
            y = 3.0 * x
        collective_runtime.record_gradient("times", [y], [x], lambda grad: [5.0 * grad])
        with tape.stop_recording():
            assert not collective_runtime.recorded([x])
    assert float(tape.gradient(y, x)) == 5.0
