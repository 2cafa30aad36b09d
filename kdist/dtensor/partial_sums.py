"""Gradients as the sums that DTensor would make of them: the all-reduce over one axis left out.

Where an axis cuts the batch, a gradient is a sum over that axis. The program that DTensor made adds
it up, so that every device has all of it. The update adds up as well: in buckets, compressed, on
the owner of each part. So here the program is changed to hand out summands, one per coordinate of
the axis: what follows the all-reduce and is linear is computed on them instead. Where something
else makes a gradient of what every device has (a penalty of weights, a batch that the axis does
not divide), the first coordinate's is the only summand, and the others' are zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist._compat import dtensor_internals
from kdist.dtensor.collectives import COLLECTIVES
from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.lowered import Collective
from kdist.graphs.chunks import node_of

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

if TYPE_CHECKING:
    from kdist.dtensor.stitching import Stitcher

MARK = "_kdist_summed"


def summand(tensor: Any) -> Any:
    """A copy of a tensor of which programs hand out summands, if it is a result of theirs."""
    made = tf.identity(tensor)
    dtensor_internals.tag(made, MARK, 1)
    return made


def marked(concrete: Any) -> list[int]:
    """Numbers of the flat results of a concrete function that `summand` made."""
    return [i for i, tensor in enumerate(concrete.outputs) if _is_marked(tensor.op)]


def _is_marked(operation: Any) -> bool:
    """Looks through the copies that TensorFlow returns."""
    while operation.type == "Identity":
        if MARK in operation.node_def.attr:
            return True
        operation = operation.inputs[0].op
    return False


# Linear in one input, by its position. What a device computes from sums without a collective, it
# computes from tensors that are the same along the axis: so the other inputs are.
_LINEAR: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(("Identity", "StopGradient", "PreventGradient", "Cast", "Neg"), (0,)),
    **dict.fromkeys(("Reshape", "Transpose", "ExpandDims", "Squeeze", "Tile"), (0,)),
    **dict.fromkeys(("Slice", "StridedSlice", "Pad", "BroadcastTo", "Sum", "GatherV2"), (0,)),
    **dict.fromkeys(("SplitV", "Unpack", "RealDiv"), (0,)),
    "Split": (1,),
    **dict.fromkeys(("Mul", "MatMul", "BatchMatMulV2"), (0, 1)),
}
# Linear in all inputs that are tensors of numbers together: sums, and tensors put together.
_JOINS = frozenset({"Add", "AddV2", "AddN", "Sub", "Pack", "ConcatV2"})
_REDUCTIONS = frozenset({"CollectiveReduceV2", "CollectiveGatherV2"})


@dataclasses.dataclass(frozen=True)
class Summed:
    """What is summed over an axis outside of a program.

    Attributes:
        axis: The axis, a dim of the program's mesh.
        numbers: Of the flat results that are to be summands.
    """

    axis: str
    numbers: Collection[int]


class Summands:
    """Changes the nodes of a program so that some results are summands.

    Args:
        program: What stitches the program; it gets nodes.
        summed: What is to be summands.

    Attributes:
        axis: The axis.
        results: References of the program's results, summands among them.
        alone: Numbers of results of which the first coordinate has all.
        left: Names of the collectives that summands are taken of, and of those over the other axes
            of their groups; "" without others.
    """

    def __init__(self, program: Stitcher, summed: Summed) -> None:
        self.program, self.nodes = program, program.nodes
        axes = program.program.axes
        position = list(axes).index(summed.axis)
        self.place = np.indices(list(axes.values()))[position].ravel()
        """Per device, its coordinate on the axis."""
        others = np.arange(len(self.place)).reshape(list(axes.values()))
        lines = np.moveaxis(others, position, -1).reshape(-1, axes[summed.axis])
        self.lines = [frozenset(map(int, line)) for line in lines]
        """The devices that differ on the axis alone."""
        self._known: dict[str, str | None] = {}
        self.axis = summed.axis
        self.alone: set[int] = set()
        self.left: dict[str, str] = {}
        results = program.program.results
        self.results = tuple(
            self._summand_or_first(i, reference) if i in summed.numbers else reference
            for i, reference in enumerate(results)
        )

    def not_left(
        self, collectives: Sequence[Collective], live: Collection[str]
    ) -> tuple[Collective, ...]:
        """The collectives that DTensor wrote, but for those that summands are taken of.

        Args:
            collectives: Those of the program.
            live: Names of the nodes that results and effects need.
        """
        found = []
        for one in collectives:
            within = self.left.get(one.node)
            if within is None or one.node in live:
                found.append(one)
            if within is not None and within in live:
                rest = tuple(name for name in one.axis if name != self.axis)
                found.append(dataclasses.replace(one, axis=rest, node=within))
        return tuple(found)

    def _summand_or_first(self, number: int, reference: str) -> str:
        summand = self.summand(reference)
        if summand is None:
            self.alone.add(number)
            return self._on_first(reference)
        return summand

    def summand(self, reference: str) -> str | None:
        """A tensor whose sum along the axis is another one; None if there is none but that."""
        if reference not in self._known:
            node = self.nodes.get(node_of(reference))
            self._known[reference] = None if node is None else self._made(node, reference)
        return self._known[reference]

    def _made(self, node: Any, reference: str) -> str | None:
        if node.op in COLLECTIVES:
            return self._of_collective(node, reference)
        if node.op in _JOINS:
            return self._of_join(node, reference)
        if node.op == "Cast" and not tf.as_dtype(node.attr["SrcT"].type).is_floating:
            return None
        inputs = list(node.input)
        for i in _LINEAR.get(node.op, ()):
            summand = self.summand(inputs[i])
            if summand is not None:
                inputs[i] = summand
                return self._copy(node, reference, inputs)
        return None

    def _of_join(self, node: Any, reference: str) -> str | None:
        """Of a sum, or of tensors put together, some of which have summands."""
        data = len(node.input) - (node.op == "ConcatV2")
        found = [self.summand(one) for one in node.input[:data]]
        if all(one is None for one in found):
            return None
        inputs = [
            self._on_first(given) if one is None else one
            for one, given in zip(found, node.input, strict=False)
        ]
        return self._copy(node, reference, [*inputs, *node.input[data:]])

    def _of_collective(self, node: Any, reference: str) -> str | None:
        """Of an all-reduce over the axis and others: that over the others."""
        source = self.program.source(node)
        groups = self.program.groups(node)
        if self._apart(groups):
            summand = self.summand(source)
            return None if summand is None else self._collective(node, reference, summand, groups)
        if not is_sum(node) or node.name in self.program.begins or not self._closed(groups):
            return None
        within = [
            [k for k in members if self.place[k] == place]
            for members in groups
            for place in sorted({self.place[k] for k in members})
        ]
        if all(len(members) == 1 for members in within):
            self.left[node.name] = ""
            return source
        result = self._collective(node, reference, source, within)
        self.left[node.name] = node_of(result)
        return result

    def _collective(
        self, node: Any, reference: str, source: str, groups: Sequence[Sequence[int]]
    ) -> str:
        """A collective of another tensor."""
        inputs, old = [source, *node.input[1:]], node.name
        if old in self.program.begins:
            padded = self.nodes[node_of(node.input[0])]
            made = self._copy(padded, node.input[0], [*padded.input[:4], source])
            inputs[0] = made
        result = self._copy(node, reference, inputs)
        name = node_of(result)
        if old in self.program.begins:
            self.program.begins[name] = self.program.begins[old]
        self.program.known_groups[name] = [list(members) for members in groups]
        return result

    def _copy(self, node: Any, reference: str, inputs: Sequence[str]) -> str:
        """A reference to the same output of a copy of a node that takes other inputs."""
        copy = node_def_pb2.NodeDef()
        copy.CopyFrom(node)
        copy.name = f"{node.name}/summand"
        del copy.input[:]
        copy.input.extend(one for one in inputs if not one.startswith("^"))
        self.nodes[copy.name] = copy
        return copy.name + reference[len(node.name) :]

    def _on_first(self, reference: str) -> str:
        """A tensor on the devices that come first on the axis, and zeros on the others."""
        dtype = self.program.dtype(reference)
        first = f"kdist_first_{dtype}"
        if first not in self.nodes:
            kind = tf.as_dtype(dtype).as_numpy_dtype
            constant = node_def_pb2.NodeDef(name=first, op="Const")
            constant.attr["dtype"].type = dtype
            self.nodes[first] = constant
            self.program.folded.add(first)
            self.program.values[first] = [np.asarray(p == 0, kind) for p in self.place]
        name = f"{reference.replace(':', '_')}/on_first"
        if name not in self.nodes:
            node = node_def_pb2.NodeDef(name=name, op="MulNoNan")
            node.input.extend([reference, f"{first}:output:0"])
            node.attr["T"].type = dtype
            node.attr[SHAPES].list.shape.append(self.program.shape(reference).as_proto())
            self.nodes[name] = node
        return f"{name}:z:0"

    def _apart(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether no group leaves its coordinate of the axis, and they are alike on all."""
        if any(len({self.place[k] for k in members}) > 1 for members in groups):
            return False
        line = {k: n for n, one in enumerate(self.lines) for k in one}
        found = {tuple(line[k] for k in members) for members in groups}
        return len(found) * len(self.lines[0]) == len(groups)

    def _closed(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether every group has whole lines along the axis."""
        return all(line <= set(m) or not line & set(m) for m in groups for line in self.lines)


def is_sum(node: Any) -> bool:
    """Whether a collective adds up, and nothing else."""
    if node.op != "CollectiveReduceV2":
        return False
    merge, final = (node.attr[key].s.decode() for key in ("merge_op", "final_op"))
    return merge == "Add" and final in ("Id", "")
