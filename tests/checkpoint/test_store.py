"""Arrays in files: any box of what was written in any boxes; damage is named."""

import dataclasses
import math

from kdist.checkpoint import store
from kdist.checkpoint.manifest import STORE, CheckpointError, DamagedError, SavedArray, SavedPart

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .runs import bytes_read

DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "uint32", "uint16", "int8", "bool"]


def cut(draw, shape):
    """Disjoint boxes that tile a shape, by one cut of each dim at most."""
    bounds = [sorted({0, draw(st.integers(0, n)), n}) for n in shape]
    spans = [list(zip(b, b[1:])) or [(0, 0)] for b in bounds]
    boxes = [[]]
    for of_dim in spans:
        boxes = [[*box, span] for box in boxes for span in of_dim]
    return [tuple(slice(a, b) for a, b in box) for box in boxes]


@st.composite
def arrays(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    dtype = store.dtype_of(draw(st.sampled_from(DTYPES)))
    values = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    box = tuple(slice(*sorted(draw(st.tuples(*[st.integers(0, n)] * 2)))) for n in shape)
    return values, cut(draw, shape), box


def write(folder, name, values, boxes):
    """Writes an array in parts; what a manifest would say of it."""
    parts = [
        SavedPart(f"{name}/{n}", tuple(s.start for s in box), values[box].shape)
        for n, box in enumerate(boxes)
    ]
    store.write(folder, [(part, values[part.box].copy()) for part in parts])
    return SavedArray(name, values.shape, values.dtype.name, tuple(parts))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arrays())
def test_any_box_of_an_array_that_was_written_in_boxes(tmp_path_factory, case):
    values, boxes, box = case
    folder = tmp_path_factory.mktemp("arrays")
    array = write(folder, "one", values, boxes)
    reader = store.Reader(folder)
    found = reader.read(array, box)
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values[box])
    np.testing.assert_array_equal(reader.read(array), values)


@given(st.lists(st.integers(0, 5000), max_size=4), st.sampled_from([1, 2, 4, 8]))
def test_chunks_are_within_the_limit(shape, itemsize):
    chunk = store.chunk_shape(shape, itemsize, limit=1 << 10)
    assert len(chunk) == len(shape)
    assert math.prod(chunk) * itemsize <= 1 << 10
    assert all(1 <= c <= max(n, 1) for c, n in zip(chunk, shape))


def test_chunks_are_as_large_as_they_may_be():
    assert store.chunk_shape((4096, 4096), 4) == [1024, 4096]
    assert store.chunk_shape((8, 3000, 5000), 4, limit=1 << 20) == [1, 52, 5000]
    assert store.chunk_shape((), 8) == []


def test_a_part_is_read_without_the_rest(tmp_path):
    values = np.random.default_rng(0).normal(size=(64, 1 << 15))  # 16 MiB
    array = write(
        tmp_path,
        "one",
        values,
        [(slice(0, 32), slice(0, 1 << 15)), (slice(32, 64), slice(0, 1 << 15))],
    )
    before = bytes_read()
    store.Reader(tmp_path).read(array, (slice(0, 32), slice(0, 1 << 15)))
    half = bytes_read() - before
    assert values.nbytes // 2 <= half < values.nbytes * 0.52


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("how", ["flipped", "cut short", "missing"])
def test_damage_names_the_array(tmp_path, how, compression):
    values = np.random.default_rng(0).normal(size=(300, 300))
    part = SavedPart("model/0/0", (0, 0), values.shape)
    store.write(tmp_path, [(part, values)], compression)
    array = SavedArray("dense/kernel", values.shape, "float64", (part,))
    largest = max((tmp_path / STORE).rglob("*"), key=lambda f: f.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    if how == "flipped":
        largest.write_bytes(content)
    elif how == "cut short":
        largest.write_bytes(content[: len(content) // 2])
    else:
        largest.unlink()
    with pytest.raises(DamagedError, match="'dense/kernel'.*cannot be read"):
        store.Reader(tmp_path).read(array)


def test_a_box_that_no_part_meets_is_damage(tmp_path):
    values = np.arange(12.0).reshape(6, 2)
    array = write(tmp_path, "table", values, [(slice(0, 4), slice(0, 2))])
    array = dataclasses.replace(array, shape=values.shape)
    reader = store.Reader(tmp_path)
    with pytest.raises(DamagedError, match="'table'.*no part of it"):
        reader.read(array, (slice(4, 6), slice(0, 2)))
    assert reader.read(array, (slice(6, 6), slice(0, 2))).shape == (0, 2)
    nothing = dataclasses.replace(array, parts=())
    with pytest.raises(DamagedError, match="'table'.*no part of it"):
        reader.read(nothing)


def test_all_arrays_are_one_commit(tmp_path):
    """Each in a commit of its own would be over a thousand files, and no atomic transaction."""
    parts = [(SavedPart(f"model/{n}/0", (0,), (50,)), np.zeros(50)) for n in range(100)]
    store.write(tmp_path, parts)
    assert len([f for f in (tmp_path / STORE).rglob("*") if f.is_file()]) <= 3


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / STORE).write_text("a file in the place of the folder")
    with pytest.raises(CheckpointError, match="Cannot write arrays"):
        write(tmp_path, "one", np.zeros(3), [(slice(0, 3),)])


@pytest.mark.parametrize("name", ["run #1", "lr=1e-3?x=1", "a|b", "100%", "50%25", "a%2Fb"])
def test_a_folder_of_any_name_holds_its_arrays(tmp_path, name):
    """In the address that TensorStore could be given some characters mean something else."""
    folder = tmp_path / name
    folder.mkdir()
    array = write(folder, "one", np.arange(3.0), [(slice(0, 3),)])
    assert [one.name for one in tmp_path.iterdir()] == [name]
    moved = folder.rename(tmp_path / "elsewhere")
    np.testing.assert_array_equal(store.Reader(moved).read(array), np.arange(3.0))
