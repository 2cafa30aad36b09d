"""What DTensor cannot run, and what it cannot run on parts of a weight.

Found by running every layer and 60 operations of Keras forward and backward under DTensor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

# Layers whose operations DTensor cannot run on a part of a weight: convolutions want whole
# filters (depthwise ones fail only when they run, which breaks the process), recurrent cells split
# their kernels along the cut dim. Their weights are gathered where they are read; relayout's
# gradient cuts the gradient again. Dense, EinsumDense, Embedding, attention and every
# normalization layer run on parts.
GATHER_ON_READ: tuple[type, ...] = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
    keras.layers.BatchNormalization,
    keras.layers.RNN,
    keras.layers.LSTMCell,
    keras.layers.GRUCell,
    keras.layers.SimpleRNNCell,
)


# Operations after which DTensor ends the process, or fails while it runs, which breaks DTensor for
# the rest of the process. Found by running every layer and 60 operations of Keras forward and
# backward; see `tests/test_spmd_limits.py`.
_FATAL = {
    # The backward pass of a loop that reads a computed list: recurrent layers, scan, map.
    "TensorListElementShape",
    # The backward pass of `cond` branches that keep intermediate values.
    "OptionalFromValue",
    "OptionalGetValue",
    "OptionalNone",
    # They run Python, which has no DTensors.
    "PyFunc",
    "PyFuncStateless",
    "EagerPyFunc",
}

# Keras has XLA compile what TensorFlow cannot convolve on a CPU: filters in groups, and channels
# before three spatial dims. DTensor inlines the compiled function, which loses XLA.
_CONVOLUTIONS = {"Conv2D", "Conv3D"}
_XLA = "_XlaMustCompile"
_CURRENT = re.compile(r'see current operation: (?:%[^=]*= )?"tf\.(\w+)"')
_QUOTED = re.compile(r"'tf\.(\w+)' op")
_BACKWARD = "gradient_tape/"
_LOWERING = re.compile(r"(?:^|\n|: )error: (.*)|\berror: (.*)")


def unsupported_ops(graph: tf.Graph, rows_cut: bool = False) -> list[tuple[str, str]]:
    """Operations of a traced program that DTensor must not even be tried on.

    Args:
        graph: graph of a concrete function; bodies of its loops and branches are looked at too.
        rows_cut: whether an inner axis cuts the batch.

    Returns:
        (operation type, operation name), in graph order. Empty for a program that may be tried.
    """
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes.extend(function.node_def)
    bad = [(node.op, node.name) for node in nodes if _is_fatal(node)]
    if rows_cut:
        bad += _differentiated_sorts(nodes)
    return bad + _compiled(definition)


def _differentiated_sorts(nodes: Sequence[Any]) -> list[tuple[str, str]]:
    """Sorts with a backward pass: it numbers the rows of the batch, and writes those of a part."""
    sorts = [node for node in nodes if node.op == "TopKV2"]
    backward = any(node.op == "ScatterNd" and _BACKWARD in node.name for node in nodes)
    return [(f"the gradient of {node.op}", node.name) for node in sorts if backward]


def _compiled(definition: Any) -> list[tuple[str, str]]:
    """Calls of functions in which XLA has to compile a convolution."""
    found = {}
    for function in definition.library.function:
        convolutions = [n.op for n in function.node_def if n.op in _CONVOLUTIONS]
        if function.attr[_XLA].b and convolutions:
            found[function.signature.name] = f"{convolutions[0]} compiled by XLA"
    called = [(node.attr["f"].func.name, node.name) for node in definition.node]
    return [(found[function], name) for function, name in called if function in found]


def _is_fatal(node: Any) -> bool:
    if node.op in _FATAL:
        return True
    # `x[None]` where x is cut, and its backward pass. Masks, which layers like to index so, are
    # whole; activations, which are floating, may be cut.
    if node.op not in ("StridedSlice", "StridedSliceGrad") or not node.attr["new_axis_mask"].i:
        return False
    return node.op == "StridedSliceGrad" or tf.as_dtype(node.attr["T"].type).is_floating


def explain(error: BaseException) -> str | None:
    """Says which operation DTensor could not lower.

    DTensor raises these errors before anything runs: the mesh, and DTensor, can be used further,
    and the same program can run plainly. An error of a *running* program is another matter: it
    leaves DTensor broken, its next use ends the process.

    Args:
        error: what the call of a program raised.

    Returns:
        Operation and reason on one line; None if the error is not one of these.
    """
    text = str(error)
    if "Cannot add function" in text and "already exists" in text:
        return "another shape of a loop that is differentiated (DTensor mixes up their bodies)"
    if "{{node" in text or "{{function_node" in text:
        return None
    if "see current operation" not in text and "tensorflow/dtensor/" not in text:
        return None
    operation = _CURRENT.search(text) or _QUOTED.search(text)
    found = _LOWERING.search(text)
    reason = next((g for g in found.groups() if g), "") if found else text.split("\n")[0]
    name = operation.group(1) if operation else "an operation"
    return f"{name}: {reason.strip()}"
