"""The rectangles in a picture of layouts have the areas of the bytes of devices."""

from __future__ import annotations

import math
from pathlib import Path

import kdist
from kdist.plan import layouts_png
from kdist.plan.layout_cells import Box, LayoutCell, LayoutRow, columns, rows
from kdist.plan.plan import Plan

import keras
import pytest

WHOLE: Box = (0.0, 0.0, 1.0, 1.0)
CUTS = {
    "tokens/embeddings": (None, "model"),
    ".*up/kernel": (None, "model"),
    ".*down/kernel": ("model", None),
}


def _blocks(count: int = 3) -> keras.Model:
    inputs = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(16, 8, name="tokens")(inputs)
    for i in range(count):
        h = keras.layers.Dense(16, "relu", use_bias=False, name=f"block_{i}_up")(x)
        h = keras.layers.Dense(8, name=f"block_{i}_down")(h)
        x = keras.layers.Add(name=f"block_{i}_add")([x, h])
    return keras.Model(inputs, keras.layers.Dense(5, name="head")(x))


def _plan(level: int = 0, on_host: bool = False, **axes: int) -> Plan:
    model = _blocks()
    cuts = {}
    if "model" in axes:
        cuts = {k: dims for k, dims in CUTS.items() if not (on_host and "tokens" in k)}
    if on_host:
        kdist.place(model.get_layer("tokens"))
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=cuts,
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
        pipeline=kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None,
    )
    kdist.parallelize(model, config).compile("adam", "mse")
    return model.plan()


def _area(boxes: tuple[Box, ...]) -> float:
    return sum(width * height for *_, width, height in boxes)


def _row(found: list[LayoutRow], name: str) -> LayoutRow:
    return next(row for row in found if row.name == name)


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize(
    "axes",
    [{"data": 4}, {"data": 2, "model": 2}, {"pipe": 2, "data": 2, "model": 2}],
    ids=["data4", "data2_model2", "pipe2_data2_model2"],
)
def test_areas_are_the_bytes_of_devices(axes: dict[str, int], level: int) -> None:
    plan = _plan(level, **axes)
    found = rows(plan)
    assert sum(row.count for row in found) == len(plan.weights)
    for d, device in enumerate(plan.devices()):
        parts = [(row.nbytes, row.cells[d]) for row in found]
        stored = sum(nbytes * _area(cell.stored) for nbytes, cell in parts)
        updated = sum(nbytes * _area(cell.updated) for nbytes, cell in parts)
        assert math.isclose(stored, device.parameter_bytes)
        assert math.isclose(updated, device.updated_bytes)


def test_where_parts_are() -> None:
    found = rows(_plan(3, data=2, model=2))
    up = _row(found, "block_{0-2}_up/kernel")
    assert (up.shape, up.count) == ((8, 16), 3)
    quarters = [(x, y, 0.5, 0.5) for y in (0.0, 0.5) for x in (0.0, 0.5)]
    assert up.cells == tuple(LayoutCell(stored=(box,), updated=(box,)) for box in quarters)
    down = _row(found, "block_{0-2}_down/kernel")
    assert sorted(cell.stored[0][1] for cell in down.cells) == [0.0, 0.25, 0.5, 0.75]


def test_what_a_device_has_nothing_of() -> None:
    plan = _plan(pipe=2, data=2)
    tokens = _row(rows(plan), "tokens/embeddings")
    assert [cell.stored for cell in tokens.cells] == [(WHOLE,), (WHOLE,), (), ()]
    assert [at.split("\n") for _, at in columns(plan)] == [
        [f"stage {s}", f"replica {r}"] for s in (0, 1) for r in (0, 1)
    ]


def test_what_is_on_the_host() -> None:
    plan = _plan(on_host=True, data=2, model=2)
    assert columns(plan)[-1] == ("host", "")
    assert columns(plan)[1] == ("CPU:1", "replica 0\nmodel 1")
    tokens = _row(rows(plan), "tokens/embeddings")
    assert [bool(cell.stored) for cell in tokens.cells] == [False] * 4 + [True]
    assert [bool(cell.updated) for cell in tokens.cells] == [False] * 4 + [True]


def test_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(1, data=2, model=2)
    plan.save_layouts(tmp_path / "all.png", "a title")
    monkeypatch.setattr(layouts_png, "MOST_ROWS", 3)
    plan.save_layouts(tmp_path / "some.png")
    heights = []
    for name in ("all.png", "some.png"):
        header = (tmp_path / name).read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        heights.append(int.from_bytes(header[20:24], "big"))
    assert heights[0] > heights[1] > 100
