"""Elements of a dataset that processes read rows of: what is wrong with one is said by all."""

from __future__ import annotations

from typing import Any

from kdist.program import batch
from kdist.program.own_rows import OwnRows

import pytest
import tensorflow as tf


def unequal(known: bool) -> tf.data.Dataset:
    """Batches of 4 rows of x, 8 of y."""
    dataset = tf.data.Dataset.from_tensors((tf.zeros([4, 2]), tf.zeros([8])))
    if known:
        return dataset
    spec = tf.TensorSpec([None, 2]), tf.TensorSpec([None])
    return tf.data.Dataset.from_generator(lambda: iter(dataset), output_signature=spec)


@pytest.mark.parametrize("apart", [False, True])
def test_other_lengths_are_refused_before_they_are_read(apart: bool) -> None:
    dataset = unequal(known=True)
    rows = OwnRows(dataset.element_spec, ((0,), (1,)))
    cut = (lambda *element: rows.apart(element, 1)) if apart else rows.cut(1)
    with pytest.raises(ValueError, match="as many rows.*Received: shapes"):
        dataset.map(cut)


@pytest.mark.parametrize("apart", [False, True])
def test_other_lengths_are_refused_when_they_are_read(apart: bool) -> None:
    dataset = unequal(known=False)
    rows = OwnRows(dataset.element_spec, ((0,), (1,)))
    cut = (lambda *element: rows.apart(element, 1)) if apart else rows.cut(1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="have as many rows"):
        next(iter(dataset.map(cut)))


def test_what_is_cut_is_not_converted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise TensorFlow warns, once for each function, of what it cannot convert."""

    def split(*given: Any) -> Any:
        return cut if (cut := batch.split(*given)) else None

    monkeypatch.setattr("kdist.program.own_rows.split", split)
    dataset = tf.data.Dataset.from_tensors(tf.zeros([4, 2]))
    rows = OwnRows(dataset.element_spec, ((0,), (1,)))
    size, parts = next(iter(dataset.map(rows.cut(1))))
    assert int(size) == 4 and parts[0][0].shape == (2, 2)
    assert "AutoGraph" not in caplog.text
