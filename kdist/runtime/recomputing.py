"""Which nodes of a program run again in the backward pass."""

from __future__ import annotations

from collections.abc import Collection

from kdist.config.recompute import Blocks
from kdist.dtensor.collectives import COLLECTIVES
from kdist.dtensor.stitching import Stitcher
from kdist.graphs.chunks import Graph, node_of
from kdist.graphs.layer_names import BACKWARD
from kdist.graphs.recompute import Passes, descendants, handed_out, repeat
from kdist.program.blocks import block_of


def run_again(
    stitcher: Stitcher, blocks: Blocks, seeds: Collection[str], fetched: Collection[str]
) -> None:
    """Has a program compute the nodes of blocks again.

    Args:
        stitcher: Of the program.
        blocks: The model's blocks.
        seeds: Arguments that everything of the backward pass depends on.
        fetched: Arguments that are gathered for every chunk.
    """
    graph = stitcher.graph
    passes = Passes.of(graph, seeds, [n for n in graph.inputs if BACKWARD in n])
    again = _of_blocks(stitcher, graph, passes, blocks)
    stitcher.repeat(repeat(graph, passes, again, seeds, fetched))


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


def _of_blocks(stitcher: Stitcher, graph: Graph, passes: Passes, blocks: Blocks) -> set[str]:
    """The nodes that run again."""
    within = {
        name: number
        for name in passes.forward
        if (number := block_of(name)) is not None and BACKWARD not in name
    }
    again = set(within) - set(handed_out(graph, passes, within))
    return {
        name
        for name in again
        if blocks.blocks[within[name]].setting.mp_comm_recompute
        or stitcher.nodes[name].op not in COLLECTIVES
    }
