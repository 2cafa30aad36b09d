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
    made = _Nodes(rewiring, name, tf.as_dtype(node.attr["Tindices"].type), program.shape(ids))
    begin = made.by_device("begin", _first_rows(rewiring, gather, rows))
    local = made.of_ids("Sub", "local", [ids, begin], "z")
    own = made.within("own", local, rows)
    # An id that is none of the table's fails as it does in a whole one.
    known = made.within("known", ids, rows * len(groups[0]))
    other = made.of_ids("SelectV2", "other", [known, made.constant("none", 0), ids], "output")
    index = made.of_ids("SelectV2", "index", [own, local, other], "output")
    looked = made.like(node, "rows", node.op, [part, index, node.input[2]])
    last = made.constant("last", -1, tf.int32)
    mask = made.add("ExpandDims", "mask", [own, last], made.shape.concatenate([1]))
    mask.attr["T"].type, mask.attr["Tdim"].type = _number(tf.bool), _number(tf.int32)
    dtype = tf.as_dtype(node.attr["Tparams"].type)
    zero = made.constant("zero", 0, dtype)
    inputs = [f"{mask.name}:output:0", f"{looked.name}:output:0", zero]
    kept = made.like(looked, "kept", "SelectV2", inputs, T=dtype)
    rewiring.collective(gather, node, _SUM, f"{kept.name}:output:0", "output")
    summed = rewiring.nodes[name]
    summed.attr["merge_op"].s, summed.attr["final_op"].s = b"Add", b"Id"
    summed.attr["T"].type = _number(dtype)


def _first_rows(rewiring: Rewiring, gather: Any, rows: int) -> list[int]:
    """The first entry of the table that each device has."""
    program = rewiring.program
    if gather.name in program.begins:
        return [begin[0] for begin in program.begins[gather.name]]
    places = {k: place for one in program.groups(gather) for place, k in enumerate(one)}
    return [rows * places[k] for k in range(program.program.size)]


def _number(dtype: tf.DType) -> int:
    return int(dtype.as_datatype_enum)


class _Nodes:
    """New nodes around a look-up.

    Args:
        rewiring: Of the program.
        name: Of the look-up; those of the nodes begin with it.
        dtype: Of ids.
        shape: Of ids.
    """

    def __init__(
        self, rewiring: Rewiring, name: str, dtype: tf.DType, shape: tf.TensorShape
    ) -> None:
        self.rewiring, self.name, self.dtype, self.shape = rewiring, name, dtype, shape

    def add(self, op: str, suffix: str, inputs: Sequence[str], shape: tf.TensorShape) -> Any:
        """Adds a node without attributes but the shape of its result."""
        node = node_def_pb2.NodeDef(name=f"{self.name}/{suffix}", op=op, input=inputs)
        node.attr[SHAPES].list.shape.append(shape.as_proto())
        self.rewiring.nodes[node.name] = node
        self.rewiring.changed = True
        return node

    def of_ids(self, op: str, suffix: str, inputs: Sequence[str], result: str) -> str:
        """Adds an elementwise operation on ids; returns a reference to its result."""
        node = self.add(op, suffix, inputs, self.shape)
        node.attr["T"].type = _number(self.dtype)
        return f"{node.name}:{result}:0"

    def within(self, suffix: str, ids: str, end: int) -> str:
        """Whether ids are from 0 to before an end."""
        bounds = self.constant("none", 0), self.constant(f"{suffix}/end", end)
        least = self.of_ids("GreaterEqual", f"{suffix}/least", [ids, bounds[0]], "z")
        most = self.of_ids("Less", f"{suffix}/most", [ids, bounds[1]], "z")
        return f"{self.add('LogicalAnd', suffix, [least, most], self.shape).name}:z:0"

    def like(
        self, other: Any, suffix: str, op: str, inputs: Sequence[str], **types: tf.DType
    ) -> Any:
        """Adds a node whose result has the shape of another one's.

        With types it has these alone for attributes, without them those of the other.
        """
        node = self.add(op, suffix, inputs, tf.TensorShape(None))
        for key, value in other.attr.items():
            if key == SHAPES or not types:
                node.attr[key].CopyFrom(value)
        for key, dtype in types.items():
            node.attr[key].type = _number(dtype)
        return node

    def constant(self, suffix: str, value: int, dtype: tf.DType | None = None) -> str:
        """Adds a scalar, of the dtype of ids by default, unless it is there."""
        name, dtype = f"{self.name}/{suffix}", dtype or self.dtype
        if name not in self.rewiring.nodes:
            node = self.add("Const", suffix, (), tf.TensorShape([]))
            node.attr["dtype"].type = _number(dtype)
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
        return f"{name}:output:0"

    def by_device(self, suffix: str, values: Sequence[int]) -> str:
        """Adds a scalar that each device has another value of."""
        reference, program = self.constant(suffix, 0), self.rewiring.program
        given = [np.asarray(value, self.dtype.as_numpy_dtype) for value in values]
        program.values[f"{self.name}/{suffix}"] = given
        program.folded.add(f"{self.name}/{suffix}")
        return reference
