"""Layers that multiply by a kernel: which of its dims are summed over, and which are given."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from kdist.plan.convolutions import convolution_of

import keras

Role = Literal["columns", "rows"]
PRODUCTS = (keras.layers.Dense, keras.layers.EinsumDense)


@dataclasses.dataclass(frozen=True)
class Product:
    """A layer that multiplies what it gets by a kernel.

    Attributes:
        path: The kernel's path.
        shape: The kernel's shape.
        takes: Dims of the kernel that are summed over.
        gives: Dims of the kernel that are dims of the result.
        bias: The bias's path, None without one.
        bias_shape: Its shape.
        bias_dim: Which of its dims is the first of `gives`, None if none is.
    """

    path: str
    shape: tuple[int, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    bias: str | None = None
    bias_shape: tuple[int, ...] = ()
    bias_dim: int | None = None

    @property
    def taken(self) -> tuple[int, ...]:
        """Sizes of what it sums over: (heads, width of a head), or (width,)."""
        return tuple(self.shape[dim] for dim in self.takes)

    @property
    def given(self) -> tuple[int, ...]:
        """Sizes of what it gives."""
        return tuple(self.shape[dim] for dim in self.gives)

    @property
    def elements(self) -> int:
        """How many the kernel has."""
        return math.prod(self.shape)

    def cut(self, role: Role) -> int:
        """The dim of the kernel that is cut: heads rather than the width of each."""
        return self.gives[0] if role == "columns" else self.takes[0]

    def divides(self, role: Role, parts: int) -> bool:
        """Whether that dim has equal parts."""
        return self.shape[self.cut(role)] % parts == 0


def quantized_products(layers: Iterable[keras.layers.Layer]) -> Iterator[tuple[Any, str]]:
    """Layers that would be products if they were not quantized, and how they are."""
    for layer in layers:
        if isinstance(layer, PRODUCTS) and layer.quantization_mode is not None:
            yield layer, layer.quantization_mode


def product_of(layer: keras.layers.Layer) -> Product | None:
    """What a layer multiplies by; None for one that is no product, or a quantized one."""
    if not isinstance(layer, PRODUCTS) or layer.quantization_mode is not None:
        return None
    weights = {v.name: v for v in layer.weights}
    kernel, bias = weights.get("kernel"), weights.get("bias")
    if kernel is None:
        return None
    read: tuple[Any, Any, int | None] | None = (0,), (1,), 0
    if isinstance(layer, keras.layers.EinsumDense):
        read = _equation(layer.equation, layer.bias_axes or "")
    if read is None:
        return None
    takes, gives, bias_dim = read
    return Product(
        kernel.path,
        tuple(kernel.shape),
        takes,
        gives,
        None if bias is None else bias.path,
        () if bias is None else tuple(bias.shape),
        bias_dim,
    )


def filters_as_product(layer: keras.layers.Layer) -> Product | None:
    """What a convolution multiplies the channels at each place by; None of anything else."""
    one = convolution_of(layer)
    if one is None or one.by_channel:
        return None
    bias = one.bias
    return Product(
        one.filters.path,
        tuple(one.filters.shape),
        (one.taken,),
        (one.given,),
        None if bias is None else bias.path,
        () if bias is None else tuple(bias.shape),
        None if bias is None else 0,
    )


def _equation(equation: str, bias_axes: str) -> tuple[Any, Any, int | None] | None:
    """Dims of the kernel that an einsum sums over, and that it gives; and of the bias."""
    inputs, result = equation.replace(" ", "").split("->")
    data, kernel = inputs.split(",")
    takes = tuple(n for n, label in enumerate(kernel) if label in data and label not in result)
    gives = tuple(n for n, label in enumerate(kernel) if label in result and label not in data)
    if not takes or not gives or len(takes) + len(gives) != len(kernel):
        return None
    order = [label for label in result if label in bias_axes]
    first = kernel[gives[0]]
    # Keras keeps dims of size 1 behind the first of them.
    behind = result[result.index(order[0]) :] if order else ""
    return takes, gives, behind.index(first) if first in order else None


def gives_dim_of_input(layer: keras.layers.Layer, dim: int) -> bool:
    """Whether a dim of what a product gives is one of what it takes, not of its kernel."""
    if not isinstance(layer, keras.layers.EinsumDense):
        return True  # all but the last
    inputs, result = layer.equation.replace(" ", "").split("->")
    return result[dim : dim + 1] in inputs.split(",")[0]
