"""Training callbacks of kdist, imported as `kdist.callbacks`."""

from kdist.callbacks.comm_fusion import CommFusion

__all__ = ["CommFusion"]
