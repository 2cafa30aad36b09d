"""What DTensor made of a program: the collectives of the per-device graph, read, not predicted.

DTensor lowers a function to one graph that every device of the mesh runs. Its nodes keep the names
of the operations that they serve, with what DTensor added after a slash:

```
net/one/BiasAdd/DTensorAllGatherOp_968192538_12        an all-gather after layer `net/one`
gradient_tape/net/two/MatMul/MatMul/DTensorAllReduceOp_968192538_1
```

On CPU an all-gather *is* a `CollectiveReduceV2` of zero-padded parts; the name tells them apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from kdist._compat import dtensor_internals
from kdist.display.tables import Column, as_text, number
from kdist.graphs.layer_names import ADDED, BACKWARD, layer_of, together

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

_KIND_OF_OP = {
    "CollectiveReduceV2": "all-reduce",
    "CollectiveGatherV2": "all-gather",
    "CollectiveAllToAllV2": "all-to-all",
    "CollectiveReduceScatterV2": "reduce-scatter",
    "CollectiveBcastSendV2": "broadcast",
    "CollectiveBcastRecvV2": "broadcast",
}
_BETWEEN_AXES = "."
_LOSS = "compile_loss/"  # the name scope of a compiled loss
_HANDED_ON = frozenset({"Add", "AddN", "AddV2", "Identity"})


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a lowered program.

    Attributes:
        kind: "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "broadcast" or "other".
        axis: The mesh axes over which devices take part.
        shape: Shape of the result on one device; of an all-gather the gathered tensor, of a
            reduce-scatter what is reduced.
        dtype: Name of its dtype.
        bytes: Size of that result; of a reduce-scatter the size of what is reduced.
        node: Name of the node in the per-device graph.
        layer: Path of the Keras layer that the node serves, empty outside of layers.
        phase: "forward" or "backward".
    """

    kind: str
    axis: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    node: str
    layer: str
    phase: str


@dataclasses.dataclass
class LoweringRecorder:
    """The programs that DTensor lowered while it recorded.

    Attributes:
        programs: Per-device functions by name, each with the bodies of its loops and branches;
            complete when the `record` block has ended.
    """

    programs: dict[str, Sequence[Any]] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def record() -> Iterator[LoweringRecorder]:
    """Notes which programs DTensor lowers within the block.

    DTensor lowers a function at its first call with given shapes and layouts: put that call into
    the block. A later call lowers nothing, and nothing is recorded. The `tf.function` must still
    exist at the end of the block: its programs go with it.

    Example:
    ```python
    with record() as recorder:
        program(x)
    print(format_table(collectives(recorder, mesh)))
    ```
    """
    before = dtensor_internals.lowered_names()
    recorder = LoweringRecorder()
    try:
        yield recorder
    finally:
        new = sorted(dtensor_internals.lowered_names() - before)
        recorder.programs = {name: _with_bodies(name) for name in new}


def collectives(
    recorder: LoweringRecorder, mesh: dtensor.Mesh, layers: Collection[str] = ()
) -> list[Collective]:
    """Reads the collectives of the recorded programs of one mesh.

    Args:
        recorder: What `record` gave.
        mesh: The mesh; programs of other meshes are left out.
        layers: Paths of the model's layers (`layer.path`). With them `Collective.layer` is one of
            these paths; without, the scope as TensorFlow wrote it.

    Returns:
        One entry per collective node, program by program. The body of a loop counts once.
    """
    found: list[Collective] = []
    for definitions in recorder.programs.values():
        graphs = [_Graph(definition) for definition in definitions]
        if any(graph.is_on(mesh) for graph in graphs):
            for graph in graphs:
                found.extend(graph.collectives(mesh, layers))
    return found


def format_table(found: Iterable[Collective]) -> str:
    """Prints collectives grouped by layer, phase, kind and axis, with their number and bytes."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for one in found:
        key = (one.layer or _outside(one), one.phase, one.kind, " x ".join(one.axis) or "-")
        groups.setdefault(key, []).append(one.bytes)
    columns = [Column(title) for title in ("layer", "phase", "kind", "axis")]
    columns += [number(title) for title in ("count", "bytes")]
    rows = [(*key, str(len(sizes)), f"{sum(sizes):,}") for key, sizes in groups.items()]
    everything = [size for sizes in groups.values() for size in sizes]
    total = "total", "", "", "", str(len(everything)), f"{sum(everything):,}"
    return as_text(columns, rows, total=total)


def _outside(one: Collective) -> str:
    """What stands for the layer of a collective that is of none."""
    return "(loss)" if _LOSS in one.node else "-"


class _Graph:
    """One function definition, indexed by node name."""

    def __init__(self, definition: Any) -> None:
        self.nodes = {node.name: node for node in definition.node_def}

    def is_on(self, mesh: dtensor.Mesh) -> bool:
        """Whether the function was lowered for a mesh."""
        wanted = f"mesh:{mesh.to_string()}".encode()
        return any(
            wanted in text for node in self.nodes.values() for text in node.attr["_layout"].list.s
        )

    def collectives(self, mesh: dtensor.Mesh, layers: Collection[str]) -> list[Collective]:
        """Every collective of the function."""
        chosen = [n for n in self.nodes.values() if n.op.startswith("Collective")]
        return [
            self._describe(node, mesh, layers)
            for node in chosen
            if node.op != "CollectiveAssignGroupV2"
        ]

    def _describe(self, node: Any, mesh: dtensor.Mesh, layers: Collection[str]) -> Collective:
        added = ADDED.search(node.name)
        gathers = added is not None and added.group(1) == "AllGather"
        kind = "all-gather" if gathers else _KIND_OF_OP.get(node.op, "other")
        source = node
        if kind == "reduce-scatter":
            source = self._producer(node.input[0]) or node
        shape = tuple(d.size for d in source.attr["_output_shapes"].list.shape[0].dim)
        dtype = tf.DType(node.attr["T"].type)
        terms = self._layers_of_terms(node, layers) if kind == "all-reduce" else ()
        return Collective(
            kind=kind,
            axis=self._axes(node, mesh),
            shape=shape,
            dtype=dtype.name,
            bytes=math.prod(shape) * dtype.size,
            node=node.name,
            layer=layer_of(node.name, layers)
            or together(terms)
            or together(self._layers_of_readers(node, layers)),
            phase="backward" if node.name in self._backward else "forward",
        )

    def _layers_of_terms(self, node: Any, layers: Collection[str]) -> Iterator[str]:
        """Those that made what a collective takes, where it is a sum: DTensor adds up first."""
        waiting, seen = [node.input[0]], set[str]()
        for reference in waiting:
            term = self._producer(reference)
            if term is None or term.name in seen:
                continue
            seen.add(term.name)  # chains of additions are many ways to one of them
            yield (layer := layer_of(term.name, layers))
            if not layer and term.op in _HANDED_ON:
                waiting += [one for one in term.input if not one.startswith("^")]

    def _layers_of_readers(self, node: Any, layers: Collection[str]) -> Iterator[str]:
        """Those that take what a collective gives, where it is a weight that is laid out."""
        waiting, seen = [node.name], set[str]()
        for name in waiting:
            for reader in self._readers.get(name, ()):
                if reader not in seen:
                    seen.add(reader)
                    yield (layer := layer_of(reader, layers))
                    if not layer and self.nodes[reader].op in _HANDED_ON:
                        waiting.append(reader)

    def _producer(self, reference: str) -> Any:
        return self.nodes.get(reference.lstrip("^").split(":")[0])

    def _axes(self, node: Any, mesh: dtensor.Mesh) -> tuple[str, ...]:
        """The axes along which the group of device 0 extends.

        The group key comes from a constant with one key per device of the mesh.
        """
        table = self._producer(node.input[2])
        while table is not None and table.op in ("Reshape", "Squeeze", "Slice", "Identity"):
            table = self._producer(table.input[0])
        if table is None or table.op != "Const":
            return ()
        keys = tf.make_ndarray(table.attr["value"].tensor).reshape(mesh.shape())
        members = np.argwhere(keys == keys.flat[0])
        return tuple(
            axis
            for position, name in enumerate(mesh.dim_names)
            if len(set(members[:, position])) > 1
            for axis in name.split(_BETWEEN_AXES)
        )

    @functools.cached_property
    def _readers(self) -> dict[str, list[str]]:
        """Node or argument -> the nodes that take what it gives."""
        readers: dict[str, list[str]] = {}
        for node in self.nodes.values():
            for reference in node.input:
                if not reference.startswith("^"):  # such an edge only orders collectives
                    readers.setdefault(reference.split(":")[0], []).append(node.name)
        return readers

    @functools.cached_property
    def _backward(self) -> set[str]:
        """The nodes that are, or depend on, nodes of a gradient tape.

        Sums of gradients and re-layouts have no tape in their names; their inputs do.
        """
        readers = self._readers
        waiting = [name for name in {*self.nodes, *readers} if BACKWARD in name]
        found = set(waiting)
        while waiting:
            new = [name for name in readers.get(waiting.pop(), ()) if name not in found]
            found.update(new)
            waiting.extend(new)
        return found


def mesh_dim(axes: Sequence[str]) -> str:
    """Name of the dim of a DTensor mesh that stands for axes of a mesh, one or several."""
    return _BETWEEN_AXES.join(axes)


def _with_bodies(name: str) -> Sequence[Any]:
    """A function definition and those of its loops and branches."""
    pending, seen, found = [name], set(), []
    while pending:
        current = pending.pop(0)
        if current in seen:
            continue
        seen.add(current)
        definition = dtensor_internals.function_def(current)
        found.append(definition)
        for node in definition.node_def:
            for value in node.attr.values():
                functions = [value.func, *value.list.func]
                pending.extend(f.name for f in functions if f.name)
    return found
