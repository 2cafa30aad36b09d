"""Which devices really compute a step, read from the graphs that TensorFlow executed.

Losses stay right when all the work silently runs on the first device, and so do step times look
good: a number for a mesh means something only beside this.

Import it after the row is set up: it imports kdist, which plain rows measure without.
"""

from collections.abc import Callable
from typing import Any

from kdist.graphs import executed
from kdist.sharding.device import Device


def compute_devices(step: Callable[[], Any]) -> set[int]:
    """Runs a step and returns the numbers of the devices that computed in it.

    Args:
        step: runs one training step. It must not have run before: TensorFlow only reports functions
            whose first call it watches.

    Returns:
        The index of each device with a matrix product or a convolution.
    """
    found = executed.computing_devices(executed.watch(step))
    return {Device.parse(name).index for name in found}
