"""Convolutions of which channels are cut.

DTensor runs a convolution on parts of the batch alone. What it is lowered as instead has the dims
that may be cut, and no window: a product of the channels, once per place of the result. DTensor
lays that out, adds it up, and sends what it must, as of any product; in the program of one device
the convolution takes the product's place, on the parts that are there.

By filters (columns) nothing is sent; by the channels that it takes (rows) the results are added up
(Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3, of matrix products).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kdist.dtensor.body import Body, control_inputs, data_inputs
from kdist.dtensor.device_number import SHAPES
from kdist.graphs.chunks import node_of

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

_CONVOLUTION = "_kdist_convolution"
"""The number of a convolution, on what stands for it."""
_OPERAND = "_kdist_convolved"
"""Twice that, and one more for the second operand, on a copy of an operand."""
_SPATIAL = "."
_ADDED = re.compile(r"/kdist_(wide|narrow)\w*$")
"""What follows a convolution's name in those of other nodes that stand for it."""
_PASSES = frozenset({"Sum", "BroadcastTo", "ExpandDims", "Reshape", "Squeeze", "Identity"})
"""What may stand between an operand and the product; nothing that sends."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which dims of an operation's operands are summed over, and which it gives.

    Attributes:
        wide: Which operand has the spatial dims of the product's result.
        narrow: Which is the other; its spatial dims are left out.
        sizes: Which says the sizes of the result, None if none does.
        dims: Of the first, of the other, and of the result; all spatial ones are a dot.
    """

    wide: int
    narrow: int
    sizes: int | None
    dims: tuple[str, str, str]

    def equation(self, spatial: int) -> str:
        """As `tf.einsum` has it, for a number of spatial dims."""
        wide, narrow, result = self.dims
        every = "ijk"[:spatial]
        wide, result = (one.replace(_SPATIAL, every) for one in (wide, result))
        return f"{wide},{narrow.replace(_SPATIAL, '')}->{result}"


_FORWARD = Rule(0, 1, None, ("n.c", ".cg", "n.g"))
_TO_INPUT = Rule(2, 1, 0, ("n.g", ".cg", "n.c"))
_TO_FILTER = Rule(0, 2, 1, ("n.c", "n.g", ".cg"))
# One filter a channel: m is 1.
_BY_CHANNEL = Rule(0, 1, None, ("n.c", ".cm", "n.c"))
_BY_CHANNEL_TO_INPUT = Rule(2, 1, 0, ("n.c", ".cm", "n.c"))
_BY_CHANNEL_TO_FILTER = Rule(0, 2, 1, ("n.cm", "n.c", ".cm"))
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
}


class StandIns:
    """Products in the place of a traced function's convolutions.

    Args:
        body: The function; its nodes are changed.
        channels: Whether channels may be cut: otherwise convolutions stay.
    """

    def __init__(self, body: Body, channels: bool) -> None:
        self._body = body
        self._numbers: dict[str, int] = {}
        self._originals: dict[str, Any] = {}
        self._apart: dict[str, str] = {}
        for node in [*body.nodes.values()] if channels else ():
            rule = RULES.get(node.op)
            if rule is None:
                if any(one.op in RULES for f in body.called(node) for one in f.node_def):
                    self._apart[node.name] = "a convolution inside a function"
            elif not _is_sized(body, node):
                self._apart[node.name] = f"{node.op} of unknown size"
            elif _is_plain(body, node, rule):
                self._stand_in(len(self._originals), node, rule)

    def __len__(self) -> int:
        return len(self._originals)

    def apart(self) -> dict[str, str]:
        """What has no stand-in, and is to be islands since channels may be cut; and why."""
        return dict(self._apart)

    def left(self, found: Mapping[str, str], chosen: dict[str, str]) -> dict[str, str]:
        """Puts convolutions back into the function, where what stands for them is to be an island.

        Args:
            found: Reasons by name of nodes, those of stand-ins among them.
            chosen: Islands, to which the convolutions are added.

        Returns:
            The other nodes, with their reasons.
        """
        others: dict[str, str] = {}
        for name, why in found.items():
            of = _ADDED.sub("", name)
            if of in self._originals:
                self._body.nodes[of] = self._originals.pop(of)
            (chosen if of in self._numbers else others)[of] = why
        return others

    def put_back(self, definition: Any) -> dict[str, str]:
        """Puts the convolutions into the program of one device.

        Args:
            definition: The program.

        Returns:
            Those that cannot be, by name, and why: something lies between one and its operands.
        """
        nodes = {node.name: node for node in definition.node_def}
        by_number = {number: name for name, number in self._numbers.items()}
        missing = set(self._originals)
        failed: dict[str, str] = {}
        for node in [*definition.node_def]:
            if _CONVOLUTION not in node.attr:
                continue
            number = node.attr[_CONVOLUTION].i
            name, read = by_number[number], data_inputs(node)
            operands = [_operand(nodes, r, 2 * number + i) for i, r in enumerate(read)]
            if self._has_whole_windows(name, node, operands):
                missing.discard(name)
                references = [f"{one.name}:output:0" for one in operands]
                definition.node_def.extend(self._put_back(node, self._originals[name], references))
            else:
                failed[name] = "its operands are laid out in another way than its result"
        return {**failed, **dict.fromkeys(missing - set(failed), "DTensor made something else")}

    def _has_whole_windows(self, name: str, node: Any, operands: Sequence[Any]) -> bool:
        """Whether a device has all places of a convolution's operands, and is to make all.

        What stands for it would be right without. Channels and rows agree as those of a product do.

        Args:
            name: Of the convolution.
            node: What stands for it in the program.
            operands: Copies of its operands there, None where something lies between.
        """
        original = self._originals[name]
        rule, read = RULES[original.op], data_inputs(original)
        (result,) = self._body.made_by(original)
        specs = [self._body.specs[read[rule.wide]], self._body.specs[read[rule.narrow]], result]
        sizes: dict[str, set[int]] = {}
        for dims, spec, made in zip(rule.dims, specs, (*operands, node), strict=True):
            if made is None or not made.attr[SHAPES].list.shape:
                return False
            begin, count = dims.index(_SPATIAL), spec.shape.rank - 2
            here = [dim.size for dim in made.attr[SHAPES].list.shape[0].dim]
            if here[begin : begin + count] != list(spec.shape)[begin : begin + count]:
                return False
            del here[begin : begin + count]
            for label, size in zip(dims.replace(_SPATIAL, ""), here):
                sizes.setdefault(label, set()).add(size)
        return all(len(one) == 1 for one in sizes.values())

    def _put_back(self, node: Any, original: Any, operands: Sequence[Any]) -> Iterator[Any]:
        """Makes a node the convolution that it stands for; yields what that needs besides."""
        rule = RULES[original.op]
        shape, waits = node.attr[SHAPES].list.shape[0], control_inputs(node)
        inputs = [""] * len(data_inputs(original))
        inputs[rule.wide], inputs[rule.narrow] = operands
        if rule.sizes is not None:
            sizes = np.asarray([dim.size for dim in shape.dim], np.int32)
            made = _constant(f"{node.name}/sizes", sizes)
            inputs[rule.sizes] = f"{made.name}:output:0"
            yield made
        kept = {key: node.attr[key] for key in (SHAPES, "_layout") if key in node.attr}
        kept = {
            key: type(value).FromString(value.SerializeToString()) for key, value in kept.items()
        }
        node.op, node.input[:] = original.op, [*inputs, *waits]
        node.attr.clear()
        for key, value in (*original.attr.items(), *kept.items()):
            node.attr[key].CopyFrom(value)
        if "Tshape" in node.attr:  # of the sizes
            node.attr["Tshape"].type = tf.int32.as_datatype_enum

    def _stand_in(self, number: int, node: Any, rule: Rule) -> None:
        body, name, read = self._body, node.name, data_inputs(node)
        (result,) = (spec.shape for spec in body.made_by(node))
        spatial = result.rank - 2
        at = 0 if rule.dims[2].startswith(_SPATIAL) else 1
        made = _Nodes(body, node)
        wide = made.operand("wide", read[rule.wide], 2 * number)
        taken = body.specs[read[rule.wide]].shape
        dims = [*range(1, 1 + spatial)]
        wide = made.summed(wide, "wide_channels", dims, keep=True)
        shape = [taken[0], *result[at : at + spatial], taken[-1]]
        if len(rule.dims[0]) > 3:
            wide = made.expanded(wide, "wide_expanded")
            shape.append(1)
        wide = made.broadcast(wide, "wide_places", shape)
        narrow = made.operand("narrow", read[rule.narrow], 2 * number + 1)
        begin = 0 if rule.dims[1].startswith(_SPATIAL) else 1
        narrow = made.summed(
            narrow, "narrow_channels", [*range(begin, begin + spatial)], keep=False
        )
        product = node_def_pb2.NodeDef(name=name, op="Einsum")
        product.input.extend([wide, narrow, *control_inputs(node)])
        product.attr["N"].i, product.attr["T"].type = 2, node.attr["T"].type
        product.attr["equation"].s = rule.equation(spatial).encode()
        product.attr[_CONVOLUTION].i = number
        body.nodes[name] = product
        self._originals[name], self._numbers[name] = node, number


def _is_sized(body: Body, node: Any) -> bool:
    """Whether all sizes are known."""
    specs = [*body.made_by(node), *body.read_by(node)]
    return all(spec.shape.is_fully_defined() for spec in specs)


def _is_plain(body: Body, node: Any, rule: Rule) -> bool:
    """Whether channels come last, and in one group."""
    made, read = body.made_by(node), data_inputs(node)
    specs = [*made, *(body.specs[read[i]] for i in (rule.wide, rule.narrow))]
    if len(made) != 1 or not node.attr["data_format"].s.decode().endswith("C"):
        return False
    labels: dict[str, set[int]] = {}
    for dims, spec in zip((rule.dims[2], *rule.dims[:2]), specs):
        shape = list(spec.shape)
        dims = dims.replace("n.cm", "n.c")
        begin = dims.index(_SPATIAL)
        count = len(shape) - len(dims) + 1
        del shape[begin : begin + count]
        for label, size in zip(dims.replace(_SPATIAL, ""), shape, strict=True):
            labels.setdefault(label, set()).add(size)
    return all(len(one) == 1 for one in labels.values()) and labels.get("m", {1}) == {1}


def _operand(nodes: Mapping[str, Any], reference: str, number: int) -> Any:
    """The copy of a convolution's operand that a product is of; None if something lies between."""
    while (node := nodes.get(node_of(reference))) is not None:
        if _OPERAND in node.attr:
            return node if node.attr[_OPERAND].i == number else None
        if node.op not in _PASSES:
            return None
        reference = node.input[0]
    return None


def _constant(name: str, value: np.ndarray) -> Any:
    proto = tf.make_tensor_proto(value)
    node = node_def_pb2.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = proto.dtype
    node.attr["value"].tensor.CopyFrom(proto)
    node.attr[SHAPES].list.shape.append(tf.TensorShape(value.shape).as_proto())
    return node


class _Nodes:
    """New nodes around a convolution.

    Args:
        body: Of which it is a node.
        node: It.
    """

    def __init__(self, body: Body, node: Any) -> None:
        self._body, self._node = body, node

    def _add(self, op: str, suffix: str, inputs: Iterable[str], shape: Any) -> tuple[Any, str]:
        name = f"{self._node.name}/kdist_{suffix}"
        made = node_def_pb2.NodeDef(name=name, op=op, input=inputs)
        made.attr["T"].type = self._node.attr["T"].type
        self._body.nodes[name] = made
        reference = f"{name}:output:0"
        self._body.note(reference, shape, tf.as_dtype(self._node.attr["T"].type))
        return made, reference

    def _numbers(self, suffix: str, value: Any) -> str:
        name = f"{self._node.name}/kdist_{suffix}"
        return self._body.add_constant(name, np.asarray(value, np.int32))

    def operand(self, suffix: str, source: str, number: int) -> str:
        """A copy that is known again in the program."""
        made, reference = self._add("Identity", suffix, [source], self._body.specs[source].shape)
        made.attr[_OPERAND].i = number
        return reference

    def summed(self, source: str, suffix: str, dims: Sequence[int], *, keep: bool) -> str:
        """A sum over dims."""
        shape = [*self._body.specs[source].shape]
        shape = [1 if i in dims else n for i, n in enumerate(shape) if keep or i not in dims]
        numbers = self._numbers(f"{suffix}_dims", dims)
        made, reference = self._add("Sum", suffix, [source, numbers], shape)
        made.attr["keep_dims"].b, made.attr["Tidx"].type = keep, tf.int32.as_datatype_enum
        return reference

    def expanded(self, source: str, suffix: str) -> str:
        """With one more dim at the end."""
        shape = [*self._body.specs[source].shape, 1]
        at = self._numbers(f"{suffix}_dim", len(shape) - 1)
        made, reference = self._add("ExpandDims", suffix, [source, at], shape)
        made.attr["Tdim"].type = tf.int32.as_datatype_enum
        return reference

    def broadcast(self, source: str, suffix: str, shape: Sequence[int]) -> str:
        """In a shape."""
        numbers = self._numbers(f"{suffix}_shape", shape)
        made, reference = self._add("BroadcastTo", suffix, [source, numbers], shape)
        made.attr["Tidx"].type = tf.int32.as_datatype_enum
        return reference
