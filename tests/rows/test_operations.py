"""What each operation does to rows: functions, and what rows of their results are."""

from collections.abc import Callable
from typing import Any

from kdist.rows import NotStudied, RowDependence, study

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from .operations import MEANS, MIXED, ROW_BY_ROW, SQUARE, SUMS, filtered

MATRIX = tf.TensorSpec((None, 4))
CUBE = tf.TensorSpec((None, 3, 4))
IMAGES = tf.TensorSpec((None, 8, 8, 3))
LABELS = tf.TensorSpec((None,), tf.int32)


def flow(function: Callable, *specs: tf.TensorSpec) -> RowDependence:
    (found,) = study(function, *(specs or (MATRIX,))).outputs
    return found


def named(table: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("function", table.values(), ids=table.keys())


@named(ROW_BY_ROW)
def test_rows_stay_apart(function: Callable) -> None:
    assert flow(function) is RowDependence.ROWS


TEXTS = tf.TensorSpec((None,), tf.string)


@named(
    {
        "examples": lambda t: parsed(t, tf.io.FixedLenFeature((3,), tf.float32)),
        "numbers": lambda t: tf.io.decode_raw(t, tf.uint8),
        "numbers of a length": lambda t: tf.io.decode_raw(t, tf.uint8, fixed_length=4),
        "columns": lambda t: tf.io.decode_csv(t, [[0.0], [1.0]])[1],
    }
)
def test_records_stay_apart(function: Callable) -> None:
    assert flow(function, TEXTS) is RowDependence.ROWS


@named(
    {
        "of any length": lambda t: parsed(
            t, tf.io.FixedLenSequenceFeature((), tf.float32, allow_missing=True)
        ),
        "sparse": lambda t: parsed(t, tf.io.VarLenFeature(tf.float32)).values,
        "ragged": lambda t: parsed(t, tf.io.RaggedFeature(tf.float32)).values,
    }
)
def test_records_meet(function: Callable) -> None:
    """Padded to the longest, or numbered through."""
    assert flow(function, TEXTS) is RowDependence.MIXED


def parsed(texts: Any, feature: Any) -> Any:
    return tf.io.parse_example(texts, {"a": feature})["a"]


@named(MEANS)
def test_means(function: Callable) -> None:
    assert flow(function) is RowDependence.MEAN


@named(SUMS)
def test_sums(function: Callable) -> None:
    assert flow(function) is RowDependence.SUM


@named(MIXED)
def test_rows_meet(function: Callable) -> None:
    assert flow(function) is RowDependence.MIXED


@named(
    {
        "number": lambda x: 2.0,
        "weights": lambda x: SQUARE @ SQUARE,
        "noise": lambda x: keras.random.normal((3,)),
        "shape": lambda x: ops.shape(x)[1],
    }
)
def test_constants(function: Callable) -> None:
    study_ = study(function, MATRIX)
    assert (study_.outputs, study_.sized) == ((RowDependence.CONSTANT,), (False,))


@named(
    {
        "rows": lambda x: ops.shape(x)[0],
        "in the graph": lambda x: tf.shape(x)[0] + 1,
        "ones": lambda x: ops.sum(ops.ones_like(x)),
        "positions": lambda x: ops.arange(ops.shape(x)[0]),
        "a text of it": lambda x: tf.io.decode_raw(tf.as_string(tf.shape(x)[0]), tf.uint8),
    }
)
def test_counts_of_rows_are_constants_that_depend_on_the_size(function: Callable) -> None:
    study_ = study(function, MATRIX)
    assert (study_.outputs, study_.sized) == ((RowDependence.CONSTANT,), (True,))


@named(
    {
        "convolution": filtered,
        "dilated": lambda x: filtered(x, dilations=2),
        "blocks": lambda x: tf.batch_to_space(
            tf.nn.relu(tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]])), [2, 2], [[0, 0], [0, 0]]
        ),
        "pooled": lambda x: ops.average_pool(ops.max_pool(x, 2), 2),
        "resized": lambda x: ops.image.resize(x, (4, 4)),
        "grey": ops.image.rgb_to_grayscale,
        "flipped": tf.image.flip_left_right,
        "patches": lambda x: ops.image.extract_patches(x, 2),
    }
)
def test_images_stay_apart(function: Callable) -> None:
    assert flow(function, IMAGES) is RowDependence.ROWS


def test_attention_between_tokens_keeps_rows_apart() -> None:
    def attention(x: Any) -> Any:
        scores = ops.softmax(ops.einsum("bth,bsh->bts", x, x))
        return scores @ x

    assert flow(attention, CUBE) is RowDependence.ROWS
    assert flow(lambda x: ops.einsum("bth,cth->bc", x, x), CUBE) is RowDependence.MIXED


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "SimpleRNN"])
def test_loops_of_recurrent_layers(layer: str) -> None:
    made = getattr(keras.layers, layer)(5, return_sequences=True)
    made.build((None, 3, 4))
    assert flow(made, CUBE) is RowDependence.ROWS
    assert flow(lambda x: made(x - ops.mean(x, axis=0)), CUBE) is RowDependence.MIXED


def test_labels_per_row() -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    assert flow(loss, LABELS, MATRIX) is RowDependence.ROWS


def test_the_first_operations_are_listed_and_not_what_follows() -> None:
    found = study(lambda x: ops.exp(ops.roll(x, 1, axis=0)) + ops.sort(x, axis=0), MATRIX)
    assert [m.operation for m in found.mixings] == ["Roll", "TopKV2"]


def test_a_sum_that_is_used_for_more_is_named_with_its_use() -> None:
    def centred(x: Any) -> Any:
        with tf.name_scope("centre"):
            return x - ops.mean(x, axis=0)

    (mixing,) = study(centred, MATRIX).mixings
    assert (mixing.layer, mixing.operation) == ("centre", "Mean, then Sub")
    assert str(mixing) == "Mean, then Sub in layer 'centre'"


def test_structures_and_outputs_without_tensors() -> None:
    found = study(lambda d, y: {"a": d["x"], "b": y, "c": None}, {"x": MATRIX}, None)
    assert found.outputs == (RowDependence.ROWS, RowDependence.CONSTANT, RowDependence.CONSTANT)


def test_an_unknown_operation_counts_as_mixing() -> None:
    found = study(lambda x: tf.numpy_function(np.sort, [x], tf.float32), MATRIX)
    assert [m.operation for m in found.mixings] == ["PyFunc"]


def test_what_no_output_needs_is_not_looked_at() -> None:
    def checked(x: Any) -> Any:
        tf.debugging.assert_less(x, 9.0)
        return x

    assert study(checked, MATRIX).mixings == ()


def test_a_function_that_fails_says_why() -> None:
    with pytest.raises(NotStudied, match=r"ValueError: no.*batch of 467 rows, made up"):
        study(lambda x: (_ for _ in ()).throw(ValueError("no")), MATRIX)


def test_the_only_size_that_a_function_takes() -> None:
    with pytest.raises(NotStudied, match="reshape"):
        study(lambda x: ops.reshape(x, (6, 2, 2)), MATRIX)
    found = study(lambda x: ops.reshape(x, (6, 2, 2)), MATRIX, batch_size=6)
    assert found.outputs == (RowDependence.ROWS,)


def test_a_function_of_few_positions() -> None:
    """What stands for unknown sizes is small where nothing larger is taken."""
    table = tf.ones([8, 3])
    spec = tf.TensorSpec((None, None, 3))
    apart = study(lambda x: x + table[: x.shape[1]], spec)
    assert apart.outputs == (RowDependence.ROWS,)
    assert study(lambda x: x - tf.reduce_mean(x + table[: x.shape[1]]), spec).mixings
    with pytest.raises(NotStudied, match="64 and 3"):
        study(lambda x: x + tf.ones([3, 3])[: x.shape[1]] + table[: x.shape[1]], spec)
