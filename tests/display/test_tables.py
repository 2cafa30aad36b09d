"""Tables fit the terminal, and cut no name short."""

from __future__ import annotations

import io

import kdist
from kdist.display.tables import Column, as_text, number, readable, table

import keras
import pytest
from rich.console import Console

LONG = "block_0_attention/attention_output/kernel"


def shown(title: str, columns: list[Column], rows: list[tuple[str, ...]], width: int) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width).print(table(title, columns, rows, width))
    return text.getvalue().splitlines()


def test_what_has_room_stands_in_columns() -> None:
    columns = [Column("weight"), number("bytes")]
    lines = shown("cuts", columns, [(LONG, "64"), ("[bold]", "1024")], 60)
    assert lines[0].strip() == "cuts"
    assert lines[1].split() == ["weight", "bytes"]
    assert [line.split() for line in lines[3:]] == [[LONG, "64"], ["[bold]", "1024"]]


def test_what_has_none_stands_below_its_name() -> None:
    columns = [Column("weight"), Column("why", prose=True), number("bytes")]
    lines = shown("cuts", columns, [(LONG, "it is so", "64")], 50)
    assert lines == ["cuts", LONG, "    why it is so; bytes 64"]


def test_sentences_go_on_in_the_next_line() -> None:
    columns = [Column("weight"), Column("why", prose=True)]
    lines = shown("cuts", columns, [("up", "a sentence of more words than one line has")], 32)
    assert max(map(len, lines)) <= 32
    assert " ".join(word for line in lines[3:] for word in line.split()) == (
        "up a sentence of more words than one line has"
    )


def test_a_table_as_text(monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    columns = [Column("weight"), number("bytes")]
    lines = as_text(columns, [("block[red]x", "64")], total=("total", "64")).split("\n")
    assert [line.split() for line in lines if line and "─" not in line] == [
        ["weight", "bytes"],
        ["block[red]x", "64"],
        ["total", "64"],
    ]
    assert all(line == line.rstrip() for line in lines)


def plan_texts(axes: dict[str, int], level: int, width: int) -> tuple[keras.Model, str]:
    keras.utils.set_random_seed(0)
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(32, 16, name="token_embedding")(tokens)
    for n in range(4):
        block = f"transformer_layer_{n}_of_the_backbone"
        made = keras.layers.MultiHeadAttention(2, 8, name=f"{block}_self_attention")(x, x)
        x = keras.layers.Add()([x, made])
    model = keras.Model(tokens, keras.layers.Dense(4, name="head")(x))
    cuts = {".*(query|key|value)/kernel": (None, "model", None)} if "model" in axes else None
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=cuts,
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=0),
        pipeline=kdist.PipelineConfig(micro_batches=2) if "pipe" in axes else None,
        compression=None if "pipe" in axes else kdist.CompressionConfig(rest="bf16"),
    )
    kdist.parallelize(model, config)
    model.compile("adam", "mse")
    text = io.StringIO()
    model.plan().summary(Console(file=text, width=width))
    return model, text.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    ("axes", "level"),
    [({"data": 4}, 1), ({"data": 2, "model": 2}, 1), ({"pipe": 2, "data": 2, "model": 2}, 0)],
    ids=["data", "data x model", "pipe x data x model"],
)
def test_a_plan_is_whole_at_usual_widths(axes: dict[str, int], level: int, width: int) -> None:
    model, text = plan_texts(axes, level, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for weight in model.plan().weights:
        if not weight.is_whole or level:
            assert weight.path in text.split(), weight.path


def test_devices_of_several_stages_differ_by_stage_or_replica() -> None:
    model, text = plan_texts({"pipe": 2, "data": 2}, 0, 80)
    lines = [line.split() for line in text.splitlines()]
    (head,) = [line for line in lines if line[:1] == ["device"]]
    assert head[1:3] == ["stage", "replica"]
    places = [line[:3] for line in lines if line and line[0].startswith("/device:")]
    where = [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    devices = model.plan().topology.devices
    assert places == [[device, *at] for device, at in zip(devices, where, strict=True)]


def test_a_plan_prints_as_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = plan_texts({"data": 2}, 0, 80)
    model.plan().summary()
    assert str(model.plan()) == capsys.readouterr().out.rstrip()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KB"), (2**20, "1.0 MB"), (5 * 2**40, "5120.0 GB")],
)
def test_readable_bytes(nbytes: int, text: str) -> None:
    assert readable(nbytes) == text


@pytest.mark.parametrize("width", range(44, 100))
def test_no_name_is_cut_short_at_any_width(width: int) -> None:
    columns = [Column("weight"), number("bytes"), Column("why", prose=True), number("of")]
    rows = [(LONG, "12.5 KB", "it is smaller than what is worth it", "1024.5 KB")]
    lines = shown("cuts", columns, rows, width)
    assert max(map(len, lines)) <= width
    assert {LONG, "12.5", "1024.5", "worth"} <= set(" ".join(lines).replace(";", " ").split())
