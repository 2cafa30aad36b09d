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
_KINDS: tuple[type, ...] = (*_FORWARD, *_TRANSPOSED, *_BY_CHANNEL)


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A layer whose channels may be cut: they come last, and are in one group.

    Attributes:
        filters: Its kernel.
        bias: Its bias, None without one.
        taken: The dim of the kernel that is of the channels taken.
        given: That of those given; the same if each channel is convolved for itself.
    """

    filters: keras.Variable
    bias: keras.Variable | None
    taken: int
    given: int

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
    filters = layer.kernel
    last = len(filters.shape) - 1
    by_channel, transposed = (isinstance(layer, one) for one in (_BY_CHANNEL, _TRANSPOSED))
    if by_channel:
        # Keras writes what is both strided and dilated as other operations.
        plain = max(layer.strides) == 1 or max(layer.dilation_rate) == 1
        if layer.depth_multiplier != 1 or not plain:
            return None
        return Convolution(filters, layer.bias, last - 1, last - 1)
    if getattr(layer, "groups", 1) != 1 or getattr(layer, "lora_enabled", False):
        return None
    taken, given = (last, last - 1) if transposed else (last - 1, last)
    return Convolution(filters, layer.bias, taken, given)
