"""Models that are quantised, or trained with LoRA, after parallel training: as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.storage.variables import parts_of

import keras
import numpy as np
import pytest
import tensorflow as tf

from .exports import CUT, EXPORTS, batch, dense, trained

FINISHED = [name for name in EXPORTS if name.startswith(("lora", "int8"))]
DEFAULT = ("lora_int8",)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(
        np.asarray(found, "float32"), np.asarray(expected, "float32"), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n not in DEFAULT)) for n in FINISHED]
)
def test_as_on_one_device(name: str, tmp_path: Path) -> None:
    """Weights, predictions, and what comes back of a `.keras` file; served: test_saved_model."""
    model, plain = trained(EXPORTS[name])
    for a, b in zip(model.weights, plain.weights, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    x = batch(plain, 8)
    close(model.predict(x, verbose=0), plain.predict(x, verbose=0))
    loaded = []
    for n, one in enumerate((model, plain)):
        one.save(tmp_path / f"{n}.keras")
        loaded.append(keras.models.load_model(tmp_path / f"{n}.keras"))
    for a, b in zip(loaded[0].get_weights(), loaded[1].get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    close(loaded[0].predict(x, verbose=0), loaded[1].predict(x, verbose=0))


def test_int8_stays_cut() -> None:
    """No weight and no activation is gathered: two sums, of a product and of a row's largest."""
    model, plain = trained(EXPORTS["int8_inner"])
    x = batch(plain, 8)
    close(model.predict(x, verbose=0), plain.predict(x, verbose=0))
    found = kdist.inspect(model)
    assert [(one.kind, one.layer) for one in found.collectives] == [("all-reduce", "down")] * 2
    assert not found.islands and not found.gathered and not found.fallbacks
    for name in ("up", "down"):
        kernel = model.get_layer(name).kernel
        assert kernel.dtype == "int8"
        parts = {part.target.shape for part in parts_of(kernel)}
        assert [np.prod(one) for one in parts] == [np.prod(kernel.shape) // 2]


@pytest.mark.parametrize("shards", ["keep", "gather"])
def test_lora_merged(shards: Any, tmp_path: Path) -> None:
    """Keras merges when it saves; a model without LoRA, made in a scope, takes the shards."""
    model, plain = trained(EXPORTS["lora"])
    model.save_weights(tmp_path / "merged.weights.h5")
    mesh = kdist.mesh(data=2, model=2)
    with kdist.scope(kdist.ParallelConfig(mesh=mesh, layout_map=CUT)):
        merged = dense()
        merged.load_weights(tmp_path / "merged.weights.h5")
    assert not any("lora" in entry.variable.path for entry in attached(merged).entries.values())
    kernel = plain.get_layer("up").kernel  # Keras's property: what LoRA adds, added
    np.testing.assert_allclose(merged.get_layer("up").kernel, kernel, rtol=1e-6, atol=1e-7)
    kdist.export.saved_model(merged, tmp_path / "served", shards=shards)
    served = tf.saved_model.load(str(tmp_path / "served"))
    assert not any("lora" in v.name for v in served._all_variables)
    x = batch(plain, 5)
    np.testing.assert_allclose(served.serve(x), plain.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
