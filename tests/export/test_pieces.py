"""Parts that are served for any number of rows where programs are for known numbers of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

from .exports import CUT, PIPELINE, Export, on_host, tokens, trained, whole_table
from .serving import in_a_fresh_process

ROWS = (1, 3, 11, 70, 150)
"""A row; fewer than devices; several pieces of one size; of all sizes; and of two sizes."""


def recurrent(length: int | None = 6) -> keras.Model:
    inputs = keras.Input((length, 8))
    x = keras.layers.LSTM(16, name="loop")(inputs)
    return keras.Model(inputs, keras.layers.Dense(6, name="down")(x))


def split(way: str = "data") -> Callable[[], keras.Model]:
    return lambda: tokens(kdist.layers.SplitEmbedding((5, 19), 4, way, name="table"))


def two_inputs() -> keras.Model:
    """Two inputs, and two outputs, one of whole numbers."""
    ids, x = keras.Input((6,), dtype="int32"), keras.Input((8,))
    table = kdist.layers.HostEmbedding(24, 4, name="table")
    both = keras.layers.Concatenate()([keras.layers.Flatten()(table(ids)), x])
    up = keras.layers.Dense(16, name="up")(both)
    best = keras.layers.Lambda(lambda y: keras.ops.argmax(y, -1))(up)
    return keras.Model([ids, x], {"down": keras.layers.Dense(6, name="down")(up), "best": best})


INNER: dict[str, int] = {"data": 2, "model": 2}
STAGES: dict[str, int] = {"pipe": 2, "model": 2}
LAYOUTS: dict[str, Any] = {"layout_map": {".*down/kernel": (None, "model")}}
CASES = {
    "loop": Export(INNER, recurrent, LAYOUTS),
    "loop_global": Export(INNER, recurrent, {**LAYOUTS, "batch_semantics": "global"}),
    "loop_stages": Export(STAGES, recurrent, {**LAYOUTS, "pipeline": PIPELINE}),
    "host": Export(INNER, on_host, {"layout_map": CUT}, whole_table),
    "split": Export(INNER, split(), {"layout_map": CUT}, whole_table),
    "split_model": Export(INNER, split("model"), {"enable_alltoall": True}, whole_table),
    "host_stages": Export(STAGES, on_host, {"layout_map": CUT, "pipeline": PIPELINE}, whole_table),
}
DEFAULT = ("host_stages",)


def rows(model: keras.Model, number: int) -> Any:
    """Some rows of input."""
    rng = np.random.default_rng(number)
    found = [
        rng.integers(0, 24, (number, *one.shape[1:])).astype("int32")
        if one.dtype == "int32"
        else rng.normal(size=(number, *(n or 6 for n in one.shape[1:]))).astype("float32")
        for one in model.inputs
    ]
    return found[0] if len(found) == 1 else found


def close(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def trained_on(one: Export) -> tuple[keras.Model, keras.Model]:
    """A model over its mesh, and one on a single device with the same weights."""
    keras.utils.set_random_seed(2)
    model, again = one.build(), (one.plain or one.build)()
    again.set_weights(model.get_weights())
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**one.axes), **one.options))
    return model, again


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n not in DEFAULT)) for n in CASES]
)
def test_any_number_of_rows(name: str, tmp_path: Path) -> None:
    model, plain = trained_on(CASES[name])
    kdist.export.saved_model(model, tmp_path / "served", shards="keep")
    served = tf.saved_model.load(str(tmp_path / "served"))
    for number in ROWS:
        x = rows(plain, number)
        close(served.serve(x), plain(x))
    assert served.serve(rows(plain, 0)).shape == (0, 6)


def test_several_inputs_and_outputs(tmp_path: Path) -> None:
    model, plain = trained_on(Export(INNER, two_inputs))
    plain.set_weights(model.get_weights())
    kdist.export.saved_model(model, tmp_path / "served", shards="keep")
    served = tf.saved_model.load(str(tmp_path / "served"))
    for number in (3, 11):
        x = [tf.constant(one) for one in rows(plain, number)]
        found, expected = served.serve(x), plain(x)
        for key in ("down", "best"):
            close(found[key], expected[key])


def test_in_a_fresh_process_after_training(tmp_path: Path) -> None:
    """Each part on its device, without kdist."""
    one = Export(INNER, split("model"), {"layout_map": CUT}, whole_table)
    model, plain = trained(one)
    words = kdist.export.Signature([tf.TensorSpec([None, 6], tf.string)], as_ids)
    given = {"serve": kdist.export.Signature(), "words": words}
    kdist.export.saved_model(model, tmp_path / "split-keep", given, shards="keep")
    for number in ROWS:
        np.save(tmp_path / f"split-{number}.npy", rows(plain, number))
    in_a_fresh_process(tmp_path, ["split-keep"], ROWS)
    with np.load(tmp_path / "split-keep.npz") as served:
        assert "error" not in served.files, str(served["error"])
        for number in ROWS:
            close(served[str(number)], plain.predict(rows(plain, number), verbose=0))
        assert '["3", [19, 4]]' in str(served["where"])


def as_ids(text: Any) -> Any:
    return tf.strings.length(text)


class Centred(keras.layers.Layer):
    """Takes off the mean over the batch."""

    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, axis=0, keepdims=True)


def test_what_is_refused_still(tmp_path: Path) -> None:
    """Rows that meet; and lengths of a loop."""
    inputs = keras.Input((6, 8))
    outputs = Centred()(keras.layers.LSTM(4)(inputs))
    meeting = Export(INNER, lambda: keras.Model(inputs, outputs))
    for one in (meeting, Export(INNER, lambda: recurrent(None), LAYOUTS)):
        model, _ = trained_on(one)
        with pytest.raises(ValueError, match="inputs of known sizes"):
            kdist.export.saved_model(model, tmp_path / "served", shards="keep")
