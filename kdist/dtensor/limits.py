"""What DTensor cannot run, and what it cannot run on parts of a weight.

Found by running every layer and 60 operations of Keras forward and backward under DTensor.
"""

from __future__ import annotations

import re
from typing import Any

from kdist._compat.xla_clusters import MUST_COMPILE
from kdist.dtensor.body import data_inputs
from kdist.graphs.chunks import node_of

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

CONVOLUTIONS: tuple[type, ...] = (
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
)

# Layers whose operations DTensor cannot run on a part of a weight: convolutions want whole filters
# (depthwise ones fail only when they run, which breaks the process) where they have no stand-in
# (`kdist.dtensor.channels`), recurrent cells split their kernels along the cut dim. Their weights
# are gathered where they are read; relayout's gradient cuts the gradient again. Dense, EinsumDense,
# Embedding, attention and every normalization layer run on parts.
GATHER_ON_READ: tuple[type, ...] = (
    *CONVOLUTIONS,
    keras.layers.RNN,
    keras.layers.LSTMCell,
    keras.layers.GRUCell,
    keras.layers.SimpleRNNCell,
)


_LOOP = "the backward pass of a loop"
_BRANCH = "the backward pass of branches"
_PYTHON = "Python"
_PRINT = "printing, which each device would repeat"
_HANDLE = "a resource, such as a file"
# Operations after which DTensor ends the process while it lowers them, or makes a program that
# fails when it runs; and where they are met. See `tests/dtensor/test_limits.py`.
_FATAL = {
    # A loop keeps lists of values for its gradient. Lists that it reads have a shape that DTensor
    # gets wrong; and with a layout asked for after the loop, it ends the process.
    "TensorListElementShape": _LOOP,
    "EmptyTensorList": _LOOP,
    "TensorListPushBack": _LOOP,
    "TensorListPopBack": _LOOP,
    # Branches of `cond` that keep intermediate values.
    "OptionalFromValue": _BRANCH,
    "OptionalGetValue": _BRANCH,
    "OptionalNone": _BRANCH,
    # They run Python, which has no DTensors.
    "PyFunc": _PYTHON,
    "PyFuncStateless": _PYTHON,
    "EagerPyFunc": _PYTHON,
    "PrintV2": _PRINT,
}

# Keras has XLA compile what TensorFlow cannot convolve on a CPU: filters in groups, and channels
# before three spatial dims. DTensor inlines the compiled function, which loses XLA.
_CONVOLUTIONS = ("Conv2D", "Conv3D")
_LOOPS = ("While", "StatelessWhile")
LAYOUTS = ("Relayout", "RelayoutLike")
_CURRENT = re.compile(r'see current operation: (?:%[^=]*= )?"tf\.(\w+)"')
_QUOTED = re.compile(r"'tf\.(\w+)' op")
_BACKWARD = "gradient_tape/"
_PLACES = frozenset({"Add", "AddV2", "Cast", "ExpandDims", "Identity", "Reshape"})
_CROSS_ENTROPY = "SparseSoftmaxCrossEntropyWithLogits"
_INT64 = tf.int64.as_datatype_enum
_INEXACT = {tf.float64.as_datatype_enum, tf.bfloat16.as_datatype_enum}
UNKNOWN = "does not implement"
"""In reasons of operations for which DTensor has no rule."""
RULED_OUT = "an all-to-all, which enable_alltoall=False rules out"
"""In reasons of operations that DTensor could expand."""
_LOWERING = re.compile(r"(?:^|\n|: )error: (.*)|\berror: (.*)")


def unsupported(body: Any) -> dict[str, str]:
    """Operations of a traced program that DTensor must not even be tried on.

    Args:
        body: The traced program, a `kdist.dtensor.body.Body`.

    Returns:
        What is wrong with an operation, by its name, in graph order; a loop or a branch has what
        is in its functions.
    """
    # Of a function that serves several sizes, unknown sizes may follow from those of its inputs.
    one_size = all(body.specs[one].shape.is_fully_defined() for one in body.inputs)
    found = {}
    for name, node in body.nodes.items():
        functions = list(body.called(node))
        nodes = [node, *(one for function in functions for one in function.node_def)]
        reasons = [reason for one in nodes if (reason := _fatal(one))]
        reasons += [reason for f in functions if (reason := _compiled(f))]
        if node.op in _LOOPS and any(one.op in LAYOUTS for one in nodes):
            reasons.append("a re-layout in the body of a loop")  # DTensor crashes
        if node.op == "ScatterNd" and _BACKWARD in name and _numbers(body, node):
            # It numbers all rows, and writes those of a part.
            reasons.append("the gradient of TopKV2")
        elif node.op == "ScatterNd" and node.attr["Tindices"].type == _INT64:
            reasons.append("ScatterNd with indices of int64")
        if _cross_entropy_of_parts(body, node):
            reasons.append(f"{node.op} in {tf.as_dtype(node.attr['T'].type).name}")
        if one_size and _makes_unknown_size(body, node):
            reasons.append(f"{node.op} of a size that depends on values")
        if one_size and node.op == "StridedSliceGrad" and not _bounds_known(body, node):
            reasons.append("StridedSliceGrad with bounds that depend on values")
        if _goes_backwards(body, node):
            reasons.append(f"{node.op} with a negative stride")
        if any(one in body.handles for one in data_inputs(node)):
            reasons.append(_HANDLE)
        if reasons:
            found[name] = ", ".join(dict.fromkeys(reasons))
    return found


def _numbers(body: Any, node: Any) -> bool:
    """Whether places to write to are counted."""
    waiting = [node.input[0]]
    while waiting:
        made = body.nodes.get(node_of(waiting.pop()))
        if made is not None and made.op == "Range":
            return True
        if made is not None and made.op in _PLACES:
            waiting.extend(made.input)
    return False


def _cross_entropy_of_parts(body: Any, node: Any) -> bool:
    """Whether a sparse cross-entropy may be of cut classes, and in a dtype that DTensor gets wrong.

    It is exact in float32 and float16.
    """
    if node.op != _CROSS_ENTROPY or node.attr["T"].type not in _INEXACT:
        return False
    waiting, seen = [node.input[0]], set()
    while waiting:
        name = node_of(waiting.pop())
        made = body.nodes.get(name)
        if made is None:
            return True  # an input, which may be cut
        whole = made.op == "Const" or _makes_whole(made)
        if whole or name in seen:
            continue
        seen.add(name)
        read = data_inputs(made)
        if not read:
            return True
        waiting.extend(read)
    return False


def _makes_whole(node: Any) -> bool:
    """Whether a node lays a tensor out whole on every device."""
    if node.op != "Relayout":
        return False
    layout = dtensor.Layout.from_string(node.attr["layout"].s.decode())
    return bool(layout.is_fully_replicated())


def _makes_unknown_size(body: Any, node: Any) -> bool:
    """Whether tensors of known sizes go into an operation, and one of unknown size comes out.

    What gradients of broadcasts ask for follows from shapes, which DTensor knows.
    """
    if node.op == "BroadcastGradientArgs":
        return False
    read, made = body.read_by(node), body.made_by(node)
    if tf.variant in [spec.dtype for spec in (*read, *made)]:
        return False
    known = all(spec.shape.is_fully_defined() for spec in read)
    return known and not all(spec.shape.is_fully_defined() for spec in made)


def _bounds_known(body: Any, node: Any) -> bool:
    """Whether where a slice begins and ends is constant."""
    return all(body.constant(one) is not None for one in data_inputs(node)[1:4])


def _goes_backwards(body: Any, node: Any) -> bool:
    """Whether a slice has a negative stride: DTensor gives each part the wrong elements."""
    if node.op not in ("StridedSlice", "StridedSliceGrad"):
        return False
    strides = body.constant(node.input[3])
    return strides is not None and bool((strides < 0).any())


def _compiled(function: Any) -> str:
    """Says that XLA has to compile a convolution in a function, if it has."""
    convolutions = [n.op for n in function.node_def if n.op.startswith(_CONVOLUTIONS)]
    compiled = function.attr[MUST_COMPILE].b and convolutions
    return f"{convolutions[0]} compiled by XLA" if compiled else ""


def _fatal(node: Any) -> str:
    """Why DTensor must not be tried on a node; "" if it may."""
    if node.op not in ("StridedSlice", "StridedSliceGrad") or not node.attr["new_axis_mask"].i:
        return _FATAL.get(node.op, "")
    # `x[None]` where x is cut, and its backward pass. Masks, which layers like to index so, are
    # whole; activations, which are floating, may be cut.
    floating = tf.as_dtype(node.attr["T"].type).is_floating
    return f"{node.op} with a new axis" if node.op == "StridedSliceGrad" or floating else ""


def is_about_lowering(error: BaseException) -> bool:
    """Whether DTensor failed to lower a program; see `explain`."""
    return isinstance(error, UnicodeDecodeError) or explain(error) is not None


def failed_operation(error: BaseException) -> tuple[str, str] | None:
    """Type of the operation that DTensor could not lower, and why; None if that is not known."""
    operation, reason = _parsed(str(error))
    # A branch that has become a region is one operation still.
    return (operation.removesuffix("Region"), reason) if operation else None


def _parsed(text: str) -> tuple[str, str]:
    """The operation that an error names, "" if none, and the reason that it gives."""
    operation = _CURRENT.search(text) or _QUOTED.search(text)
    found = _LOWERING.search(text)
    reason = next((g for g in found.groups() if g), "") if found else text.split("\n")[0]
    return operation.group(1) if operation else "", reason.strip()


def failed_number(error: BaseException, attribute: str) -> int | None:
    """The number that was written on the operation that DTensor could not lower."""
    found = re.search(rf"see current operation: .*\b{attribute} = (\d+)", str(error))
    return int(found.group(1)) if found else None


def explain(error: BaseException) -> str | None:
    """Says which operation DTensor could not lower.

    DTensor raises these errors before anything runs: the mesh, and DTensor, can be used further,
    and the same program can run plainly. An error of a *running* program is another matter: it
    leaves DTensor broken, its next use ends the process.

    Args:
        error: What the call of a program raised.

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
    operation, reason = _parsed(text)
    return f"{operation or 'an operation'}: {reason}"
