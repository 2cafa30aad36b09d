"""What a layer costs: an estimate from its weights and the shapes of its inputs and outputs.

Products of matrices count 2 operations per multiply-add, everything else 1 per element made. The
backward pass is left out: it costs about twice the forward in every layer, so it changes no
balance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from keras import layers

Shape = tuple[int, ...]
"""Shape of one example: the batch dim is left out."""

UNKNOWN_DIM = 128
"""Stands for dims other than the batch that are None."""

_CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
_TRANSPOSED = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
_DEPTHWISE = (layers.DepthwiseConv1D, layers.DepthwiseConv2D)
_SEPARABLE = (layers.SeparableConv1D, layers.SeparableConv2D)
_VIEWS = (layers.Flatten, layers.Reshape, layers.Identity)
_RECURRENT = (layers.LSTM, layers.GRU, layers.SimpleRNN, layers.RNN, layers.Bidirectional)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Speed of one device, of which only the ratio matters for a balance.

    Attributes:
        flops_per_second: Floating point operations per second.
        bytes_per_second: Bytes that its memory delivers per second.
    """

    flops_per_second: float = 5e10
    bytes_per_second: float = 1e10


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Work of one call of a layer, forward.

    Attributes:
        flops: Floating point operations per example.
        weight_bytes: Bytes of weights that are read per call.
        activation_bytes: Bytes of inputs and outputs per example.
    """

    flops: float
    weight_bytes: float
    activation_bytes: float

    def seconds(self, examples: int, machine: Machine) -> float:
        """The longer of computing and of moving the bytes (the roofline model)."""
        moved = self.weight_bytes + examples * self.activation_bytes
        return max(
            examples * self.flops / machine.flops_per_second, moved / machine.bytes_per_second
        )


def layer_cost(
    operation: Any,
    inputs: Sequence[keras.KerasTensor],
    outputs: Sequence[keras.KerasTensor],
    arguments: Mapping[str, Any] | None = None,
    unknown_dim: int = UNKNOWN_DIM,
) -> LayerCost:
    """Estimates one call of a layer or of a `keras.ops` operation.

    Args:
        operation: The layer, built, or the operation.
        inputs: Its input tensors, each with a batch dim first.
        outputs: Its output tensors.
        arguments: Keyword arguments of the call, such as `reverse` of a `ReversibleEmbedding`.
        unknown_dim: Stands for every other dim that is None.

    Returns:
        The estimate. A layer of an unknown class with weights counts 2 operations per weight and
        position, positions being all dims but the batch and the last. One that only changes a shape
        costs nothing.

    Example:
    ```python
    import keras
    from kdist.stages.layer_costs import layer_cost

    x = keras.Input((16,))
    dense = keras.layers.Dense(4)
    layer_cost(dense, [x], [dense(x)]).flops  # 2 * 16 * 4
    ```
    """
    if isinstance(operation, _VIEWS):
        return LayerCost(flops=0, weight_bytes=0, activation_bytes=0)
    arguments = arguments or {}
    shapes = [_example_shape(t, unknown_dim) for t in inputs]
    made = [_example_shape(t, unknown_dim) for t in outputs]
    moved = sum(math.prod(s) * itemsize(t.dtype) for s, t in zip(shapes, inputs))
    moved += sum(math.prod(s) * itemsize(t.dtype) for s, t in zip(made, outputs))
    flops = layer_flops(operation, shapes, made, arguments)
    weights = 0 if _looks_up(operation, arguments) else _bytes_of(operation, arguments)
    return LayerCost(flops=flops, weight_bytes=weights, activation_bytes=moved)


def layer_flops(
    operation: Any, inputs: Sequence[Shape], outputs: Sequence[Shape], arguments: Mapping[str, Any]
) -> float:
    """Floating point operations per example; shapes without the batch dim."""
    if not isinstance(operation, layers.Layer):
        return _operation_flops(operation, inputs, outputs)
    for classes, rule in _RULES:
        if isinstance(operation, classes):
            return rule(operation, inputs, outputs, arguments)
    made = _elements(outputs)
    weights = sum(_size(w.shape) for w in operation.weights)
    return max(made, 2 * weights * max(_positions(inputs), _positions(outputs)))


def used_variables(operation: Any, arguments: Mapping[str, Any]) -> list[keras.Variable]:
    """The variables that one call of a layer uses: weights, and states such as seeds."""
    variables = list(getattr(operation, "variables", ()))
    if isinstance(operation, layers.ReversibleEmbedding) and not operation.tie_weights:
        back = {id(v) for v in variables if v.name.startswith("reverse_embeddings")}
        if arguments.get("reverse"):  # one way of int4 reads `g_idx` in both directions
            return [v for v in variables if id(v) in back or v.name == "g_idx"]
        return [v for v in variables if id(v) not in back]
    return variables


def itemsize(dtype: Any) -> float:
    """Bytes of one element of a Keras dtype."""
    name = keras.backend.standardize_dtype(dtype)
    digits = "".join(c for c in name.split("_")[0] if c.isdigit())
    if name.startswith("float8"):
        return 1.0
    return int(digits) / 8 if digits else 1.0  # bool and string count one byte


def tensor_bytes(tensor: keras.KerasTensor) -> float:
    """Bytes of one example of a tensor."""
    return math.prod(_example_shape(tensor, UNKNOWN_DIM)) * itemsize(tensor.dtype)


def _example_shape(tensor: keras.KerasTensor, unknown_dim: int) -> Shape:
    return tuple(unknown_dim if n is None else int(n) for n in tensor.shape[1:])


def _size(shape: Sequence[Any]) -> int:
    return math.prod(int(n) for n in shape)


def _elements(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _positions(shapes: Sequence[Shape]) -> int:
    return max((math.prod(shape[:-1]) for shape in shapes), default=1)


def _bytes_of(operation: Any, arguments: Mapping[str, Any]) -> float:
    weights = used_variables(operation, arguments)
    return sum(_size(w.shape) * itemsize(w.dtype) for w in weights)


def _looks_up(operation: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether only the looked-up rows of a table are read: as many bytes as come out."""
    return isinstance(operation, layers.Embedding) and not arguments.get("reverse")


Rule = Callable[[Any, Sequence[Shape], Sequence[Shape], Mapping[str, Any]], float]


def _dense(layer: Any, inputs: Any, outputs: Any, arguments: Any) -> float:
    return 2 * _size(layer.kernel.shape) * math.prod(outputs[0][:-1])


def _einsum_dense(layer: Any, inputs: Any, outputs: Any, arguments: Any) -> float:
    # From the input: dims of the output may be unknown where the layer was told None.
    operand, labels = layer.equation.replace(" ", "").split("->")[0].split(",")
    new = [n for label, n in zip(labels, layer.kernel.shape) if label not in operand]
    return 2 * math.prod(inputs[0]) * _size(new)


def _embedding(layer: Any, inputs: Any, outputs: Any, arguments: Any) -> float:
    if arguments.get("reverse"):
        return 2 * layer.input_dim * math.prod(inputs[0])
    return 0.0


def _convolution(layer: Any, inputs: Any, outputs: Any, arguments: Any) -> float:
    return 2 * _size(layer.kernel.shape) * math.prod(outputs[0]) / layer.filters


def _transposed(layer: Any, inputs: Any, outputs: Any, arguments: Any) -> float:
    channels = inputs[0][-1 if layer.data_format == "channels_last" else 0]
    return 2 * _size(layer.kernel.shape) * math.prod(inputs[0]) / channels


def _depthwise(layer: Any, inputs: Any, outputs: Any, arguments: Any) -> float:
    channels = _size(layer.kernel.shape[-2:])
    return 2 * _size(layer.kernel.shape) * math.prod(outputs[0]) / channels


def _separable(layer: Any, inputs: Any, outputs: Any, arguments: Any) -> float:
    weights = _size(layer.depthwise_kernel.shape) + _size(layer.pointwise_kernel.shape)
    return 2 * weights * math.prod(outputs[0]) / layer.filters


def _multi_head(layer: Any, inputs: Any, outputs: Any, arguments: Any) -> float:
    if isinstance(layer, layers.GroupQueryAttention):
        heads, key_dim, value_dim = layer.num_query_heads, layer.head_dim, layer.head_dim
        key_heads = layer.num_key_value_heads
    else:
        heads = key_heads = layer.num_heads
        key_dim, value_dim = layer.key_dim, layer.value_dim
    query, value = inputs[0], _second(inputs)
    n, k = math.prod(query[:-1]), math.prod(value[:-1])
    projections = n * heads * (query[-1] * key_dim + value_dim * outputs[0][-1])
    projections += k * key_heads * value[-1] * (key_dim + value_dim)
    return 2 * projections + 2 * n * k * heads * (key_dim + value_dim)


def _attention(layer: Any, inputs: Any, outputs: Any, arguments: Any) -> float:
    query, value = inputs[0], _second(inputs)
    return 2 * math.prod(query[:-1]) * math.prod(value[:-1]) * (query[-1] + value[-1])


def _second(inputs: Sequence[Shape]) -> Shape:
    """The value of an attention call; masks and the like have another rank."""
    same_rank = [shape for shape in inputs if len(shape) == len(inputs[0])]
    return same_rank[1] if len(same_rank) > 1 else inputs[0]


def _recurrent(layer: Any, inputs: Any, outputs: Any, arguments: Any) -> float:
    kernels = [w for w in layer.weights if w.name.endswith("kernel")] or layer.weights
    return 2 * sum(_size(w.shape) for w in kernels) * inputs[0][0]


def _time_distributed(layer: Any, inputs: Any, outputs: Any, arguments: Any) -> float:
    steps = inputs[0][0]
    inner = layer_flops(layer.layer, [s[1:] for s in inputs], [s[1:] for s in outputs], arguments)
    return steps * inner


_RULES: tuple[tuple[Any, Rule], ...] = (
    (layers.Dense, _dense),
    (layers.EinsumDense, _einsum_dense),
    (layers.Embedding, _embedding),
    (_SEPARABLE, _separable),
    (_DEPTHWISE, _depthwise),
    (_TRANSPOSED, _transposed),
    (_CONVOLUTIONS, _convolution),
    ((layers.MultiHeadAttention, layers.GroupQueryAttention), _multi_head),
    ((layers.Attention, layers.AdditiveAttention), _attention),
    (_RECURRENT, _recurrent),
    (layers.TimeDistributed, _time_distributed),
)


def _operation_flops(operation: Any, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    if type(operation).__name__ in ("Matmul", "Dot") and inputs and inputs[0]:
        return 2 * _elements(outputs) * inputs[0][-1]
    return _elements(outputs)
