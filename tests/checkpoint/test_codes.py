"""16-bit moments are saved as their codes, and read as what these mean, anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kdist
from kdist.checkpoint import codes, directory, store
from kdist.checkpoint.__main__ import main
from kdist.storage.state_formats import FORMATS

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from ..equivalence.harness import precision
from .kinds import KINDS, state, train

CODED = kdist.StateFormatConfig(first="1-6-9", second="0-6-10")
OTHERS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"state_format": kdist.StateFormatConfig(first="bf16", second="0-6-10")},
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with precision("float64"):
        yield


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["bf16", "1-6-9", "0-6-10"])
def test_every_code_means_what_it_means_in_training(name: str, dtype: str) -> None:
    form = FORMATS[name]
    assert form is not None
    every = np.arange(1 << 16).astype("uint16").reshape(256, 256)
    bits = (form.signed, form.exponent_bits, form.mantissa_bits, form.bias)
    found = codes.decode(every, codes.described(*bits), np.dtype(dtype))
    expected = form.decode(every, dtype).numpy()
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    zero = expected == 0
    np.testing.assert_array_equal(np.signbit(found[zero]), np.signbit(expected[zero]))


def saved(name: str, folder: Path, options: dict[str, Any]) -> tuple[keras.Model, Any]:
    """A model that has trained and was saved, and the arrays of its optimizer."""
    model = dataclasses.replace(KINDS[name], state=options).model()
    train(model, 1)
    manifest = directory.load(kdist.checkpoint.save(model, folder))
    return model, {one.path: one for one in manifest.groups["optimizer"]}


def check_same(model: keras.Model, again: keras.Model, folder: Path) -> None:
    kdist.checkpoint.restore(again, folder)
    for a, b in zip(state(model), state(again), strict=True):
        np.testing.assert_array_equal(a, b)


LEVELS = ["data3-level1", pytest.param("data4-level3", marks=pytest.mark.wide)]


@pytest.mark.parametrize("name", LEVELS)
def test_they_are_written_as_they_lie(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Two bytes an element, in host memory too; no slot is decoded to be saved."""
    model, _ = saved(name, tmp_path / "one", {"state_format": CODED})
    taken: dict[str, np.dtype] = {}
    own = store.write

    def write(folder: Path, parts: Any, compression: Any) -> None:
        taken.update((part.key, values.dtype) for part, values in parts)
        own(folder, parts, compression)

    monkeypatch.setattr(store, "write", write)
    monkeypatch.setattr(tf, "bitcast", None)  # as decoding begins
    folder = kdist.checkpoint.save(model, tmp_path / "two")
    monkeypatch.undo()
    arrays = directory.load(folder).groups["optimizer"]
    moments = [one for one in arrays if one.path.endswith(("_momentum", "_velocity"))]
    assert {one.codes for one in moments} == {"1-6-9/39", "0-6-10/47"}
    assert not any(one.codes for one in arrays if one not in moments)
    assert {taken[part.key] for one in moments for part in one.parts} == {np.dtype("uint16")}


@pytest.mark.parametrize("other", OTHERS)
def test_other_formats_read_what_they_mean(other: str, tmp_path: Path) -> None:
    """Floats to the bit; other codes as those of these floats; and all the other way round."""
    model, _ = saved("data4-level3", tmp_path / "coded", {"state_format": CODED})
    again = dataclasses.replace(KINDS["data3-level1"], state=OTHERS[other]).model()
    kdist.checkpoint.restore(again, tmp_path / "coded")
    slots = (model.optimizer.variables, again.optimizer.variables)
    form = OTHERS[other].get("state_format")
    for a, b in zip(*slots, strict=True):
        expected = a.numpy()
        if form is not None and a.path.endswith(("_momentum", "_velocity")):
            to = FORMATS[form.first if a.path.endswith("_momentum") else form.second]
            assert to is not None
            expected = to.decode(to.encode(expected), expected.dtype).numpy()
        np.testing.assert_array_equal(b.numpy(), expected, err_msg=a.path)
    kdist.checkpoint.save(again, tmp_path / "other")
    kdist.checkpoint.restore(model, tmp_path / "other")
    for a, b in zip(*slots, strict=True):
        if form is None:  # they were codes' values before
            np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)


def test_plain_keras_files_and_the_command_line(tmp_path: Path, capsys: Any) -> None:
    """A plain model trains on with their values; a `.keras` file has them; so has `inspect`."""
    model, arrays = saved("data3-level1", tmp_path / "coded", {"state_format": CODED})
    check_same(model, KINDS["plain"].model(), tmp_path / "coded")
    kdist.checkpoint.consolidate(tmp_path / "coded", tmp_path / "model.weights.h5")
    with h5py.File(tmp_path / "model.weights.h5") as file:
        values = [file["optimizer/vars"][str(n)][()] for n in range(len(arrays))]
    for found, variable in zip(values, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(found, variable.numpy())
    main(["inspect", str(tmp_path / "coded")])
    assert "1-6-9/39" in capsys.readouterr().out
