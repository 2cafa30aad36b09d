"""Convolutions, and other operations that look at windows, of which channels are cut.

DTensor runs them on parts of the batch alone, or not at all. What one is lowered as instead has the
dims that may be cut, and no window: of a convolution a product of the channels, once per place of
the result, of others something that is done for each element. DTensor lays that out, adds it up,
and sends what it must; in the program of one device the operation takes its place, on the parts
that are there.

A convolution by filters (columns) sends nothing; by the channels that it takes (rows) its results
are added up (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3, of matrix products).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kdist.dtensor.body import Body, control_inputs, data_inputs
from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.window_rules import (
    GIVEN,
    RULES,
    Rule,
    follows,
    has_whole_windows,
    places,
    spatial,
)
from kdist.graphs.chunks import node_of

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

_NUMBER = "_kdist_windows"
"""The number of an operation, on what stands for it."""
_OPERAND = "_kdist_windows_of"
"""On a copy of an operand: `_MOST` times that number, and its position."""
_MOST = 4
"""More than the operands of an operation."""
_ADDED = "/kdist_operand_"
"""Comes after an operation's name in those of other nodes that stand for it."""
_PASSES = frozenset({"Sum", "BroadcastTo", "ExpandDims", "Reshape", "Squeeze", "Identity", "Cast"})
"""What may stand between an operand and what stands for the operation; nothing that sends."""
_INT32 = tf.int32.as_datatype_enum


class StandIns:
    """What stands for operations of a traced function that look at windows.

    Args:
        body: The function; its nodes are changed.

    Attributes:
        kinds: Which are there: true for convolutions, false for others. Before, all are as they
            were traced.
    """

    def __init__(self, body: Body) -> None:
        self._body = body
        self.kinds: set[bool] = set()
        self._numbers: dict[str, int] = {}
        self._originals: dict[str, Any] = {}

    def stand(self, chosen: dict[str, str]) -> None:
        """Puts in all of them.

        Args:
            chosen: Islands, with reasons, to which what has no stand-in is added.
        """
        self._put_in({True, False}, chosen)

    def stand_for(self, names: Iterable[str], chosen: dict[str, str]) -> bool:
        """Puts in those for the kinds of some operations, if there are none yet; says whether.

        Args:
            names: Of operations that DTensor cannot expand, or expands wrongly.
            chosen: See `stand`.
        """
        ops = [self._body.nodes[name].op for name in names if name in self._body.nodes]
        kinds = {convolves(op) for op in ops if op in RULES} - self.kinds
        if True in kinds:  # what convolutions make may be pooled
            kinds |= {False} - self.kinds
        self._put_in(kinds, chosen)
        return bool(kinds)

    def _put_in(self, kinds: set[bool], chosen: dict[str, str]) -> None:
        body = self._body
        self.kinds |= kinds
        for name in [one for one in body.nodes if one not in chosen] if kinds else ():
            node = body.nodes[name]  # it may read what has another name by now
            rule = RULES.get(node.op)
            if rule is None:
                inside = [one.op for f in body.called(node) for one in f.node_def]
                if True in kinds and any(map(convolves, inside)):
                    chosen[name] = "a convolution inside a function"
            elif rule.convolves not in kinds:
                continue
            elif not _is_sized(body, node):
                chosen[name] = f"{node.op} of unknown size"
            elif _is_known(body, node, rule):
                self._stand_in(len(self._numbers), node, rule)

    def left(self, found: Mapping[str, str], chosen: dict[str, str]) -> dict[str, str]:
        """Puts operations back into the function, where what stands for them is to be an island.

        Args:
            found: Reasons by name of nodes, those of stand-ins among them.
            chosen: Islands, to which these are added.

        Returns:
            The other nodes, with their reasons.
        """
        others: dict[str, str] = {}
        for name, why in found.items():
            of = name.partition(_ADDED)[0]
            if of in self._originals:
                self._body.nodes[of] = original = self._originals.pop(of)
                self._rename(of, GIVEN, RULES[original.op].name)
            (chosen if of in self._numbers else others)[of] = why
        return others

    def _rename(self, name: str, before: str, now: str) -> None:
        """Has nodes and results read the result of a node by another name."""
        if before == now:
            return
        body, old, new = self._body, f"{name}:{before}:0", f"{name}:{now}:0"
        body.redirect({old: new}, body.nodes)
        for key, original in self._originals.items():
            if old in original.input:
                self._originals[key] = copy = node_def_pb2.NodeDef()
                copy.CopyFrom(original)
                copy.input[:] = [new if one == old else one for one in original.input]
        body.note(new, body.specs[old].shape, body.specs[old].dtype)
        body.made[name] = [new]

    def put_back(self, definition: Any) -> dict[str, str]:
        """Puts the operations into the program of one device.

        Args:
            definition: The program.

        Returns:
            Those that cannot be, by name, and why: something lies between one and its operands.
        """
        nodes = {node.name: node for node in definition.node_def}
        by_number = {number: name for name, number in self._numbers.items()}
        missing = set(self._originals)
        failed: dict[str, str] = {}
        renamed: dict[str, str] = {}
        for node in [*definition.node_def]:
            if _NUMBER not in node.attr:
                continue
            number = node.attr[_NUMBER].i
            name = by_number[number]
            rule = RULES[self._originals[name].op]
            read = zip(rule.operands, data_inputs(node), strict=True)
            operands = {i: _operand(nodes, one, _MOST * number + i) for i, one in read}
            if self._has_whole_windows(name, node, operands):
                missing.discard(name)
                renamed[f"{node.name}:{GIVEN}:0"] = f"{node.name}:{rule.name}:0"
                definition.node_def.extend(self._put_back(name, node, operands))
            else:
                failed[name] = "its operands are laid out in another way than its result"
        for node in definition.node_def:
            if any(one in renamed for one in node.input):
                node.input[:] = [renamed.get(one, one) for one in node.input]
        for key, one in [*definition.ret.items()]:
            definition.ret[key] = renamed.get(one, one)
        return {**failed, **dict.fromkeys(missing - set(failed), "DTensor made something else")}

    def _has_whole_windows(self, name: str, node: Any, operands: Mapping[int, Any]) -> bool:
        """Whether a device has all that an operation takes for its part of the result.

        What stands for it would be right without.

        Args:
            name: Of the operation.
            node: What stands for it in the program.
            operands: Copies of its operands there, None where something lies between.
        """
        if any(one is None or not one.attr[SHAPES].list.shape for one in operands.values()):
            return False
        original = self._originals[name]
        (result,) = self._body.made_by(original)
        read = data_inputs(original)
        given = {i: (self._body.specs[read[i]].shape, _here(one)) for i, one in operands.items()}
        return has_whole_windows(RULES[original.op], given, (result.shape, _here(node)))

    def _put_back(self, name: str, node: Any, operands: Mapping[int, Any]) -> Iterator[Any]:
        """Makes a node the operation that it stands for; yields what that needs besides."""
        original = self._originals[name]
        rule, shape = RULES[original.op], np.asarray(_here(node), np.int32)
        read, waits = data_inputs(original), control_inputs(node)
        inputs = {i: one.name for i, one in operands.items()}
        constants = ((i, self._body.constant(read[i])) for i in rule.constants)
        besides = {i: value for i, value in constants if value is not None}
        if rule.sizes is not None:
            besides[rule.sizes] = shape
        for i, value in besides.items():
            inputs[i] = f"{node.name}/kdist_input_{i}"
            yield _constant(inputs[i], value)
        if rule.shaped is not None:
            inputs[rule.shaped] = f"{node.name}/kdist_input_{rule.shaped}"
            dtype = self._body.specs[read[rule.shaped]].dtype
            yield from _zeros(inputs[rule.shaped], dtype, shape)
        kept = {key: node.attr[key] for key in (SHAPES, "_layout") if key in node.attr}
        kept = {
            key: type(value).FromString(value.SerializeToString()) for key, value in kept.items()
        }
        every = [f"{inputs[i]}:output:0" for i in range(len(read))]
        node.op, node.input[:] = original.op, [*every, *waits]
        node.attr.clear()
        for key, value in (*original.attr.items(), *kept.items()):
            node.attr[key].CopyFrom(value)
        if "Tshape" in node.attr:  # of the sizes
            node.attr["Tshape"].type = tf.int32.as_datatype_enum

    def _stand_in(self, number: int, node: Any, rule: Rule) -> None:
        body, name, read = self._body, node.name, data_inputs(node)
        (result,) = body.made_by(node)
        there = places(rule.result, result.shape)
        operands: list[str] = []
        for i, dims in rule.operands.items():
            made = _Operand(body, f"{name}{_ADDED}{i}", read[i], _MOST * number + i)
            here = spatial(dims, body.specs[read[i]].shape)
            if rule.convolves and operands:
                made.sum(here, keep=False)
            elif rule.convolves or places(dims, body.specs[read[i]].shape) != there:
                made.sum(here, keep=True)
                if rule.one_each:
                    made.expand()
                made.broadcast(here, there)
            made.cast(result.dtype)
            operands.append(made.reference)
        stands = node_def_pb2.NodeDef(name=name, op=rule.stand_in)
        stands.input.extend([*operands, *control_inputs(node)])
        stands.attr["T"].type = result.dtype.as_datatype_enum
        if rule.convolves:
            stands.attr["N"].i = len(operands)
            stands.attr["equation"].s = rule.equation(len(there)).encode()
        stands.attr[_NUMBER].i = number
        body.nodes[name] = stands
        self._rename(name, rule.name, GIVEN)
        self._originals[name], self._numbers[name] = node, number


def convolves(op: str) -> bool:
    """Whether a type of operations is one of convolutions."""
    return op in RULES and RULES[op].convolves


def _is_sized(body: Body, node: Any) -> bool:
    """Whether all sizes are known."""
    specs = [*body.made_by(node), *body.read_by(node)]
    return all(spec.shape.is_fully_defined() for spec in specs)


def _is_known(body: Body, node: Any, rule: Rule) -> bool:
    """Whether an operation does as its rule says."""
    made, read = body.made_by(node), data_inputs(node)
    if len(made) != 1 or any(body.constant(read[i]) is None for i in rule.constants):
        return False
    shapes = {i: body.specs[read[i]].shape for i in rule.operands}
    return follows(rule, node, shapes, made[0].shape)


def _here(node: Any) -> list[int]:
    """The shape of what a node of a program makes on a device."""
    return [dim.size for dim in node.attr[SHAPES].list.shape[0].dim]


def _operand(nodes: Mapping[str, Any], reference: str, number: int) -> Any:
    """The copy of an operand that something stands on; None if something lies between."""
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


def _zeros(name: str, dtype: tf.DType, shape: np.ndarray) -> Iterator[Any]:
    """Nodes that make a tensor of a shape, the last of which has the name."""
    dims = _constant(f"{name}_dims", shape)
    zero = _constant(f"{name}_zero", np.zeros((), dtype.as_numpy_dtype))
    node = node_def_pb2.NodeDef(name=name, op="Fill")
    node.input.extend([f"{one.name}:output:0" for one in (dims, zero)])
    node.attr["T"].type = dtype.as_datatype_enum
    node.attr["index_type"].type = tf.int32.as_datatype_enum
    node.attr[SHAPES].list.shape.append(tf.TensorShape(shape.tolist()).as_proto())
    yield from (dims, zero, node)


class _Operand:
    """What stands for an operand: a copy of it, which is known again in the program, and on.

    Args:
        body: Of which the nodes are.
        name: Begins their names.
        source: The operand.
        number: To write on the copy.

    Attributes:
        reference: Of the last of the nodes.
    """

    def __init__(self, body: Body, name: str, source: str, number: int) -> None:
        self._body, self._name = body, name
        self.reference = source
        copy = self._add("Identity", "", [], self._shape())
        copy.attr[_OPERAND].i = number

    def _shape(self) -> list[int]:
        return [*self._body.specs[self.reference].shape]

    def _add(
        self,
        op: str,
        suffix: str,
        numbers: Sequence[Any],
        shape: Sequence[int],
        dtype: tf.DType | None = None,
    ) -> Any:
        """Adds a node that takes what there is, and numbers; it gives another dtype if told."""
        body, name = self._body, self._name + suffix
        dtype = dtype or body.specs[self.reference].dtype
        constants = [
            body.add_constant(f"{name}_{i}", np.asarray(one, np.int32))
            for i, one in enumerate(numbers)
        ]
        made = node_def_pb2.NodeDef(name=name, op=op, input=[self.reference, *constants])
        made.attr["T"].type = dtype.as_datatype_enum
        body.nodes[name] = made
        self.reference = f"{name}:{'y' if op == 'Cast' else GIVEN}:0"
        body.note(self.reference, shape, dtype)
        return made

    def sum(self, dims: Sequence[int], *, keep: bool) -> None:
        """Adds up over dims, which are left out, or are kept of size 1."""
        shape = [1 if dim in dims else size for dim, size in enumerate(self._shape())]
        shape = [size for dim, size in enumerate(shape) if keep or dim not in dims]
        made = self._add("Sum", "_summed", [dims], shape)
        made.attr["keep_dims"].b, made.attr["Tidx"].type = keep, _INT32

    def expand(self) -> None:
        """Adds a dim of size 1 at the end."""
        shape = self._shape()
        made = self._add("ExpandDims", "_expanded", [len(shape)], [*shape, 1])
        made.attr["Tdim"].type = _INT32

    def cast(self, dtype: tf.DType) -> None:
        """Gives another dtype: what is resized is a float32, whatever it was."""
        before = self._body.specs[self.reference].dtype
        if before != dtype:
            made = self._add("Cast", "_cast", [], self._shape(), dtype)
            del made.attr["T"]
            made.attr["SrcT"].type, made.attr["DstT"].type = (
                one.as_datatype_enum for one in (before, dtype)
            )

    def broadcast(self, dims: Sequence[int], sizes: Sequence[int]) -> None:
        """Gives dims of size 1 others."""
        new = dict(zip(dims, sizes, strict=True))
        shape = [new.get(dim, size) for dim, size in enumerate(self._shape())]
        self._add("BroadcastTo", "_placed", [shape], shape).attr["Tidx"].type = _INT32
