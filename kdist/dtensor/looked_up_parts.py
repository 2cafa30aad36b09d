"""Look-ups in tables that are cut by rows: each device looks up what it has, and rows are added up.

DTensor gathers such a table whole for every look-up. A device's part has zeros for all ids but its
own instead, and one all-reduce of rows makes them whole (Shoeybi et al. 2019, Megatron-LM,
arXiv:1909.08053, section 3). Sums with zeros are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.dtensor.alike import are_alike
from kdist.dtensor.device_number import SHAPES
from kdist.dtensor.rewiring import Rewiring
from kdist.graphs.chunks import node_of

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

_SUM = "CollectiveReduceV2"
_GATHERS = frozenset({"CollectiveGatherV2", _SUM})


def look_up_parts(rewiring: Rewiring) -> None:
    """Puts look-ups in parts in the place of look-ups in gathered tables, where rows are fewer."""
    for name in rewiring.program.live:
        gather = rewiring.nodes[name]
        looking = _look_ups(rewiring, gather) if gather.op in _GATHERS else []
        if looking and _is_worth_it(rewiring, looking, gather):
            for node in looking:
                _look_up(rewiring, node, gather)


def _look_ups(rewiring: Rewiring, gather: Any) -> list[Any]:
    """The look-ups by entries in a table that is gathered; none if anything else reads it.

    Nor if devices that add rows up look up different ids: these are cut over the table's axis.
    """
    begins = rewiring.program.begins.get(gather.name)
    if begins is None and gather.op == _SUM or begins and any(any(one[1:]) for one in begins):
        return []
    users = rewiring.users.get(gather.name, [])
    found = [rewiring.nodes.get(name) for name in users]
    if not all(_looks_up(rewiring, one, gather) for one in found):
        return []
    groups = rewiring.program.groups(gather)
    alike = all(are_alike(rewiring, one.input[1], groups) for one in found if one is not None)
    return found if alike else []


def _looks_up(rewiring: Rewiring, node: Any, gather: Any) -> bool:
    if node is None or node.op != "GatherV2" or node_of(rewiring.now(node.input[0])) != gather.name:
        return False
    axis = rewiring.nodes.get(node_of(node.input[2]))
    if axis is None or axis.op != "Const" or tf.make_ndarray(axis.attr["value"].tensor) != 0:
        return False
    # To look up an attribute that is not there would add it.
    by_row = "batch_dims" in node.attr and node.attr["batch_dims"].i
    return not by_row and tf.as_dtype(node.attr["Tparams"].type).is_floating


def _is_worth_it(rewiring: Rewiring, looking: Sequence[Any], gather: Any) -> bool:
    """Whether adding up rows sends less than the table is; so, where their number is not known."""
    program = rewiring.program
    part = program.shape(program.source(gather))
    ids = [program.shape(rewiring.now(node.input[1])) for node in looking]
    if part.rank != 2 or part[0] is None or any(one.rank is None for one in ids):
        return False
    entries = part[0] * len(program.groups(gather)[0])
    return 2 * sum(one.num_elements() or 0 for one in ids) < entries


def _look_up(rewiring: Rewiring, node: Any, gather: Any) -> None:
    program, name = rewiring.program, node.name
    part, ids = program.source(gather), rewiring.now(node.input[1])
    rows, groups = program.shape(part)[0], program.groups(gather)
    entries, shape = rows * len(groups[0]), program.shape(ids)
    first = [0] * program.program.size
    for members in groups:
        for place, k in enumerate(members):
            first[k] = rows * place
    made = _Nodes(rewiring, name, node.attr["Tindices"].type, shape)
    begin = made.by_device("begin", first)
    local = made.add("Sub", "local", ids, begin, result="z")
    own = made.between("own", local, rows)
    known = made.between("known", ids, entries)
    # An id that is none of the table's fails as it does in a whole one.
    other = made.add("SelectV2", "other", known, made.constant("none", 0), ids)
    index = made.add("SelectV2", "index", own, local, other)
    made.copy("rows", node, [part, index, node.input[2]])
    mask = made.add("ExpandDims", "mask", own, made.constant("last", -1, tf.int32), result="output")
    dtype = tf.as_dtype(node.attr["Tparams"].type)
    zero = made.constant("zero", 0, dtype)
    kept = made.add("SelectV2", "kept", mask, f"{name}/rows:output:0", zero, dtype=dtype)
    if SHAPES in node.attr:
        rewiring.nodes[f"{name}/kept"].attr[SHAPES].CopyFrom(node.attr[SHAPES])
    rewiring.collective(gather, node, _SUM, kept, "output")
    summed = rewiring.nodes[name]
    summed.attr["merge_op"].s, summed.attr["final_op"].s = b"Add", b"Id"
    summed.attr["T"].type = dtype.as_datatype_enum


class _Nodes:
    """New nodes around a look-up.

    Args:
        rewiring: Of the program.
        name: Of the look-up.
        dtype: Of ids.
        shape: Of ids.
    """

    def __init__(self, rewiring: Rewiring, name: str, dtype: int, shape: tf.TensorShape) -> None:
        self.rewiring, self.name = rewiring, name
        self.dtype, self.shape = tf.as_dtype(dtype), shape

    def add(
        self, op: str, suffix: str, *inputs: str, result: str = "output", dtype: Any = None
    ) -> str:
        """Adds a node; returns a reference to what it gives."""
        node = self._new(op, suffix, inputs)
        given = dtype or (tf.bool if op == "ExpandDims" else self.dtype)
        if op not in ("LogicalAnd",):
            node.attr["T"].type = given.as_datatype_enum
        if op == "ExpandDims":
            node.attr["Tdim"].type = tf.int32.as_datatype_enum
        shape = self.shape
        if op == "ExpandDims" and shape.rank is not None:
            shape = shape.concatenate([1])
        node.attr[SHAPES].list.shape.append(shape.as_proto())
        return f"{node.name}:{result}:0"

    def between(self, suffix: str, ids: str, end: int) -> str:
        """Whether ids are from 0 to before an end."""
        least = self.add(
            "GreaterEqual", f"{suffix}/least", ids, self.constant("none", 0), result="z"
        )
        most = self.add(
            "Less", f"{suffix}/most", ids, self.constant(f"{suffix}/end", end), result="z"
        )
        return self.add("LogicalAnd", suffix, least, most, result="z")

    def constant(self, suffix: str, value: int, dtype: Any = None) -> str:
        """Adds a scalar, unless it is there."""
        name, dtype = f"{self.name}/{suffix}", dtype or self.dtype
        if name not in self.rewiring.nodes:
            node = self._new("Const", suffix, ())
            node.attr["dtype"].type = dtype.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
            node.attr[SHAPES].list.shape.add()
        return f"{name}:output:0"

    def by_device(self, suffix: str, values: list[int]) -> str:
        """Adds a scalar that each device has another value of."""
        reference, program = self.constant(suffix, 0), self.rewiring.program
        program.values[f"{self.name}/{suffix}"] = [
            np.asarray(value, self.dtype.as_numpy_dtype) for value in values
        ]
        program.folded.add(f"{self.name}/{suffix}")
        return reference

    def copy(self, suffix: str, node: Any, inputs: list[str]) -> None:
        """Adds a copy of a node that takes other things."""
        made = self._new(node.op, suffix, inputs)
        for key, value in node.attr.items():
            made.attr[key].CopyFrom(value)

    def _new(self, op: str, suffix: str, inputs: Any) -> Any:
        node = node_def_pb2.NodeDef(name=f"{self.name}/{suffix}", op=op, input=inputs)
        self.rewiring.nodes[node.name] = node
        self.rewiring.changed = True
        return node
