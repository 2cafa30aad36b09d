"""Layers that convolve: which dims of their filters are of channels taken, and of those given."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

_FORWARD = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_TRANSPOSED = (
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
)
_BY_CHANNEL = (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
_SEPARABLE = (keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
_KINDS: tuple[type, ...] = (*_FORWARD, *_TRANSPOSED, *_BY_CHANNEL, *_SEPARABLE)


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A layer whose channels may be cut: they come last, and are in one group.

    Attributes:
        filters: Its kernel.
        bias: Its bias, None without one.
        taken: The dim of the kernel that is of the channels taken.
        given: That of those given; the same if each channel is convolved for itself.
        before: Filters of each channel taken, where these are convolved for themselves at first;
            cut as `taken` is, in the dim before the last.
    """

    filters: keras.Variable
    bias: keras.Variable | None
    taken: int
    given: int
    before: keras.Variable | None = None

    @property
    def by_channel(self) -> bool:
        """Whether each channel is convolved for itself."""
        return self.taken == self.given


def convolves(layer: Any) -> bool:
    """Whether a layer is one of these."""
    return isinstance(layer, _KINDS)


def convolution_of(layer: Any) -> Convolution | None:
    """How a layer convolves; None for one that does not, or whose channels are not to be cut."""
    if not (convolves(layer) and layer.built and layer.data_format == "channels_last"):
        return None
    separable = isinstance(layer, _SEPARABLE)
    filters = layer.pointwise_kernel if separable else layer.kernel
    last = len(filters.shape) - 1
    if isinstance(layer, _BY_CHANNEL):
        one_each = layer.depth_multiplier == 1
        return Convolution(filters, layer.bias, last - 1, last - 1) if one_each else None
    if separable:
        one_each, each = layer.depth_multiplier == 1, layer.depthwise_kernel
        return Convolution(filters, layer.bias, last - 1, last, each) if one_each else None
    if getattr(layer, "groups", 1) != 1 or getattr(layer, "lora_enabled", False):
        return None
    transposed = isinstance(layer, _TRANSPOSED)
    taken, given = (last, last - 1) if transposed else (last - 1, last)
    return Convolution(filters, layer.bias, taken, given)
