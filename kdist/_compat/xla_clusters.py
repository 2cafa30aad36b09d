"""Which operations XLA compiles where a function as a whole is not for it.

`tf.function(jit_compile=True)` takes functions of one device. In one of several, TensorFlow's pass
that forms clusters compiles what is marked, device by device, and leaves out what XLA does not
know. `tf.xla.experimental.jit_scope` sets the same two attributes on operations that Python makes;
those of an imported program get them here. `tests/_compat/test_xla_clusters.py` fails when they
mean nothing.
"""

from __future__ import annotations

from typing import Any


def mark(node: Any, scope: str) -> None:
    """Marks a `NodeDef` for XLA.

    Args:
        node: It.
        scope: Operations of one scope may become one cluster.
    """
    node.attr["_XlaCompile"].b = True
    node.attr["_XlaScope"].s = scope.encode()
