"""Keras's own export to ONNX, of a model that was trained in parallel, run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .exports import EXPORTS, batch, trained

ONE = ("level3", "inner", "host", "uneven", "lora", "int8_inner", "int8_level3", "lora_int8")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != "inner")) for n in ONE]
)
def test_onnx_gives_the_same(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    pytest.importorskip("tf2onnx", reason="needs tf2onnx")
    model, again = trained(EXPORTS[name])
    model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    for rows in (3, 8):
        x = batch(model, rows)
        (found,) = session.run(None, {session.get_inputs()[0].name: x})
        np.testing.assert_allclose(found, again.predict(x, verbose=0), rtol=1e-5, atol=1e-5)
