"""Weights of files go to shards part by part, in a `kdist.scope` and on a parallel model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kdist
from kdist._compat import keras_saving
from kdist.api.attached import attached
from kdist.storage import recipes
from kdist.storage.variables import parts_of, unborn

import h5py
import keras
import numpy as np
import pytest

CUT = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
SHARDS = kdist.OptimizerConfig(level=3, threshold_kb=0, partition="slice")
KINDS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "level3": ({"data": 4}, {"optimizer": SHARDS}),
    "inner": ({"model": 4}, {"layout_map": CUT}),
    "inner3": ({"data": 2, "model": 2}, {"layout_map": CUT, "optimizer": SHARDS}),
}
FILES = ("w.weights.h5", "w.weights.json", "model.keras", "gzip.weights.h5")


def build(seed: int = 1) -> keras.Model:
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((16,))
    x = keras.layers.Dense(64, "relu", name="up")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, keras.layers.Dense(16, name="down")(x))


def config(kind: str) -> kdist.ParallelConfig:
    axes, options = KINDS[kind]
    return kdist.ParallelConfig(mesh=kdist.mesh(**axes), **options)


def saved(folder: Path, name: str) -> tuple[keras.Model, Path]:
    model = build(seed=7)
    if name.endswith(".json"):
        model.save_weights(folder / name, max_shard_size=6e-6)
        assert len(list(folder.glob("*.h5"))) > 1
    elif name.endswith(".keras"):
        model.save(folder / name)
    elif name.startswith("gzip"):
        model.save_weights(folder / "plain.weights.h5")
        with h5py.File(folder / "plain.weights.h5") as old, h5py.File(folder / name, "w") as new:
            old.visititems(lambda at, one: _compressed(new, at, one))
    else:
        model.save_weights(folder / name)
    return model, folder / name


def _compressed(file: h5py.File, at: str, one: Any) -> None:
    how = {"compression": "gzip", "chunks": True} if getattr(one, "shape", ()) else {}
    made = (
        file.require_group(at)
        if isinstance(one, h5py.Group)
        else file.create_dataset(at, data=one[()], **how)
    )
    made.attrs.update(one.attrs)


def same(a: keras.Model, b: keras.Model) -> None:
    for one, other in zip(a.get_weights(), b.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each array that Keras has made a tensor of, to assign it."""
    sizes: list[int] = []
    own = keras.Variable._convert_to_tensor

    def convert(self: Any, value: Any, dtype: Any = None) -> Any:
        sizes.append(int(np.prod(value.shape)) if hasattr(value, "shape") else 1)
        return own(self, value, dtype)

    monkeypatch.setattr(keras.Variable, "_convert_to_tensor", convert)
    monkeypatch.setattr(recipes.Draw, "block", None)
    monkeypatch.setattr(recipes, "CHUNK", 256)
    monkeypatch.setattr(keras_saving, "UNPACKED", 16)
    return sizes


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def in_scope(kind: str, path: Path) -> keras.Model:
    with kdist.scope(config(kind)):
        if path.suffix == ".keras":
            return keras.models.load_model(path)
        model = build()
        model.load_weights(path)
    return model


def before_compile(kind: str, path: Path) -> keras.Model:
    with kdist.scope(config(kind)):
        model = build()
    model.load_weights(path)
    return model


@pytest.mark.parametrize(
    ("load", "name"),
    [(load, name) for load in (in_scope, before_compile) for name in FILES],
)
@pytest.mark.parametrize("kind", ["level3", pytest.param("inner3", marks=pytest.mark.wide)])
def test_files_are_read_as_parts(
    kind: str, load: Callable, name: str, tmp_path: Path, converted: list[int]
) -> None:
    plain, path = saved(tmp_path, name)
    converted.clear()
    model = compiled(load(kind, path))
    entries = attached(model).entries.values()
    assert all(e.unborn is not None for e in entries)
    same(model, plain)
    assert not converted or max(converted) <= 16 * 64 // 4
    for entry in (e for e in entries if e.variable.trainable):
        largest = max(np.prod(part.target.shape) for part in entry.stored_parts())
        # Without a layout, devices of the inner axis have the same.
        ways = 2 if kind == "inner3" and entry.variable.ndim == 1 else 4
        assert largest <= -(-np.prod(entry.variable.shape) // ways) or largest == 1


@pytest.mark.parametrize(
    "kind", ["inner3", *(pytest.param(k, marks=pytest.mark.wide) for k in ("level3", "inner"))]
)
@pytest.mark.parametrize("name", FILES)
def test_files_are_read_as_parts_by_a_model_that_has_them(
    kind: str, name: str, tmp_path: Path, converted: list[int]
) -> None:
    plain, path = saved(tmp_path, name)
    model = compiled(kdist.parallelize(build(), config(kind)))
    assert np.abs(model.get_weights()[0] - plain.get_weights()[0]).max() > 0
    converted.clear()
    model.load_weights(path)
    cut = 64 if kind == "inner" else 16  # statistics are whole
    assert max(converted) <= max(16 * 64 // 4, cut)
    same(model, plain)


def test_a_model_goes_on_from_a_file_in_a_scope(tmp_path: Path) -> None:
    """Optimizer's state included, as a plain one does that is parallelized then."""
    x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    start = compiled(build())
    start.fit(x, x, verbose=0)
    start.save(tmp_path / "model.keras")
    plain = kdist.parallelize(keras.models.load_model(tmp_path / "model.keras"), config("level3"))
    with kdist.scope(config("level3")):
        model = keras.models.load_model(tmp_path / "model.keras")
    slots = [v for v in model.optimizer.variables if len(v.shape)]
    for variable in (*model.trainable_variables, *slots):
        assert isinstance(unborn(variable).recipe, recipes.Existing), variable.path
    histories = [
        one.fit(x, x, epochs=2, shuffle=False, verbose=0).history for one in (plain, model)
    ]
    assert histories[0] == histories[1]
    same(plain, model)
    for a, b in zip(plain.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_dtypes(tmp_path: Path) -> None:
    """Of a file in bfloat16, and of one in another format than the model."""

    def made(policy: str) -> keras.Model:
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(8, name=name, dtype=policy) for name in ("up", "down")]
        return keras.Sequential([keras.Input((16,)), *layers])

    for there, here in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")):
        plain = made(there)
        plain.save_weights(tmp_path / "w.weights.h5")
        expected = made(here)
        expected.load_weights(tmp_path / "w.weights.h5")
        with kdist.scope(config("inner")):
            model = made(here)
            model.load_weights(tmp_path / "w.weights.h5")
        assert str(model.weights[0].dtype) == here
        same(model, expected)


def test_arrays_that_are_assigned_are_as_they_were_then() -> None:
    with kdist.scope(config("inner")):
        model = build()
        weights = [w + 1 for w in build().get_weights()]
        expected = [w.copy() for w in weights]
        model.set_weights(weights)
        for w in weights:
            w *= 0
    for a, b in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="shape"):
        model.weights[0].assign(np.ones((2, 2)))


@pytest.mark.parametrize("kind", ["level3", "inner"])
def test_arrays_wait_until_the_model_is_compiled(kind: str) -> None:
    """Before, it is not known how the optimizer's level cuts them: each device would have all."""
    with kdist.scope(config(kind)):
        model = build()
    plain = build(seed=7)
    model.set_weights(plain.get_weights())
    assert all(e.unborn is not None for e in attached(model).entries.values())
    same(compiled(model), plain)
    for part in parts_of(model.get_layer("up").kernel):
        assert np.prod(part.target.shape) == 16 * 64 // 4
    model.set_weights(build(seed=8).get_weights())
    same(model, build(seed=8))
    with kdist.scope(config(kind)):
        model = build()
    compiled(model).set_weights(plain.get_weights())
    assert all(e.unborn is None for e in attached(model).entries.values())  # one at a time


def test_a_task_reads_its_weights_as_parts(tmp_path: Path, converted: list[int]) -> None:
    """`load_task_weights`, as KerasHub's tasks have it."""

    class Task(keras.Model):
        def load_task_weights(self, path: Path) -> None:
            keras.saving.load_weights(self, path)

    def task(seed: int) -> keras.Model:
        inner = build(seed)
        return Task(inner.inputs, inner.outputs)

    task(7).save_weights(tmp_path / "task.weights.h5")
    model = compiled(kdist.parallelize(task(1), config("inner3")))
    converted.clear()
    model.load_task_weights(tmp_path / "task.weights.h5")
    same(model, task(7))
    assert max(converted) <= 16 * 64 // 4
    assert not hasattr(kdist.parallelize(build(), config("inner")), "load_task_weights")


def test_what_layers_make_of_a_file_is_an_array() -> None:
    """A copy of `np.memmap` is still of that class, and lies in no file."""
    mapped = np.memmap(__file__, np.uint8, "r")[:16]
    copy = mapped.copy()
    assert recipes.is_mapped(mapped) and recipes.is_mapped(mapped.reshape(4, 4))
    assert not recipes.is_mapped(copy) and not recipes.is_mapped(np.asarray(mapped))
    with kdist.scope(config("inner")):
        model = build()
        model.weights[1].assign(np.resize(copy, 64))
        copy[:] = 0
    np.testing.assert_array_equal(model.weights[1].numpy(), np.resize(mapped, 64))


def test_a_file_is_saved_over_by_what_it_holds(tmp_path: Path) -> None:
    plain, path = saved(tmp_path, "w.weights.h5")
    model = before_compile("level3", path)
    model.save_weights(path)
    same(model, plain)
    same(before_compile("inner", path), plain)


def test_a_file_that_changes_before_it_is_read(tmp_path: Path) -> None:
    _, path = saved(tmp_path, "w.weights.h5")
    model = before_compile("level3", path)
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ValueError, match="file of weights changed"):
        model.get_weights()
    with pytest.raises(ValueError, match="file of weights changed"):
        model.get_weights()
    plain, path = saved(tmp_path, "w.weights.h5")
    model.load_weights(path)
    other, moved = saved(tmp_path, "other.weights.h5")
    os.replace(moved, path)  # the file that was loaded stays, without a name
    same(model, plain)


def test_what_is_unborn_holds_no_memory(tmp_path: Path) -> None:
    _, path = saved(tmp_path, "w.weights.h5")
    model = before_compile("level3", path)
    found = [e.unborn.recipe for e in attached(model).entries.values() if e.unborn is not None]
    given = [one for one in found if isinstance(one, recipes.Existing)]
    assert given and all(isinstance(one.values, np.memmap) for one in given)
