"""Keras's own export to ONNX, of a model that was trained in parallel, run by ONNX Runtime."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .exports import EXPORTS, Export, batch, mixed, trained

ONE = (
    "level3",
    "inner",
    "pipeline",
    "host",
    "uneven",
    "lora",
    "int8_inner",
    "int8_level3",
    "lora_int8",
)
MARKS: dict[str, list[Any]] = {"inner": [], "pipeline": [pytest.mark.wide]}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=MARKS.get(n, [pytest.mark.long])) for n in ONE]
)
def test_onnx_gives_the_same(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    pytest.importorskip("tf2onnx", reason="needs tf2onnx")
    check(runtime, EXPORTS[name], tmp_path, 1e-5)


@pytest.mark.long
def test_half_precision(tmp_path: Path) -> None:
    """With float16; bfloat16 is not, of plain Keras's models neither."""
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    pytest.importorskip("tf2onnx", reason="needs tf2onnx")
    half = Export({"data": 2}, functools.partial(mixed, "mixed_float16"))
    check(runtime, half, tmp_path, np.finfo(np.float16).eps)
    model, _ = trained(Export({"data": 2}, mixed))
    plain = mixed()
    plain(batch(plain, 2))
    for n, one in enumerate((model, plain)):
        one.export(tmp_path / f"{n}.onnx", format="onnx", verbose=False)
        with pytest.raises(Exception, match=r"tensor\(bfloat16\)"):
            runtime.InferenceSession(str(tmp_path / f"{n}.onnx"))


def check(runtime: Any, export: Export, folder: Path, tolerance: float) -> None:
    """ONNX Runtime computes what the model does."""
    model, again = trained(export)
    model.export(folder / "model.onnx", format="onnx", verbose=False)
    session = runtime.InferenceSession(str(folder / "model.onnx"))
    for rows in (3, 8):
        x = batch(model, rows)
        (found,) = session.run(None, {session.get_inputs()[0].name: x})
        expected = again.predict(x, verbose=0)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
