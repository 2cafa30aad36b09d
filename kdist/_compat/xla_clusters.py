"""Which operations XLA compiles, and where a function as a whole is not for it.

`tf.function(jit_compile=True)` takes functions of one device. In one of several, TensorFlow's pass
that forms clusters compiles what is marked, device by device, and leaves out what XLA does not
know. `tf.xla.experimental.jit_scope` sets the same two attributes on operations that Python makes;
those of an imported program get them here. `tests/_compat/test_xla_clusters.py` fails when they
mean nothing.
"""

from __future__ import annotations

import functools
from typing import Any

from tensorflow.python.util import pywrap_xla_ops

MUST_COMPILE = "_XlaMustCompile"
"""Of a function with `jit_compile=True`, and of its calls: these lead to XLA."""
NEVER_RUN = {"Placeholder"}
"""Arguments of a traced function."""


@functools.cache
def known_operations() -> frozenset[str]:
    """Types of the operations that XLA has kernels for.

    Without a GPU, TensorFlow forgets those for GPUs with its first operation.
    """
    kernels = pywrap_xla_ops.get_gpu_kernel_names() or pywrap_xla_ops.get_cpu_kernel_names()
    return frozenset(kernels)


def not_compiled(graph: Any) -> list[str]:
    """Operations that XLA lacks, in a traced function and what it calls: type and name of each.

    Args:
        graph: Its graph.
    """
    definition = graph.as_graph_def()
    nodes, library = [*definition.node], definition.library.function
    for function in library:
        nodes += function.node_def
    known = {*known_operations(), *NEVER_RUN, *(one.signature.name for one in library)}
    found = {node.op: node.name for node in nodes if node.op not in known}
    return [f"{op} ({name})" for op, name in found.items()]


def mark(node: Any, scope: str) -> None:
    """Marks a `NodeDef` for XLA.

    Args:
        node: It.
        scope: Operations of one scope may become one cluster.
    """
    node.attr["_XlaCompile"].b = True
    node.attr["_XlaScope"].s = scope.encode()


def stays_a_call(node: Any) -> None:
    """Has a call that XLA compiles stay one, in a `NodeDef` whose results perhaps nothing reads.

    If others only wait for it, TensorFlow's optimizer makes a NoOp of it, and leaves it the mark:
    then XLA looks for a function of that name. Of a stateful call it makes none.
    """
    if node.op == "PartitionedCall" and MUST_COMPILE in node.attr and node.attr[MUST_COMPILE].b:
        node.op = "StatefulPartitionedCall"
