"""Puts the folder of the examples on the path: benchmarks train their models. Import it first."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
