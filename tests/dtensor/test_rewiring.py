"""What is rewired in programs that are written here node by node, and what is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.lowered import Collective
from kdist.dtensor.rewiring import Rewiring
from kdist.dtensor.scattered_sums import scatter
from kdist.dtensor.straight_gathers import straighten
from kdist.graphs.chunks import node_of

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

ROWS = ((0, 0), (2, 0))
"""Where the parts of two devices begin."""
COLUMNS = ((0, 0), (0, 3))


@dataclasses.dataclass(frozen=True)
class Results:
    """Of a program of two devices."""

    results: tuple[str, ...]
    size: int = 2


class Program:
    """What a rewiring has to know of a program of two devices."""

    def __init__(self) -> None:
        self.nodes: dict[str, Any] = {}
        self.live: list[str] = []
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.known_groups: dict[str, Any] = {}
        self.begins: dict[str, Any] = {}
        self.cut_dims: dict[str, int] = {}
        self.recorded: tuple[Collective, ...] = ()

    def add(
        self, name: str, op: str, inputs: Sequence[str], shape: Sequence[int], **attrs: Any
    ) -> None:
        node = node_def_pb2.NodeDef(name=name, op=op, input=inputs)
        node.attr[SHAPES].list.shape.append(tf.TensorShape(shape).as_proto())
        for key, value in attrs.items():
            node.attr[key].s = value
        self.nodes[name] = node
        self.live.append(name)

    def sum(self, name: str, source: str, shape: Sequence[int] = (4, 6)) -> None:
        """An all-reduce over both devices."""
        self.add(name, "CollectiveReduceV2", [source], shape, merge_op=b"Add", final_op=b"Id")
        one = Collective("all-reduce", ("model",), tuple(shape), "float32", 0, name, "", "forward")
        self.recorded += (one,)

    def part(self, name: str, source: str, begins: Any, shape: Sequence[int]) -> None:
        """A slice that begins elsewhere on each device."""
        self.values[f"{name}/begin"] = [np.array(one) for one in begins]
        self.add(name, "Slice", [source, f"{name}/begin:output:0", "size:output:0"], shape)

    def transposed(self, name: str, source: str, order: Sequence[int], shape: Any) -> None:
        made = node_def_pb2.NodeDef(name=f"{name}/order", op="Const")
        made.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.array(order, np.int32)))
        self.nodes[made.name] = made
        self.add(name, "Transpose", [source, f"{name}/order:output:0"], shape)

    def rewire(self, *results: str) -> list[str]:
        """Kinds of its collectives after both passes."""
        self.program = Results(results)
        rewiring = Rewiring(self)
        straighten(rewiring)
        scatter(rewiring)
        if rewiring.changed:
            rewiring.finish()
        return [one.kind for one in self.recorded]

    def inputs_of(self, node: Any) -> list[str]:
        return [self.source(node)] if node.op.startswith("Collective") else list(node.input)

    def source(self, node: Any) -> str:
        return self.sources.get(node.name, node.input[0])

    def groups(self, node: Any) -> Any:
        return self.known_groups.get(node.name, [[0, 1]])

    def shape(self, reference: str) -> tf.TensorShape:
        node = self.nodes.get(node_of(reference))
        return tf.TensorShape(None if node is None else node.attr[SHAPES].list.shape[0])


def test_a_bias_moves_behind_the_sum_of_rows() -> None:
    program = Program()
    program.sum("sum", "product:z:0")
    program.add("biased", "BiasAdd", ["sum:data:0", "bias"], (4, 6))
    program.part("rows", "biased:output:0", ROWS, (2, 6))
    program.add("end", "Tanh", ["rows:output:0"], (2, 6))
    assert program.rewire("end:y:0") == ["reduce-scatter"]
    assert program.cut_dims == {"rows": 0} and program.sources == {"rows": "product:z:0"}
    assert program.nodes["biased"].input[0] == "rows:data:0"
    assert program.shape("biased:output:0") == (2, 6)
    assert program.nodes["end"].input[0] == "biased:output:0"


def test_a_bias_along_the_parts_does_not() -> None:
    for begins, shape, layout in ((COLUMNS, (4, 3), b"NHWC"), (ROWS, (2, 6), b"NCHW")):
        program = Program()
        program.sum("sum", "product:z:0")
        program.add("biased", "BiasAdd", ["sum:data:0", "bias"], (4, 6), data_format=layout)
        program.part("part", "biased:output:0", begins, shape)
        assert program.rewire("part:output:0") == ["all-reduce"] and not program.cut_dims


def test_other_parts_are_not_scattered() -> None:
    """In another order, along two dims, beyond equal parts, or the same for all."""
    for begins, shape in (
        (ROWS[::-1], (2, 6)),
        (((0, 0), (2, 3)), (2, 3)),
        (((0, 0), (1, 0)), (2, 6)),
        (((0, 0), (2, 0)), (1, 6)),
        (((0, 0), (0, 0)), (2, 6)),
    ):
        program = Program()
        program.sum("sum", "product:z:0")
        program.part("part", "sum:data:0", begins, shape)
        assert program.rewire("part:output:0") == ["all-reduce"], (begins, shape)


def test_sums_that_broadcast_are_not_added_up_before() -> None:
    program = Program()
    for name, shape in (("one", (4, 6)), ("two", (4, 6))):
        program.sum(f"sum_{name}", f"{name}:z:0", shape)
        program.part(f"part_{name}", f"sum_{name}:data:0", ROWS, (2, 6))
    program.add("wide", "AddV2", ["part_one:output:0", "part_two:output:0"], (3, 2, 6))
    assert program.rewire("wide:z:0") == ["reduce-scatter"] * 2
    assert [*program.nodes["wide"].input] == ["part_one:data:0", "part_two:data:0"]


def test_what_a_function_with_its_own_gradient_hands_on_does_not_count() -> None:
    """`tf.custom_gradient` gives its results and arguments to one operation."""
    program = Program()
    program.sum("sum", "product:z:0")
    program.part("part", "sum:data:0", ROWS, (2, 6))
    program.add("each", "IdentityN", ["part:output:0", "sum:data:0"], (2, 6))
    assert program.rewire("each:output:0") == ["reduce-scatter"]
    assert program.program.results == ("part:data:0",)
    other = Program()
    other.sum("sum", "product:z:0")
    other.part("part", "sum:data:0", ROWS, (2, 6))
    other.add("each", "IdentityN", ["part:output:0", "sum:data:0"], (2, 6))
    assert other.rewire("each:output:0", "each:output:1") == ["all-reduce"]


def test_gathers_between_transpositions() -> None:
    for order, kept in (((1, 0, 2), False), ((2, 0, 1), True)):
        program = Program()
        program.transposed("before", "x:y:0", (1, 0, 2), (3, 4, 5))
        program.nodes["x"] = node_def_pb2.NodeDef(name="x", op="Tanh")
        program.nodes["x"].attr[SHAPES].list.shape.append(tf.TensorShape((4, 3, 5)).as_proto())
        program.add("gather", "CollectiveGatherV2", ["before:y:0"], (6, 4, 5))
        program.transposed("after", "gather:data:0", order, (4, 6, 5))
        program.rewire("after:y:0")
        assert ("after" in program.begins) is not kept
        if not kept:
            assert program.begins["after"] == [(0, 0, 0), (0, 3, 0)]
            assert program.sources["after"] == "x:y:0"
            assert program.program.results == ("after:data:0",)
