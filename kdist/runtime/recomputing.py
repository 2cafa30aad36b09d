"""Which nodes of a program run again in the backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from kdist._compat import dtensor_internals
from kdist.config.recompute import Blocks
from kdist.dtensor.collectives import COLLECTIVES
from kdist.dtensor.stitching import Stitcher
from kdist.graphs.chunks import node_of
from kdist.graphs.layer_names import BACKWARD
from kdist.graphs.recompute import Passes, descendants, repeat
from kdist.program.again import nodes_again

import tensorflow as tf


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
    again = nodes_again(
        graph,
        passes,
        blocks,
        lambda name: stitcher.nodes[name].op,
        lambda name: _nbytes(stitcher, name),
        {n for n in graph.inputs if stitcher.nodes[n].op in COLLECTIVES},
    )
    made = repeat(graph, passes, again, seeds, fetched)
    if passes.seeded and not made.originals:
        warnings.warn(
            "recompute computes nothing again in a backward pass: of the blocks that it names, the "
            "pass reads nothing that may run twice. What has an effect, and what leaves a block, "
            "is kept; under a loss over the whole batch, all of a model with embeddings. Name "
            f"larger blocks, or leave it out. Received: {blocks.describe()}",
            stacklevel=2,
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


def _nbytes(stitcher: Stitcher, name: str) -> int:
    """Bytes of a node's results on one device, as far as their shapes are known."""
    total = 0
    for output, dtypes in dtensor_internals.output_dtypes(stitcher.nodes[name]).items():
        for index, dtype in enumerate(dtypes):
            shape = stitcher.shape(f"{name}:{output}:{index}")
            known = shape.num_elements() if shape.is_fully_defined() else 0
            total += known * (tf.as_dtype(dtype).size or 0)
    return total
