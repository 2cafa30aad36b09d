"""Which nodes of a program run again in the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kdist._compat import dtensor_internals
from kdist.config.recompute_blocks import Blocks
from kdist.display.warn import warn
from kdist.dtensor.collectives import COLLECTIVES
from kdist.dtensor.stitching import Stitcher
from kdist.graphs.chunks import Chunk, ProgramGraph, node_of
from kdist.graphs.program_peak import repeated_peak
from kdist.graphs.recompute import Passes, descendants, repeat
from kdist.program.again import OVER_INNER_AXES, Candidates, Nodes, nodes_again
from kdist.stages.node_seconds import operation_seconds

import tensorflow as tf

UNKNOWN = "the sizes of a batch are not known when the step is traced"


def run_again(
    stitcher: Stitcher,
    blocks: Blocks,
    seeds: Collection[str],
    fetched: Collection[str],
    chunks: Callable[[ProgramGraph], Sequence[Chunk]],
    *,
    calls: bool,
) -> None:
    """Has a program compute the nodes of blocks again.

    Args:
        stitcher: Of the program.
        blocks: The model's blocks.
        seeds: Arguments that everything of the backward pass depends on.
        fetched: Arguments that are gathered for every chunk.
        chunks: Cuts the program into chunks.
        calls: Whether each of these is a call, as on one device.
    """
    graph = stitcher.graph
    passes = Passes.of(graph, seeds)
    sizes = ProgramSizes(stitcher)
    nodes = sizes.nodes()
    communication = set(nodes.communication)
    # What communication made on a device stays until another one has read it, too.
    shared = max(map(nodes.nbytes, communication), default=0)

    def peak(again: Sequence[set[str]]) -> int:
        made = repeat(graph, passes, again[0], seeds, fetched)
        found = repeated_peak(
            made,
            passes,
            chunks,
            lambda name: stitcher.nodes[name].op,
            sizes.of,
            calls=calls,
            ordering=communication,
        )
        return found if calls else int(found * OVER_INNER_AXES) + shared

    (again,) = nodes_again([Candidates(graph, passes, blocks, nodes)], blocks, peak)
    made = repeat(graph, passes, again, seeds, fetched)
    if passes.seeded and not made.originals and blocks.layers and blocks.budget is None:
        warn(
            "recompute computes nothing again in a backward pass: of the blocks that it names, the "
            "pass reads nothing that may run twice. What has an effect, and what leaves a block, "
            f"is kept. Name larger blocks, or leave it out. Received: {blocks.describe()}"
        )
    stitcher.repeat(made)


def all_again(stitcher: Stitcher, late: Collection[int]) -> None:
    """Has a backward function of a stage start nothing before the gradient that it is for.

    What it repeats of the forward function is in it already.

    Args:
        stitcher: Of its program.
        late: Numbers of its inputs that come with the gradient.
    """
    names = {one.position: one.name for one in stitcher.program.arguments}
    seeds = {names[i] for i in late if i in names}
    graph = stitcher.graph
    seeded = frozenset(descendants(graph, seeds))
    passes = Passes(frozenset(graph.inputs) - seeded, seeded)
    again = passes.forward - set(map(node_of, graph.results))
    stitcher.repeat(repeat(graph, passes, again, seeds))


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """What `operation_seconds` looks at."""

    shape: tf.TensorShape
    dtype: tf.DType


@dataclasses.dataclass(frozen=True)
class _Operation:
    """A node of a lowered program, as `operation_seconds` looks at it."""

    node_def: Any
    inputs: list[_Tensor]
    outputs: list[_Tensor]

    @property
    def type(self) -> str:
        return str(self.node_def.op)

    def get_attr(self, name: str) -> Any:
        """Of a bool or a text."""
        value = self.node_def.attr[name]
        return getattr(value, value.WhichOneof("value"))


class ProgramSizes:
    """The sizes of a program's tensors on one device."""

    def __init__(self, stitcher: Stitcher) -> None:
        self.stitcher, self.inputs = stitcher, stitcher.graph.inputs
        self._known: dict[str, int] = {}

    def nodes(self) -> Nodes:
        """What is known of the program's nodes."""
        stitcher = self.stitcher
        given = [one.name for one in stitcher.program.arguments if one.position is not None]
        known = all(stitcher.shape(name).is_fully_defined() for name in given)
        return Nodes(
            kind=lambda name: stitcher.nodes[name].op,
            nbytes=lambda name: sum(self.of_results(name)),
            seconds=self._seconds,
            communication={n for n in stitcher.live if stitcher.nodes[n].op in COLLECTIVES},
            unknown="" if known else UNKNOWN,
        )

    def of(self, reference: str) -> int:
        """Bytes of a tensor, 0 if its shape is not known."""
        if reference not in self._known:
            one = self._tensor(reference)
            elements = one.shape.num_elements() if one.shape.is_fully_defined() else 0
            self._known[reference] = elements * (one.dtype.size or 0)
        return self._known[reference]

    def of_results(self, name: str) -> tuple[int, ...]:
        """Bytes of each of a node's results."""
        return tuple(map(self.of, self._results(name)))

    def _results(self, name: str) -> list[str]:
        dtypes = dtensor_internals.output_dtypes(self.stitcher.nodes[name])
        return [f"{name}:{o}:{i}" for o, of in dtypes.items() for i in range(len(of))]

    def _tensor(self, reference: str) -> _Tensor:
        if node_of(reference) in self.stitcher.folded:
            return _Tensor(tf.TensorShape(()), tf.int32)
        dtype = tf.as_dtype(self.stitcher.dtype(reference))
        return _Tensor(self.stitcher.shape(reference), dtype)

    def _seconds(self, name: str) -> float:
        given = [r for r in self.inputs[name] if not r.startswith("^")]
        operation = _Operation(
            self.stitcher.nodes[name],
            [self._tensor(r) for r in given],
            [self._tensor(r) for r in self._results(name)],
        )
        return operation_seconds(operation)
