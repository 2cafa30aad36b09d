"""docs/pipeline.md: its examples run, its charts are those that kdist draws."""

from __future__ import annotations

import re
from pathlib import Path

from kdist.pipeline import read_csv

import pytest

from .schedules import build

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("code", [text for kind, text in BLOCKS if kind == "python"])
def test_examples_run(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/pipeline.md", "exec"), {})
    assert "stage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shape", "width"),
    [
        (("gpipe", 4, 8), 120),
        (("1f1b", 4, 8), 120),
        (("interleaved", 4, 4, 2), 160),
        (("zero_bubble", 4, 8), 120),
    ],
)
def test_charts(shape, width):
    assert build(*shape).chart().text(width) + "\n" in [text for _, text in BLOCKS]


def test_the_file_of_the_page(tmp_path):
    (text,) = [text for _, text in BLOCKS if "1B0,1F1" in text]
    path = tmp_path / "page.csv"
    path.write_text(text)
    assert read_csv(path) == build("1f1b", 2, 2)
