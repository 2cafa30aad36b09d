"""Parts of a tensor, put together."""

from __future__ import annotations

from kdist.storage.parts import assemble

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st


@given(
    cuts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3),
    order=st.randoms(),
)
@settings(deadline=None, max_examples=40)
def test_assemble_puts_any_grid_together(cuts, order):
    shape = [sum(c) for c in cuts]
    whole = np.arange(np.prod(shape)).reshape(shape)
    indices: list[tuple] = [()]
    for lengths in cuts:
        ends = np.cumsum(lengths)
        spans = [slice(int(e - n), int(e)) for e, n in zip(ends, lengths)]
        indices = [(*i, s) for i in indices for s in spans]
    order.shuffle(indices)
    np.testing.assert_array_equal(assemble([(i, tf.constant(whole[i])) for i in indices]), whole)


def test_assemble_refuses_the_same_part_twice():
    part = ((slice(0, 2),), tf.ones(2))
    with pytest.raises(ValueError, match="disjoint"):
        assemble([part, part])


def test_assemble_of_nothing_has_the_shape_of_the_whole():
    def parts(*bounds):
        boxes = [tuple(slice(a, b) for a, b in one) for one in bounds]
        return [(box, tf.zeros([one.stop - one.start for one in box])) for box in boxes]

    none = (0, 0)
    assert assemble(parts([none, (0, 2)], [none, (2, 4)])).shape == (0, 4)
    assert assemble(parts([none, (0, 4)], [none, (0, 4)])).shape == (0, 4)
    assert assemble(parts([(0, 1), none], [(1, 3), none])).shape == (3, 0)
    # Of a table that is split by hand.
    assert assemble(parts([none, (0, 4)], [(0, 3), (0, 4)], [(3, 3), (0, 4)])).shape == (3, 4)
