"""The file that a benchmark leaves: what was measured, on which machine, when, of which commit.

Runs that are kept are `benchmarks/results/NAME.json`, tracked: figures in docs are
taken from them. Other runs go to `benchmarks/results/scratch/`, which is not.
"""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "results"


def save(
    name: str,
    settings: Mapping[str, Any],
    rows: Any,
    *,
    keep: bool = False,
    out: str = "",
    **more: Any,
) -> Path:
    """Writes a run.

    Args:
        name: Of the benchmark.
        settings: What the run was started with.
        rows: What was measured; times in seconds, in the form of `spread_of`.
        keep: Write the tracked file of this benchmark instead of a scratch file.
        out: A file to write instead of both.
        **more: Further entries of the file.

    Returns:
        The file.
    """
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    record = {
        "name": name,
        "date": date,
        "commit": _commit(),
        "machine": machine(),
        "versions": {one: _version(one) for one in ("tensorflow", "keras", "jax", "numpy")},
        "settings": dict(settings),
        "rows": rows,
        **more,
    }
    scratch = FOLDER / "scratch" / f"{name}_{date.replace(':', '')}.json"
    path = Path(out) if out else FOLDER / f"{name}.json" if keep else scratch
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of some measurements, and how many there are."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {**found, "count": len(values)}


def machine() -> dict[str, Any]:
    """What ran: processor, cores that this process may use, memory, system."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages * size / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _commit() -> str:
    """The commit of the checkout; "+" where files differ from it."""
    commands = (["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain"])
    done = [
        subprocess.run(one, cwd=FOLDER.parent, capture_output=True, text=True) for one in commands
    ]
    if done[0].returncode:
        return "unknown"
    return done[0].stdout.strip() + ("+" if done[1].stdout.strip() else "")
