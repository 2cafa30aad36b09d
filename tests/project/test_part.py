"""`--part i/n`: every selected test is in exactly one part, and parts are of one size."""

from __future__ import annotations

import argparse

import pytest

from ..part import Part


@pytest.mark.parametrize("size", [0, 1, 7, 12])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_parts_are_the_whole(size: int, count: int) -> None:
    items = list(range(size))
    parts = [Part(i + 1, count) for i in range(count)]
    assert sorted(item for part in parts for item in part.of(items)) == items
    sizes = [len(part.of(items)) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    for part in parts:
        assert sorted([*part.of(items), *part.rest(items)]) == items


def test_a_part_is_read() -> None:
    assert Part.parse("2/3") == Part(2, 3)


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "/3", "2/", "-1/3", "1/0", "a/b", "1/2/3", ""])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"i/n.*Received: --part {text}$"):
        Part.parse(text)
