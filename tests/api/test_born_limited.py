"""Models born as shards, in processes that may not have the memory for a second copy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdist.storage import recipes

import pytest

from ..memory_group import memory_group

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["addresses", "group"])
def group(request: pytest.FixtureRequest) -> Iterator[Path | None]:
    """What limits memory: a control group, or None for a limit of addresses."""
    if request.param == "addresses":
        yield None
        return
    with memory_group() as found:
        if found is None:
            pytest.skip("needs the right to make a control group of memory")
        yield found


def run(
    what: str, folder: Path, group: Path | None = None, pool: bool = False
) -> tuple[int, list[dict[str, Any]], str]:
    """How a process ended, and what it said.

    Args:
        what: It does.
        folder: For its files.
        group: See `group`.
        pool: Whether TensorFlow keeps a pool of memory, as it does with oneDNN.
    """
    given = [sys.executable, str(Path(__file__).with_name("born_limited.py")), what, str(folder)]
    given += [] if group is None else [str(group)]
    # So that what is freed is given back, and the limit is one of what is in use.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(256 << 10)}
    # A pool takes addresses by powers of two, and gives none back.
    quiet["TF_ENABLE_ONEDNN_OPTS"] = str(int(pool))
    done = subprocess.run(
        given,
        env={**os.environ, **quiet, **malloc},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, lines, done.stdout + done.stderr


def after_limit(lines: list[dict[str, Any]]) -> list[str]:
    said = [line["what"] for line in lines]
    return said[said.index("limit") + 1 :]


def test_a_large_weight_is_born_within_a_quarter_more(tmp_path: Path, group: Path | None) -> None:
    code, lines, text = run("born-build", tmp_path, group)
    assert code == 0 and after_limit(lines) == ["built"], text
    limit, built = lines[-2:]
    # All parts, and a few chunks: what is drawn, scaled, and cut.
    assert built["peak"] - limit["base"] <= limit["needed"] + 5 * (recipes.CHUNK >> 20)


def test_a_plain_build_dies_there(tmp_path: Path, group: Path | None) -> None:
    code, lines, text = run("plain-build", tmp_path, group)
    assert code != 0 and after_limit(lines) == [], text


def test_a_step_and_a_checkpoint_within_a_quarter_more(tmp_path: Path, group: Path | None) -> None:
    code, lines, text = run("born-train", tmp_path, group)
    assert code == 0 and after_limit(lines) == ["trained", "saved", "restored"], text


def test_of_a_pool_no_more_is_in_use(tmp_path: Path) -> None:
    """By the pool's own count; a second copy is seen in it."""
    used = {}
    for kind in ("pooled", "pooledcopied"):
        code, lines, text = run(f"{kind}-train", tmp_path, pool=True)
        assert code == 0, text
        used[kind], allowed = lines[-1]["used"], lines[-1]["allowed"]
        if used[kind] is None:
            pytest.skip("This build of TensorFlow has no such pool")
    assert used["pooled"] <= allowed < used["pooledcopied"]


def test_a_second_copy_dies_there(tmp_path: Path, group: Path | None) -> None:
    code, lines, text = run("copied-train", tmp_path, group)
    assert code != 0 and after_limit(lines) != ["trained", "saved", "restored"], text


def test_a_large_file_is_read_by_parts(tmp_path: Path) -> None:
    """With no more memory than the parts of its largest weight, and one of them once more."""
    assert run("file-write", tmp_path)[0] == 0
    for kind in ("", "_keras", "_gzip"):
        for where in ("inside", "after"):
            code, lines, text = run(f"file-{where}{kind}", tmp_path)
            assert code == 0 and after_limit(lines) == ["loaded", "same"], text
        code, lines, text = run(f"file-whole{kind}", tmp_path)
        assert code != 0 and after_limit(lines) == [], text
    code, lines, text = run("file-before", tmp_path)
    assert code == 0 and after_limit(lines) == ["loaded", "same"], text
