"""The benchmarks start as their pages say: from any folder, as programs of their own."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAMS = sorted(
    path for path in FOLDER.glob("*.py") if 'if __name__ == "__main__":' in path.read_text()
)
# One process for all: importing TensorFlow is what takes time.
IMPORT_EACH = """
import runpy, sys
from absl import flags
own = list(sys.path)
for program in sys.argv[1:]:
    sys.path[:] = [program.rpartition("/")[0], *own]
    own_modules = ("benchmark_paths", "example_flags", "gpt_model", "results_file")
    for name in (*own_modules, "step_configurations"):
        sys.modules.pop(name, None)
    for name in list(flags.FLAGS):
        if flags.FLAGS.find_module_defining_flag(name) in ("imported", "example_flags"):
            delattr(flags.FLAGS, name)
    runpy.run_path(program, run_name="imported")
"""


def test_every_benchmark_finds_what_it_imports(tmp_path):
    assert len(PROGRAMS) >= 6
    command = [sys.executable, "-c", IMPORT_EACH, *map(str, PROGRAMS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_results_say_what_ran_where_and_when(tmp_path):
    results = runpy.run_path(str(FOLDER / "results_file.py"))
    rows = {"plain": results["spread_of"]([3.0, 1.0, 2.0])}
    path = results["save"]("some", {"rounds": 3}, rows, out=str(tmp_path / "some.json"))
    found = json.loads(path.read_text())
    assert found["rows"] == {"plain": {"median": 2.0, "min": 1.0, "max": 3.0, "count": 3}}
    assert found["settings"] == {"rounds": 3}
    assert {"name", "date", "commit", "machine", "versions"} <= set(found)
    assert {"processor", "cores", "memory_gb", "system", "python"} == set(found["machine"])
    assert found["versions"]["tensorflow"] and found["versions"]["keras"]


def test_kept_results_are_tracked_and_others_are_not():
    for path, ignored in (("results/step_time.json", 1), ("results/scratch/step_time.json", 0)):
        done = subprocess.run(["git", "check-ignore", "-q", path], cwd=FOLDER)
        assert done.returncode == ignored


def test_no_program_hides_a_module_of_the_standard_library():
    """Their folders are on `sys.path`, of tests too: `compression` is a package of Python 3.14."""
    later = {"compression", "annotationlib"}
    names = {
        path.stem for folder in (FOLDER, FOLDER.parent / "examples") for path in folder.iterdir()
    }
    assert not names & (set(sys.stdlib_module_names) | later)
