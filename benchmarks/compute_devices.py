"""Which devices really compute a step, read from the graphs that TensorFlow executed.

Losses stay right when all the work silently runs on the first device, and so do step times look
good: a number for a mesh means something only beside this.
"""

import re
from collections.abc import Callable
from typing import Any

# A call is a whole forward or backward pass; the others are where one is inlined. Reading, moving
# and updating variables has none of them.
_COMPUTE = re.compile(r"(Stateful)?PartitionedCall|.*MatMul.*|.*Einsum.*|.*Conv2D.*")


def compute_devices(step: Callable[[], Any]) -> set[int]:
    """Runs a step and returns the numbers of the devices that computed in it.

    Args:
        step: runs one training step. It must not have run before: TensorFlow only reports functions
            whose first call it watches.

    Returns:
        The index of each device with a call of a function, a matrix product or a convolution.
    """
    from tensorflow.python.eager import context

    running = context.context()
    running.enable_run_metadata()
    try:
        step()
        metadata = running.export_run_metadata()
    finally:
        running.disable_run_metadata()
    found = set()
    for graphs in metadata.function_graphs:
        for graph in graphs.partition_graphs:
            for node in graph.node:
                if node.device and _COMPUTE.fullmatch(node.op):
                    found.add(int(node.device.rpartition(":")[2]))
    return found
