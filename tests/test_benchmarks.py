"""The benchmarks start as their pages say: from any folder, as programs of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
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
    for name in ("benchmark_paths", "example_flags", "gpt_model", "step_configurations"):
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
