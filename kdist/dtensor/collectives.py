"""What the collectives of a lowered program become where one graph spans all devices of a slice.

A collective is an ordinary operation on one member of its group: the others' values come to it, and
its result goes to them; to another process once. `TABLE` says which. Sums over cards are NCCL's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.storage import nccl
from kdist.storage.transfer import process_of

import numpy as np
import tensorflow as tf

COLLECTIVES = frozenset(
    {
        "CollectiveReduceV2",
        "CollectiveGatherV2",
        "CollectiveAllToAllV2",
        "CollectiveReduceScatterV2",
        "CollectiveBcastSendV2",
        "CollectiveBcastRecvV2",
    }
)
BY_ONE = frozenset({"CollectiveReduceV2", "CollectiveGatherV2"})
"""Those of which one member computes what all get."""
_RESULT = {
    **dict.fromkeys(("Maximum", "Minimum", "Mul", "RealDiv", "LogicalOr", "LogicalAnd"), "z"),
    "AddN": "sum",
    "NcclReduce": "data",
    "Cast": "y",
}
_PAIRWISE = {"Max": "Maximum", "Min": "Minimum", "Mul": "Mul"}
_LOGICAL = {"Add": "LogicalOr", "Max": "LogicalOr", "Mul": "LogicalAnd", "Min": "LogicalAnd"}
Block = tuple[tuple[int, ...], str]
"""Where a part of a tensor begins in each dim, and the part."""


class CannotStitch(Exception):
    """A lowered program has something that has no place in one graph; carries what."""


@dataclasses.dataclass
class CollectiveNodes:
    """Devices that take part in a collective together, and the nodes that it becomes.

    Attributes:
        definition: The function that the nodes are added to.
        devices: Of the slice.
        name: Of the collective, different for each group.
        members: Numbers of the devices that take part, in their order.
        parts: What each member gives, as references.
        dtype: Of the values, as an enumeration value.
        root: The member that computes what all members get.
        dim: Of which each member gets a part, where each gets another.
        nodes: The nodes, by name.
    """

    definition: Any
    devices: Sequence[str]
    name: str
    members: Sequence[int]
    parts: Sequence[str]
    dtype: int
    root: int
    dim: int = 0
    nodes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(
        self, op: str, suffix: str, device: int, inputs: Sequence[str], **attrs: int | bytes
    ) -> str:
        """Adds a node; attributes with a T are dtypes, others numbers or texts."""
        node = self.definition.node_def.add(
            op=op, name=f"{self.name}/{suffix}", device=self.devices[device]
        )
        node.input.extend(inputs)
        for key, value in attrs.items():
            kind = "s" if isinstance(value, bytes) else "type" if "T" in key else "i"
            setattr(node.attr[key], kind, value)
        self.nodes[node.name] = node
        return f"{node.name}:{_RESULT.get(op, 'output')}:0"

    def constant(self, suffix: str, device: int, value: Any) -> str:
        """Adds a constant."""
        return add_constant(
            self.definition, f"{self.name}/{suffix}", self.devices[device], np.asarray(value)
        )

    def concat(self, suffix: str, device: int, parts: Sequence[str], dim: int) -> str:
        """Adds a concatenation."""
        axis = self.constant(f"{suffix}/axis", device, np.int32(dim))
        n = len(parts)
        return self.add("ConcatV2", suffix, device, [*parts, axis], N=n, T=self.dtype, Tidx=_INT32)

    def sum(self, suffix: str, device: int, parts: Sequence[str]) -> str:
        """Adds a sum, at a member, of what all members have."""
        members, count = [self.devices[k] for k in self.members], len(parts)
        dtype = _WIDER.get(self.dtype, self.dtype)
        if not nccl.adds_up(members, self.devices[device], dtype):
            return self.add_up(suffix, device, parts)
        terms = []
        for k, part in zip(self.members, parts, strict=True):
            wide = self._cast(f"{suffix}/wide{k}", k, part, self.dtype, dtype)
            terms.append(self.add("Identity", f"{suffix}/of{k}", k, [wide], T=dtype))
        attrs: dict[str, Any] = {"reduction": b"sum", "num_devices": count, "T": dtype}
        total = self.add("NcclReduce", suffix, device, terms, **attrs)
        return self._cast(f"{suffix}/rounded", device, total, dtype, self.dtype)

    def add_up(self, suffix: str, device: int, terms: Sequence[str]) -> str:
        """Adds an addition at a device; bfloat16 is added in float32, and rounded once."""
        dtype = _WIDER.get(self.dtype, self.dtype)
        wide = [
            self._cast(f"{suffix}/wide{i}", device, term, self.dtype, dtype)
            for i, term in enumerate(terms)
        ]
        total = self.add("AddN", suffix, device, wide, N=len(terms), T=dtype)
        return self._cast(f"{suffix}/rounded", device, total, dtype, self.dtype)

    def _cast(self, suffix: str, device: int, value: str, of: int, to: int) -> str:
        if of == to:
            return value
        return self.add("Cast", suffix, device, [value], SrcT=of, DstT=to)

    def split(self) -> list[list[str]]:
        """Adds a split of what each member has into a part for every member."""
        count, found = len(self.members), []
        for j, (k, part) in enumerate(zip(self.members, self.parts, strict=True)):
            axis = self.constant(f"split{j}/axis", k, np.int32(self.dim))
            self.add("Split", f"split{j}", k, [axis, part], num_split=count, T=self.dtype)
            found.append([f"{self.name}/split{j}:output:{i}" for i in range(count)])
        return found


_INT32 = tf.int32.as_datatype_enum
# Of what is added in another dtype, and rounded once.
_WIDER = {tf.bfloat16.as_datatype_enum: tf.float32.as_datatype_enum}


def add_constant(definition: Any, name: str, device: str, value: np.ndarray) -> str:
    """Adds a constant to a function; returns a reference to it."""
    node = definition.node_def.add(op="Const", name=name, device=device)
    proto = tf.make_tensor_proto(value)
    node.attr["dtype"].type = proto.dtype
    node.attr["value"].tensor.CopyFrom(proto)
    return f"{name}:output:0"


def reduce(node: Any, group: CollectiveNodes) -> list[str]:
    """An all-reduce: one member adds up, and sends to the others what it gets."""
    merge, final = node.attr["merge_op"].s.decode(), node.attr["final_op"].s.decode()
    root, parts = group.root, group.parts
    if group.dtype == tf.bool.as_datatype_enum and merge in _LOGICAL:
        value = parts[0]
        for j, other in enumerate(parts[1:]):
            value = group.add(_LOGICAL[merge], f"merge{j}", root, [value, other])
    elif merge == "Add":
        value = _sum(group, "sum", root, parts)
    elif merge in _PAIRWISE:
        value = parts[0]
        for j, other in enumerate(parts[1:]):
            op = _PAIRWISE[merge]
            value = group.add(op, f"merge{j}", root, [value, other], T=group.dtype)
    else:
        raise CannotStitch(f"a reduction by {merge}")
    if final == "Div":
        numpy_dtype = tf.as_dtype(group.dtype).as_numpy_dtype
        count = group.constant("count", root, np.asarray(len(parts), numpy_dtype))
        value = group.add("RealDiv", "mean", root, [value, count], T=group.dtype)
    elif final not in ("Id", ""):
        raise CannotStitch(f"a reduction that ends in {final}")
    return _to_all(group, value)


def _sum(group: CollectiveNodes, suffix: str, root: int, all_parts: Sequence[str]) -> str:
    """The sum of what members have, at one of them: each process adds up its own first."""
    by_process: dict[Any, list[tuple[int, str]]] = {}
    for k, part in zip(group.members, all_parts, strict=True):
        by_process.setdefault(process_of(group.devices[k]), []).append((k, part))
    if len(by_process) < 2:
        return group.sum(suffix, root, all_parts)
    terms = []
    for number, mine in enumerate(by_process.values()):
        term = mine[0][1]
        if len(mine) > 1:
            parts = [part for _, part in mine]
            k = mine[0][0]
            own = f"{suffix}/own{number}"
            term = group.add_up(own, k, parts)
        terms.append(term)
    return group.add_up(suffix, root, terms)


def _to_all(group: CollectiveNodes, value: str) -> list[str]:
    """What each member reads of a value at the root: it goes to another process once."""
    arrived = {process_of(group.devices[group.root]): value}
    for k in group.members:
        process = process_of(group.devices[k])
        if process not in arrived:
            arrived[process] = group.add("Identity", f"at{k}", k, [value], T=group.dtype)
    return [arrived[process_of(group.devices[k])] for k in group.members]


def gather(node: Any, group: CollectiveNodes) -> list[str]:
    """An all-gather along dim 0."""
    return _to_all(group, group.concat("gather", group.root, group.parts, 0))


def all_to_all(node: Any, group: CollectiveNodes) -> list[str]:
    """Member i gets the i-th block of each member's rows, one after the other."""
    blocks = group.split()
    return [
        group.concat(f"joined{i}", k, [mine[i] for mine in blocks], 0)
        for i, k in enumerate(group.members)
    ]


def reduce_scatter(node: Any, group: CollectiveNodes) -> list[str]:
    """Member i gets the sum of the i-th blocks that all members have."""
    merge = node.attr["merge_op"].s.decode()
    if merge != "Add":
        raise CannotStitch(f"a reduce-scatter by {merge}")
    blocks = group.split()
    return [
        _sum(group, f"sum{i}", k, [mine[i] for mine in blocks]) for i, k in enumerate(group.members)
    ]


TABLE: Mapping[str, Callable[[Any, CollectiveNodes], list[str]]] = {
    "CollectiveReduceV2": reduce,
    "CollectiveGatherV2": gather,
    "CollectiveAllToAllV2": all_to_all,
    "CollectiveReduceScatterV2": reduce_scatter,
}
"""By operation: what each member gets, for a node and a group."""


def gather_blocks(group: CollectiveNodes, begins: Sequence[Sequence[int]]) -> list[str]:
    """An all-gather along any dims, of parts that begin where it is said."""
    blocks = [(tuple(map(int, b)), part) for b, part in zip(begins, group.parts, strict=True)]
    return _to_all(group, _joined(group, "gather", blocks))


def _joined(group: CollectiveNodes, suffix: str, blocks: Sequence[Block]) -> str:
    """Concatenates blocks along the first dim in which they differ, each of them along others."""
    if len(blocks) == 1:
        return blocks[0][1]
    begins = np.array([begin for begin, _ in blocks])
    differs = [len(set(column)) > 1 for column in begins.T]
    if not any(differs):
        raise CannotStitch("a gather of parts that overlap")
    dim = differs.index(True)
    rows: dict[int, list[Block]] = {}
    for begin, part in sorted(blocks):
        rows.setdefault(begin[dim], []).append((begin, part))
    parts = [_joined(group, f"{suffix}/{j}", row) for j, row in enumerate(rows.values())]
    return group.concat(suffix, group.root, parts, dim)
