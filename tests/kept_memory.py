"""What is kept of the models of tests, and how it is given back.

`tf.custom_gradient` in a graph registers its gradient under a new name, for ever, and with it the
graph and the model that was traced. Keras uses it in every training step: some 8 MB for a small
model, 9 GB at the end of a run of all tests. A public way to take a name back does not exist.
"""

from __future__ import annotations

import contextlib
import ctypes

from tensorflow.python.framework import ops

_PREFIX = "CustomGradient-"


def registered() -> frozenset[str]:
    """Names of gradients that `tf.custom_gradient` has registered."""
    return frozenset(name for name in ops.gradient_registry._registry if name.startswith(_PREFIX))


def forget(names: frozenset[str]) -> None:
    """Takes gradients back: what was traced with them runs on, and is not differentiated again."""
    for name in names:
        ops.gradient_registry._registry.pop(name, None)


def give_back() -> None:
    """Gives freed memory back to the machine, where the C library can."""
    with contextlib.suppress(AttributeError, OSError):  # none on other systems
        ctypes.CDLL(None).malloc_trim(0)
