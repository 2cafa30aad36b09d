"""What `kdist.export.saved_model` writes is served by plain TensorFlow, in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kdist
from kdist.api.attached import attached

import keras
import numpy as np
import pytest
import tensorflow as tf

from .exports import CUT, EXPORTS, WAYS, batch, dense, write
from .serving import compare, in_a_fresh_process


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Every model, exported both ways and served by one fresh process."""
    folder = tmp_path_factory.mktemp("served")
    expected = {name: write(folder, name) for name in EXPORTS}
    in_a_fresh_process(folder, [f"{name}-{way}" for name in EXPORTS for way in WAYS])
    return folder, expected


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EXPORTS)
def test_served_by_plain_tensorflow(served: Any, name: str, way: str) -> None:
    folder, expected = served
    where = compare(folder, name, way, expected[name])
    devices = {device for device, _ in where}
    assert len(devices) == 1 if way == "gather" else len(devices) > 1


def test_parts_are_served_where_they_were(tmp_path: Path) -> None:
    """No device has a whole weight that is cut."""
    expected = write(tmp_path, "inner")
    in_a_fresh_process(tmp_path, ["inner-keep", "inner-gather"])
    where = compare(tmp_path, "inner", "keep", expected)
    compare(tmp_path, "inner", "gather", expected)
    shapes = [shape for _, shape in where]
    assert shapes.count([8, 16 // 2]) == 4 and shapes.count([16 // 2, 6]) == 4
    assert [8, 16] not in shapes and [16, 6] not in shapes
    assert {device for device, _ in where} == set("0123")


@pytest.mark.parametrize("shards", ["keep", "gather"])
def test_served_by_its_command_line(shards: Any, tmp_path: Path) -> None:
    """`saved_model_cli run`, as TensorFlow installs it."""
    model = parallel(layout_map=CUT)
    kdist.export.saved_model(model, tmp_path / "served", shards=shards)
    x = batch(model, 8)
    np.save(tmp_path / "x.npy", x)
    (name,) = (
        tf.saved_model.load(str(tmp_path / "served"))
        .signatures["serving_default"]
        .structured_input_signature[1]
    )
    what = ["--tag_set", "serve", "--signature_def", "serving_default"]
    given = ["--inputs", f"{name}={tmp_path}/x.npy", "--outdir", str(tmp_path / "out")]
    call = "from tensorflow.python.tools.saved_model_cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", call, "run", "--dir", str(tmp_path / "served"), *what, *given],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "out").glob("*.npy")
    np.testing.assert_allclose(np.load(made), model.predict(x, verbose=0), rtol=1e-6, atol=1e-6)


def parallel(**options: Any) -> keras.Model:
    mesh = kdist.mesh(data=2, model=2)
    return kdist.parallelize(dense(), kdist.ParallelConfig(mesh=mesh, **options))


def test_no_weight_is_put_together_to_keep_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = parallel(layout_map=CUT)
    cut = [e for e in attached(model).entries.values() if not e.placement.is_whole]
    assert cut

    def whole(self: Any) -> Any:
        raise AssertionError(f"{self.variable.path} was put together")

    for entry in cut:
        monkeypatch.setattr(type(entry), "whole", whole)
    kdist.export.saved_model(model, tmp_path / "served", shards="keep")
    with pytest.raises(AssertionError, match="was put together"):
        kdist.export.saved_model(model, tmp_path / "whole")


def test_known_sizes(tmp_path: Path) -> None:
    model = parallel(layout_map=CUT)
    given = {"eight": kdist.export.Signature([tf.TensorSpec([8, 8])])}
    kdist.export.saved_model(model, tmp_path / "served", given, shards="keep")
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    x = batch(model, 8)
    np.testing.assert_allclose(loaded.eight(x), model.predict(x, verbose=0), rtol=1e-6, atol=1e-6)


def test_training_goes_on_after_an_export(tmp_path: Path) -> None:
    models = [parallel(layout_map=CUT) for _ in range(2)]
    models[1].set_weights(models[0].get_weights())
    x, y = batch(models[0], 8), np.ones((8, 6), "float32")
    for model in models:
        model.compile("sgd", "mse")
        model.train_on_batch(x, y)
    for shards in ("keep", "gather"):
        kdist.export.saved_model(models[1], tmp_path / shards, shards=shards)
    for model in models:
        keras.utils.set_random_seed(0)
        model.train_on_batch(x, y)
    for a, b in zip(models[0].trainable_variables, models[1].trainable_variables, strict=True):
        assert a.shape == b.shape and np.isfinite(b.numpy()).all()


@pytest.mark.parametrize("shards", ["keep", "gather"])
def test_layers_around_a_model_need_not_be_built(tmp_path: Path, shards: Any) -> None:
    model = parallel()
    text = keras.layers.TextVectorization(output_sequence_length=8, vocabulary=["red", "green"])
    spec, words = [tf.TensorSpec([None], tf.string)], tf.constant(["red green", "blue"])
    both = {"text": kdist.export.Signature(spec, text, keras.layers.Softmax())}
    kdist.export.saved_model(model, tmp_path / "served", both, shards=shards)
    served = tf.saved_model.load(str(tmp_path / "served"))
    expected = tf.nn.softmax(model.predict(tf.cast(text(words), tf.float32), verbose=0))
    np.testing.assert_allclose(served.text(words), expected, rtol=1e-6, atol=1e-6)
    hidden = {"text": kdist.export.Signature(spec, lambda words: text(words))}
    refused("Give the layer itself", model, tmp_path / "no", hidden, shards=shards)


def refused(match: str, *args: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=match):
        kdist.export.saved_model(*args, **options)


def test_what_is_refused(tmp_path: Path) -> None:
    at, model = tmp_path / "served", parallel()
    refused("is a plain Keras model", dense(), at)
    refused("host_tables='both'", model, at, host_tables="both")
    refused("shards='all'", model, at, shards="all")
    refused("signatures={}", model, at, {})
    refused("signatures=", model, at, {"serve": [tf.TensorSpec([None, 8])]})
    with pytest.raises(ValueError, match="inputs of its own"):
        kdist.export.Signature(before=tf.identity)
    with pytest.raises(ValueError, match="after='softmax'"):
        kdist.export.Signature(after="softmax")  # type: ignore[arg-type]
    assert not at.exists()


def test_any_number_of_rows_where_programs_take_multiples(tmp_path: Path) -> None:
    """Layers over the whole batch cut its rows over data: more rows are given, and dropped."""
    model = parallel(batch_semantics="global", layout_map=CUT)
    kdist.export.saved_model(model, tmp_path / "served", shards="keep")
    served = tf.saved_model.load(str(tmp_path / "served"))
    for rows in (1, 2, 5, 8, 11):
        x = batch(model, rows)
        expected = model.predict(x, verbose=0)
        found = served.serve(x)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


class Centred(keras.layers.Layer):
    """Takes off the mean over the batch."""

    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, axis=0, keepdims=True)


@pytest.mark.parametrize("shards", ["keep", "gather"])
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}])
def test_vocabularies_inside_a_model(axes: dict[str, int], shards: Any, tmp_path: Path) -> None:
    words = keras.Input((8,), dtype="string")
    ids = keras.layers.StringLookup(vocabulary=["red", "green"])(words)
    x = keras.layers.Flatten()(keras.layers.Embedding(3, 4, name="table")(ids))
    x = keras.layers.Dense(16, name="up")(x)
    model = keras.Model(words, keras.layers.Dense(4, name="down")(x))
    texts = tf.constant([["red", "blue"] * 4] * 3)
    expected = model(texts)
    cut = {"up/kernel": (None, "model")} if "model" in axes else None
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cut))
    kdist.export.saved_model(model, tmp_path / "served", shards=shards)
    served = tf.saved_model.load(str(tmp_path / "served"))
    for rows in (3, 1):
        found = served.serve(texts[:rows])
        np.testing.assert_allclose(found, expected[:rows], rtol=1e-6, atol=1e-6)


def test_sizes_that_a_program_cannot_have(tmp_path: Path) -> None:
    """Where rows meet, there is no row that could be added."""
    inputs = keras.Input((8,))
    outputs = keras.layers.Dense(6, name="down")(Centred()(inputs))
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), batch_semantics="global")
    model = kdist.parallelize(keras.Model(inputs, outputs), config)
    refused("inputs of known sizes", model, tmp_path / "served", shards="keep")
