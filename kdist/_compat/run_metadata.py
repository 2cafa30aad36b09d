"""TensorFlow internals that tell what a call executed; see `kdist.graphs.executed`.

TensorFlow 2.21 has no public way to do this; `tests/graphs/test_executed.py` fails by name when
one of these moves.

- `Context.enable_run_metadata`, `export_run_metadata`, `disable_run_metadata`,
  `disable_graph_collection`: the partition graphs of functions whose first call happens in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow.python.eager import context


def function_graphs(call: Callable[[], Any]) -> list[Any]:
    """Runs `call`; returns `RunMetadata.FunctionGraphs` of the functions it was first to run."""
    running = context.context()
    running.enable_run_metadata()
    # TensorFlow hands out what it collected before, too.
    running.export_run_metadata()
    try:
        call()
    finally:
        metadata = running.export_run_metadata()
        running.disable_run_metadata()
        # Without this, TensorFlow goes on to collect the graphs of all that runs later.
        running.disable_graph_collection()
    return list(metadata.function_graphs)
