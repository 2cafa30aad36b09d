"""Which nodes of a program run again in the backward pass, by what was said of their blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from kdist.config.recompute import Blocks
from kdist.graphs.chunks import Graph, node_of
from kdist.graphs.layer_names import BACKWARD
from kdist.graphs.minimum_cut import fewest_kept
from kdist.graphs.recompute import Passes, handed_out
from kdist.program.blocks import block_of

COSTLY = re.compile(
    r".*(MatMul|Conv|Einsum|Random|Sort|TopK|While|If|Call|Cholesky|Svd|Qr|FFT|Pool|Resize).*"
)
"""Types of operations that `selective` does not run again, beside communication."""


def nodes_again(
    graph: Graph,
    passes: Passes,
    blocks: Blocks,
    kind: Callable[[str], str],
    nbytes: Callable[[str], int],
    communication: Collection[str] = (),
) -> set[str]:
    """The forward nodes that may run again.

    Args:
        graph: The program.
        passes: Which of its nodes are what.
        blocks: The model's blocks.
        kind: Tells the type of a node.
        nbytes: Tells the bytes of a node's results; 0 where they are not known.
        communication: Nodes that communicate over inner axes.
    """
    within = {
        name: number
        for name in passes.forward
        if BACKWARD not in name and (number := block_of(name)) is not None
    }
    communication = set(communication)
    # What leaves a block is kept, so that no block waits for the parameters of another one.
    inner = {n: within[n] for n in set(within) - set(handed_out(graph, passes, within))}
    full = {n for n, number in inner.items() if blocks.blocks[number].policy == "full"}
    full = {
        n
        for n in full
        if n not in communication or blocks.blocks[within[n]].setting.mp_comm_recompute
    }
    cheap = {
        n
        for n, number in inner.items()
        if blocks.blocks[number].policy == "selective" and not COSTLY.fullmatch(kind(n))
    } - {*communication, *graph.effects}
    if not cheap:
        return full
    read = {
        node_of(r)
        for name, references in graph.inputs.items()
        if name not in passes.forward
        for r in references
        if not r.startswith("^")
    } & passes.forward
    sizes = {name: nbytes(name) for name in passes.forward}
    return full | (cheap - fewest_kept(graph, sizes, cheap, read))
