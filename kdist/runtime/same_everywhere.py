"""Which datasets have the same elements in every process, and are small enough to be sent there."""

from __future__ import annotations

from typing import Any

from kdist.runtime import drawing
from kdist.runtime.drawing import StaysWithProcess0

import tensorflow as tf

LARGE_BYTES = 16 << 20
"""Of arrays in a dataset, which every process would be sent whole."""
FILES = ("CacheDataset", "CacheDatasetV2", "SnapshotDataset", "SnapshotDatasetV2")


def check_elements(dataset: tf.data.Dataset) -> None:
    """Refuses elements that are not put together from rows, and an order that is not known.

    Raises:
        StaysWithProcess0: A dataset has them.
    """
    if not all(isinstance(one, tf.TensorSpec) for one in tf.nest.flatten(dataset.element_spec)):
        raise StaysWithProcess0("its elements are not dense tensors alone")
    if dataset.options().deterministic is False:
        raise StaysWithProcess0("deterministic=False, and its order is not the same twice")


def check_operations(graph: Any) -> None:
    """Refuses what differs between processes.

    Raises:
        StaysWithProcess0: A graph has such operations, or is large.
    """
    if (size := graph.ByteSize()) > LARGE_BYTES:
        raise StaysWithProcess0(f"it has arrays of {size >> 20} MiB in it")
    inside = [node for one in graph.library.function for node in one.node_def]
    for node in (*graph.node, *inside):
        # Reading an attribute that is not there would make it.
        if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
            raise StaysWithProcess0("deterministic=False, and its order is not the same twice")
    nodes = {node.name: node for node in graph.node}
    for node in graph.node:
        inputs = [nodes[drawing.source(name)] for name in node.input]
        if node.op in FILES and drawing.scalar(inputs[1]) != b"":
            raise StaysWithProcess0(f"{node.op} writes a file, and processes may share a disk")
        at = drawing.WITHOUT.get(node.op)
        if at is not None and not any(drawing.scalar(one) for one in inputs[at : at + 2]):
            raise StaysWithProcess0(f"{node.op} draws without a seed; give it one")
