"""Starts the processes of a group and collects what they print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kdist.comm.processes import local_addresses

FOLDER = Path(__file__).resolve().parent
LIMIT_SECONDS = 120


def run(scenario: str, count: int, may_die: tuple[int, ...] = ()) -> list[Any]:
    """Runs a function of `member.py` in several processes.

    Args:
        scenario: its name.
        count: number of processes.
        may_die: indices of those that need not end well.

    Returns:
        What each returned; None of those that died.
    """
    addresses = json.dumps(local_addresses(count))
    command = [sys.executable, str(FOLDER / "member.py"), scenario]
    processes = [
        subprocess.Popen(
            [*command, str(index), addresses],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    results = []
    for index, (process, (out, err)) in enumerate(zip(processes, outputs)):
        if index in may_die and process.returncode:
            results.append(None)
            continue
        assert process.returncode == 0, f"process {index} of {scenario}:\n{err[-3000:]}"
        results.append(json.loads(out.strip().splitlines()[-1]))
    return results
