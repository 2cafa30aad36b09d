"""Rules of products that sum over dims (matrix products, einsum), and of windows over images."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Mapping, Sequence

from kdist.rows.node import Node, Shape, rule, total_power
from kdist.rows.values import Const, Linear, Rows, RowsMeet, Value, powers

Labels = Sequence[str]

BATCH_INPUT: Mapping[str, int] = {
    "AdjustContrastv2": 0,
    "AvgPool": 0,
    "AvgPool3D": 0,
    "Conv2D": 0,
    "Conv2DBackpropInput": 2,
    "Conv3D": 0,
    "Conv3DBackpropInputV2": 2,
    "DepthToSpace": 0,
    "DepthwiseConv2dNative": 0,
    "DepthwiseConv2dNativeBackpropInput": 2,
    "Dilation2D": 0,
    "ExtractImagePatches": 0,
    "ExtractVolumePatches": 0,
    "HSVToRGB": 0,
    "MaxPool": 0,
    "MaxPool3D": 0,
    "MaxPoolV2": 0,
    "RGBToHSV": 0,
    "ResizeArea": 0,
    "ResizeBicubic": 0,
    "ResizeBilinear": 0,
    "ResizeNearestNeighbor": 0,
    "ScaleAndTranslate": 0,
    "SpaceToDepth": 0,
}
"""Operations on one image after the other, and which input holds the images along dim 0."""
IMAGES = 4
"""Dims of a batch of images; some operations take one image without a batch too."""
COLOURS = {"HSVToRGB", "RGBToHSV"}
LINEAR_IN_IMAGES = {name for name in BATCH_INPUT if "Conv" in name or name.startswith("Avg")}


@rule("MatMul")
def matmul(node: Node) -> Value:
    """A product of two matrices."""
    left = "ka" if node.attr("transpose_a") else "ak"
    right = "bk" if node.attr("transpose_b") else "kb"
    return contract(node, [left, right], "ab")


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matmul(node: Node) -> Value:
    """Products of the matrices in the last two dims."""
    labels = []
    letters = string.ascii_uppercase
    for i, (plain, other) in enumerate((("ak", "ka"), ("kb", "bk"))):
        adjoint = node.attr("adj_x" if i == 0 else "adj_y")
        lead = len(node.shape(i)) - 2
        labels.append(letters[:lead][::-1] + (other if adjoint else plain))
    lead = len(node.out_shape()) - 2
    return contract(node, labels, letters[:lead][::-1] + "ab")


@rule("Einsum")
def einsum(node: Node) -> Value:
    """By its equation."""
    equation = node.attr("equation").decode().replace(" ", "")
    given, _, result = equation.partition("->")
    operands = given.split(",")
    labels = [_spelled_out(o, len(node.shape(i))) for i, o in enumerate(operands)]
    return contract(node, labels, _spelled_out(result, len(node.out_shape())))


def _spelled_out(labels: str, rank: int) -> list[str]:
    """One name per dim, those of an ellipsis counted from its end."""
    if "..." not in labels:
        return list(labels)
    before, after = labels.split("...")
    count = rank - len(before) - len(after)
    return [*before, *(f"...{count - i}" for i in range(count)), *after]


def contract(node: Node, operands: Sequence[Labels], result: Labels) -> Value:
    """A product of tensors, summed over the dims whose labels are not in the result.

    Raises:
        RowsMeet: Two tensors have their rows in dims of different labels (all pairs), or a
            constant is not the same for all rows, or a sum over rows is multiplied by rows.
    """
    power = total_power(powers(node.values))
    shapes = [node.shape(i) for i in range(len(operands))]
    if node.constant:
        return Const(_flat(node, operands, result, shapes), power)
    if power is None:
        raise RowsMeet
    sums = [v for v in node.values if isinstance(v, Linear)]
    if sums:
        return _of_sums(node, sums, operands, result, shapes, power)
    places = {
        (labels[v.dim], v.outer, v.inner)
        for v, labels in zip(node.values, operands)
        if isinstance(v, Rows)
    }
    if len(places) > 1:
        raise RowsMeet
    label, outer, inner = places.pop()
    for value, labels, shape in zip(node.values, operands, shapes):
        here = [d for d, name in enumerate(labels) if name == label]
        if len(here) > 1:
            raise RowsMeet
        if isinstance(value, Const) and here and shape[here[0]] != 1 and not value.is_flat(here[0]):
            raise RowsMeet
    if label not in result:
        return node.linear(power)
    return Rows(list(result).index(label), outer, inner, power)


def _of_sums(
    node: Node,
    sums: Sequence[Linear],
    operands: Sequence[Labels],
    result: Labels,
    shapes: Sequence[Shape],
    power: int,
) -> Value:
    """A sum over rows, times constants."""
    if len(sums) > 1 or any(isinstance(v, Rows) for v in node.values):
        raise RowsMeet
    for labels, shape in zip(operands, shapes):
        for name, size in zip(labels, shape):
            if name not in result and node.is_batch_multiple(size):
                raise RowsMeet
    return dataclasses.replace(sums[0], power=power)


def _flat(
    node: Node, operands: Sequence[Labels], result: Labels, shapes: Sequence[Shape]
) -> frozenset[int]:
    """Labels along which all constants with them are flat."""
    flat = set()
    for dim, name in enumerate(result):
        owners = [
            (v, labels.index(name), shape)
            for v, labels, shape in zip(node.values, map(list, operands), shapes)
            if name in labels
        ]
        if all(isinstance(v, Const) and (v.is_flat(d) or s[d] == 1) for v, d, s in owners):
            flat.add(dim)
    return frozenset(flat)


@rule(*BATCH_INPUT)
def images(node: Node) -> Value:
    """One image after the other."""
    index = BATCH_INPUT[node.op.type]
    value = node.values[index]
    others = [i for i in range(len(node.values)) if i != index]
    node.only_constants(*others)
    if isinstance(value, Const):
        flat = frozenset({0}) if value.is_flat(0) else frozenset[int]()
        return Const(flat, 0 if all(p == 0 for p in powers(node.values)) else None)
    images = len(node.shape(index)) >= IMAGES or node.op.type in COLOURS
    if isinstance(value, Rows) and (value.dim != 0 or not images):
        raise RowsMeet
    if node.op.type not in LINEAR_IN_IMAGES and (isinstance(value, Linear) or value.power):
        raise RowsMeet
    return value


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def transformed(node: Node) -> Value:
    """One image after the other, each with its own transform, or all with one."""
    node.only_constants(*range(2, len(node.values)))
    if node.constant:
        return Const(power=0 if all(p == 0 for p in powers(node.values)) else None)
    if any(p != 0 for p in powers(node.values[:2])):
        raise RowsMeet
    places = {v for v in node.values[:2] if isinstance(v, Rows)}
    for i, value in enumerate(node.values[:2]):
        if isinstance(value, Const) and node.shape(i)[0] != 1 and not value.is_flat(0):
            raise RowsMeet
    linear = any(isinstance(v, Linear) for v in node.values[:2])
    if linear or len(places) != 1 or any(p.dim != 0 for p in places):
        raise RowsMeet
    return places.pop()


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def fused_batch_norm(node: Node) -> list[Value]:
    """Normalises by given statistics, or by those of all images."""
    if not node.constant and node.attr("is_training"):
        raise RowsMeet
    first = images_only(node)
    return [first, *[Const()] * (len(node.op.outputs) - 1)]


def images_only(node: Node) -> Value:
    """Input 0 one image after the other, the other inputs constant.

    Raises:
        RowsMeet: They are not.
    """
    node.only_constants(*range(1, len(node.values)))
    value = node.values[0]
    if isinstance(value, Const):
        return Const()
    if any(p != 0 for p in powers(node.values)) or not isinstance(value, Rows) or value.dim:
        raise RowsMeet
    return value


@rule("SpaceToBatchND")
def space_to_batch(node: Node) -> Value:
    """Every block position gets a whole batch, one after the other."""
    return _blocks(node, into=True)


@rule("BatchToSpaceND")
def batch_to_space(node: Node) -> Value:
    """The way back."""
    return _blocks(node, into=False)


def _blocks(node: Node, into: bool) -> Value:
    value = images_only(node)
    if not isinstance(value, Rows):
        return value
    count = int(node.static(1).prod())
    if into:
        return dataclasses.replace(value, outer=value.outer * count)
    if value.outer % count:
        raise RowsMeet
    return dataclasses.replace(value, outer=value.outer // count)
