"""A traced function is cut behind what it makes of texts."""

from __future__ import annotations

from typing import Any

from kdist.dtensor.texts import CannotSplit, in_front

import keras
import numpy as np
import pytest
import tensorflow as tf

WORDS = ("good", "bad", "film")
TEXTS = tf.constant(["good film", "a bad bad film"])


def _concrete(function: Any, *specs: Any) -> Any:
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def _vectorized(**options: Any) -> Any:
    return keras.layers.TextVectorization(vocabulary=WORDS, **options)


def _looked_up(length: int | None) -> Any:
    vectorize = _vectorized(output_sequence_length=length)

    def function(texts: Any, table: Any, scale: Any) -> Any:
        ids = vectorize(texts)
        if length is not None:
            ids = tf.ensure_shape(ids, [2, length])
        rows = tf.gather(table, ids)
        return {"rows": rows * scale, "length": tf.strings.length(texts)}

    specs = [tf.TensorSpec([2], tf.string), tf.TensorSpec([5, 3]), tf.TensorSpec([])]
    return _concrete(function, *specs)


def _dtypes(concrete: Any) -> set[tf.DType]:
    return {t.dtype for op in concrete.graph.get_operations() for t in (*op.inputs, *op.outputs)}


def test_the_rest_has_numbers_alone() -> None:
    found = in_front(_looked_up(4))
    assert found is not None
    assert not {tf.string, tf.resource} & _dtypes(found.rest)
    # Weights are no part of what each slice makes whole.
    assert [t.dtype for t in found.front.inputs if t.dtype.is_floating] == []
    assert [t.shape.as_list() for t in found.front.outputs] == [[2, 4], [2]]


def test_both_give_what_the_function_gives() -> None:
    concrete = _looked_up(4)
    found = in_front(concrete)
    assert found is not None
    flat = [TEXTS, tf.random.normal([5, 3]), tf.constant(2.0)]
    given = [*flat, *concrete.captured_inputs]
    made = found.front(*(given[p] for p in found.read))
    values = found.rest(*(given[p] for p in found.kept), *made)
    expected = concrete(*flat)
    assert found.structure == {"rows": 1, "length": 0}
    for name, position in found.structure.items():
        np.testing.assert_array_equal(values[position], expected[name])


def test_what_no_text_makes_stays_whole() -> None:
    assert in_front(_concrete(lambda x: 2 * x, tf.TensorSpec([3]))) is None


def test_what_a_check_says_is_no_text() -> None:
    def function(x: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_positive(x, "must be positive")]):
            return tf.identity(x)

    assert in_front(_concrete(function, tf.TensorSpec([None]))) is None


def test_a_table_that_nothing_reads_is_left_out() -> None:
    """As of a backward pass, which has what the forward pass looked up."""
    layer = keras.layers.StringLookup(vocabulary=WORDS)
    layer(TEXTS)
    handle = layer.lookup_table.resource_handle

    def function(x: Any) -> Any:
        tf.identity(handle)
        return 2 * x

    assert in_front(_concrete(function, tf.TensorSpec([3]))) is None


def test_what_is_printed_of_numbers_stays_with_them() -> None:
    """Else all that the numbers are made of would be computed whole, in front."""

    def function(x: Any) -> Any:
        tf.print("largest:", tf.reduce_max(x))
        return 2 * x

    assert in_front(_concrete(function, tf.TensorSpec([3]))) is None


@pytest.mark.parametrize("wrapped", [False, True], ids=["function", "wrapped"])
def test_what_is_printed_beside_texts_is_kept(wrapped: bool, capfd: Any) -> None:
    """Of texts in front, of numbers in the rest; no result of a wrapped function waits for it."""
    layer = keras.layers.StringLookup(vocabulary=WORDS)

    def function(texts: Any, x: Any) -> Any:
        ids = layer(texts)
        tf.print("numbers:", tf.reduce_max(x))
        tf.print("texts:", texts)
        return tf.cast(ids, x.dtype) * x

    specs = [tf.TensorSpec([2], tf.string), tf.TensorSpec([2])]
    concrete = (
        tf.compat.v1.wrap_function(function, specs) if wrapped else _concrete(function, *specs)
    )
    found = in_front(concrete)
    assert found is not None
    given = [tf.constant(["film", "new"]), tf.constant([1.0, 2.0]), *concrete.captured_inputs]
    made = found.front(*(given[p] for p in found.read))
    assert "texts:" in (said := capfd.readouterr().err)
    assert "numbers:" not in said
    (values,) = found.rest(*(given[p] for p in found.kept), *made)
    assert "numbers: 2" in (said := capfd.readouterr().err)
    assert "texts:" not in said
    np.testing.assert_array_equal(values, [3.0, 0.0])


def test_a_length_that_is_of_the_texts() -> None:
    with pytest.raises(CannotSplit, match="values decide its shape.*output_sequence_length"):
        in_front(_looked_up(None))


def test_a_check_of_texts_is_kept() -> None:
    layer = keras.layers.StringLookup(vocabulary=WORDS, num_oov_indices=0)
    concrete = _concrete(lambda t: 2 * layer(t), tf.TensorSpec([1], tf.string))
    found = in_front(concrete)
    assert found is not None
    given = [tf.constant(["new"]), *concrete.captured_inputs]
    with pytest.raises(tf.errors.InvalidArgumentError):
        found.front(*(given[p] for p in found.read))
