"""Operations that look at windows of pictures: which dims of what they take may be cut.

Letters stand for dims, as in `tf.einsum`, and a dot for all spatial ones: n of rows, c and g of
channels. A convolution sums over the channels that it takes; to pool, or to resize, is done for
each row and channel by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

GIVEN = "output"
"""What most operations call their result, those that stand for others among them."""
_SPATIAL = "."
_ONE_EACH = "m"
"""Of a depthwise convolution's filters: how many a channel has, which is 1."""
_EACH_DIM = ("ksize", "strides")
"""Attributes that have an entry for each dim of a picture."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How an operation takes its operands.

    Attributes:
        operands: Dims of the tensors that it takes, by position.
        result: Of what it gives.
        sizes: Which input says the sizes of the result, None if none does.
        shaped: Which input is read for its shape alone, that of the result.
        constants: Which inputs are to be constants, and stay as they are.
        name: Of what it gives, in TensorFlow.
    """

    operands: Mapping[int, str]
    result: str
    sizes: int | None = None
    shaped: int | None = None
    constants: tuple[int, ...] = ()
    name: str = GIVEN

    @property
    def convolves(self) -> bool:
        """Whether it is a product of channels at each place."""
        return len(self.operands) == 2

    @property
    def one_each(self) -> bool:
        """Whether its result alone has the dim of how many filters a channel has."""
        return _ONE_EACH in self.result and _ONE_EACH not in "".join(self.operands.values())

    @property
    def stand_in(self) -> str:
        """Type of an operation without windows that takes as many operands."""
        if self.convolves:
            return "Einsum"
        return "Identity" if len(self.operands) == 1 else "ClipByValue"

    def equation(self, spatial: int) -> str:
        """What a convolution is of the channels, as `tf.einsum` has it.

        The first operand has all places, and those of the other are left out.

        Args:
            spatial: How many spatial dims there are.
        """
        wide, narrow = self.operands.values()
        wide += _ONE_EACH if self.one_each else ""
        every = "ijk"[:spatial]
        wide, result = (one.replace(_SPATIAL, every) for one in (wide, self.result))
        return f"{wide},{narrow.replace(_SPATIAL, '')}->{result}"


_EACH = "n.c"
_FORWARD = Rule({0: _EACH, 1: ".cg"}, "n.g")
_TO_INPUT = Rule({2: "n.g", 1: ".cg"}, _EACH, sizes=0)
_TO_FILTER = Rule({0: _EACH, 2: "n.g"}, ".cg", sizes=1)
_BY_CHANNEL = Rule({0: _EACH, 1: ".cm"}, _EACH)
_BY_CHANNEL_TO_INPUT = Rule({2: _EACH, 1: ".cm"}, _EACH, sizes=0)
_BY_CHANNEL_TO_FILTER = Rule({0: _EACH, 2: _EACH}, ".cm", sizes=1)
_POOL = Rule({0: _EACH}, _EACH)
_OF_MAXIMA = Rule({0: _EACH, 1: _EACH, 2: _EACH}, _EACH)
_OF_MEANS = Rule({1: _EACH}, _EACH, sizes=0)
_RESIZED = "resized_images"
_RESIZE = Rule({0: _EACH}, _EACH, constants=(1,), name=_RESIZED)
_OF_RESIZED = Rule({0: _EACH}, _EACH, shaped=1)
_MOVE = Rule({0: ".c"}, ".c", constants=(1, 2))  # between places and rows, for a dilated window
RULES: Mapping[str, Rule] = {
    "Conv2D": _FORWARD,
    "Conv2DBackpropInput": _TO_INPUT,
    "Conv2DBackpropFilter": _TO_FILTER,
    "Conv3D": _FORWARD,
    "Conv3DBackpropInputV2": _TO_INPUT,
    "Conv3DBackpropFilterV2": _TO_FILTER,
    "DepthwiseConv2dNative": _BY_CHANNEL,
    "DepthwiseConv2dNativeBackpropInput": _BY_CHANNEL_TO_INPUT,
    "DepthwiseConv2dNativeBackpropFilter": _BY_CHANNEL_TO_FILTER,
    "MaxPool": _POOL,
    "MaxPool3D": _POOL,
    "AvgPool": _POOL,
    "AvgPool3D": _POOL,
    "MaxPoolGrad": _OF_MAXIMA,
    "MaxPool3DGrad": _OF_MAXIMA,
    "MaxPoolGradGrad": _OF_MAXIMA,
    "MaxPool3DGradGrad": _OF_MAXIMA,
    "AvgPoolGrad": _OF_MEANS,
    "AvgPool3DGrad": _OF_MEANS,
    "SpaceToBatchND": _MOVE,
    "BatchToSpaceND": _MOVE,
    "ResizeArea": _RESIZE,
    "ResizeBicubic": _RESIZE,
    "ResizeBilinear": _RESIZE,
    "ResizeNearestNeighbor": _RESIZE,
    "ResizeNearestNeighborGrad": Rule({0: _EACH}, _EACH, constants=(1,)),
    "ResizeBicubicGrad": _OF_RESIZED,
    "ResizeBilinearGrad": _OF_RESIZED,
}


def follows(rule: Rule, node: Any, operands: Mapping[int, Any], result: Any) -> bool:
    """Whether an operation does as the rule of its type says.

    It does not where channels do not come last, or are in groups, or meet.

    Args:
        rule: Of its type.
        node: Its node.
        operands: Shapes of its operands, by position.
        result: That of its result.
    """
    # To look for an attribute that is not there would make it.
    if "data_format" in node.attr and not node.attr["data_format"].s.decode().endswith("C"):
        return False
    for name in set(_EACH_DIM) & set(node.attr):
        entries = [*node.attr[name].list.i]
        if {entries[0], entries[-1]} != {1}:
            return False
    return _agree(rule, operands, result)


def has_whole_windows(
    rule: Rule,
    operands: Mapping[int, tuple[Any, Any]],
    result: tuple[Any, Any],
) -> bool:
    """Whether a device has all places of an operation's operands, and is to make all.

    And channels and rows of which its part of the result is made.

    Args:
        rule: Of the operation's type.
        operands: Shapes of its operands, whole and on the device, by position.
        result: Those of its result.
    """
    every = [(rule.result, *result), *((rule.operands[i], *both) for i, both in operands.items())]
    if any(places(dims, whole) != places(dims, here) for dims, whole, here in every):
        return False
    return _agree(rule, {i: here for i, (_, here) in operands.items()}, result[1])


def _agree(rule: Rule, operands: Mapping[int, Any], result: Any) -> bool:
    """Whether dims of one letter have one size."""
    sizes: dict[str, set[int]] = {_ONE_EACH: {1}}
    every = [(rule.result, result), *((rule.operands[i], one) for i, one in operands.items())]
    for dims, shape in every:
        left_out = spatial(dims, shape)
        rest = [size for dim, size in enumerate(shape) if dim not in left_out]
        for label, size in zip(dims.replace(_SPATIAL, ""), rest, strict=True):
            sizes.setdefault(label, set()).add(size)
    return all(len(one) == 1 for one in sizes.values())


def spatial(dims: str, shape: Any) -> list[int]:
    """The spatial dims of a tensor, of dims as a rule has them."""
    begin = dims.index(_SPATIAL)
    return [*range(begin, begin + len(shape) - len(dims) + 1)]


def places(dims: str, shape: Any) -> list[int]:
    """Their sizes."""
    return [shape[dim] for dim in spatial(dims, shape)]
