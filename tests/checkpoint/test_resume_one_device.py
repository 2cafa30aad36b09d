"""A run over one device that stopped and went on ends as plain Keras does that never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import kdist
from kdist.callbacks import ShardedCheckpoint

import keras
import numpy as np
import pytest

from ..equivalence.harness import precision
from .runs import STEPS, build, run


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with precision("float64"):
        yield


@pytest.mark.parametrize("stop", [4, STEPS + 3])
@pytest.mark.parametrize("kind", ["batches_in_order", "dataset"])
def test_as_plain_keras(tmp_path: Path, kind: str, stop: int) -> None:
    """With dropout, statistics, and what callbacks remember; of data whose order is given."""
    whole = run(build(None, 0), None, kind)
    one = {"data": 1}
    run(build(one, 0), ShardedCheckpoint(tmp_path, every_steps=3), kind, stop)
    saver = ShardedCheckpoint(tmp_path, every_steps=3, resume=True)
    rest = run(build(one, 0), saver, kind)
    assert saver.restored is not None and saver.restored.step == (stop - 1) // 3 * 3
    np.testing.assert_allclose(rest["steps"], whole["steps"], rtol=1e-9, atol=1e-9)
    assert rest["epochs"] == whole["epochs"] and rest["history"].keys() == whole["history"].keys()
    for name, values in whole["history"].items():
        np.testing.assert_allclose(rest["history"][name], values, rtol=1e-9, atol=1e-9)
    for a, b in zip(rest["weights"], whole["weights"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_a_plain_model_is_told_how(tmp_path: Path) -> None:
    """Keras's own `fit` has taken its data, and their order, when it asks a callback."""
    model = build(None, 0)
    with pytest.raises(ValueError, match=r"mesh=kdist\.mesh\(data=1\)"):
        run(model, ShardedCheckpoint(tmp_path, resume=True), "dataset")
    kdist.checkpoint.save(model, tmp_path)
    parallel = build({"data": 1}, 0)
    saver = ShardedCheckpoint(tmp_path, resume=True)
    found = run(parallel, saver, "dataset", epochs=1)
    assert isinstance(saver.restored, kdist.checkpoint.Restored)
    expected = run(model, None, "dataset", epochs=1)
    for a, b in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    assert keras.config.floatx() == "float64"
