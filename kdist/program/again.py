"""Which nodes of a program run again in the backward pass, by what was said of their blocks."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping

from kdist.config.recompute_blocks import Blocks, Choice
from kdist.graphs.budget import Trade, best_trades, largest_that_fits
from kdist.graphs.chunks import Graph, node_of
from kdist.graphs.layer_names import BACKWARD
from kdist.graphs.live_tensors import VIEWS
from kdist.graphs.minimum_cut import fewest_kept
from kdist.graphs.recompute import Passes, handed_out
from kdist.program.blocks import Segment, segment_of

COSTLY = re.compile(
    r".*(MatMul|Conv|Einsum|Random|Sort|TopK|While|If|Call|Cholesky|Svd|Qr|FFT|Pool|Resize).*"
)
"""Types of operations that `selective` does not run again, beside communication."""
UNTIMED = re.compile(r".*(While|If|Case|Call)$")
"""Types of operations whose time is not estimated; `budget` repeats them if all is repeated."""
MB = 2**20
RAISED = 1.05
"""What estimates of peaks are raised by. Executed steps were up to 2 % above them, since TensorFlow
rewrites what it is given."""
OVER_INNER_AXES = 1.05
"""What an estimate is raised by there, beside: chunks and stages are no calls, and parts of a loss
may wait longer than it knows."""


@dataclasses.dataclass(frozen=True)
class Nodes:
    """What is known of the nodes of a program.

    Attributes:
        kind: Tells the type of a node.
        nbytes: Tells the bytes of a node's results on one device; 0 where they are not known.
        seconds: Estimates how long a node runs.
        communication: Those that communicate over inner axes.
        unknown: Why sizes are not known, "" if they are.
        later: Whether sizes will be known when the program is traced once more.
        once: Whether the program's backward pass follows its forward pass, so that what the last
            block has inside is there when it begins, kept or not.
    """

    kind: Callable[[str], str]
    nbytes: Callable[[str], int]
    seconds: Callable[[str], float]
    communication: Collection[str] = ()
    unknown: str = ""
    later: bool = False
    once: bool = True


def nodes_again(
    graph: Graph,
    passes: Passes,
    blocks: Blocks,
    nodes: Nodes,
    peak: Callable[[set[str]], int],
    where: str = "",
) -> set[str]:
    """The forward nodes that may run again.

    Args:
        graph: The program.
        passes: Which of its nodes are what.
        blocks: The model's blocks; takes note of what was chosen for a budget.
        nodes: What is known of the nodes.
        peak: Tells the bytes of activations that are there at once if some nodes run again.
        where: The stage of a pipeline.

    Raises:
        ValueError: Activations do not fit the budget; of stages that is noted, see `refuse_short`.
    """
    within = {
        name: segment
        for name in passes.forward
        if BACKWARD not in name and (segment := segment_of(name)) is not None
    }
    # What leaves a segment is kept, so that none waits for the parameters of another one.
    inner = {n: within[n] for n in set(within) - set(handed_out(graph, passes, within))}
    inner = {
        n: segment
        for n, segment in inner.items()
        if n not in nodes.communication or blocks.blocks[segment.block].setting.mp_comm_recompute
    }
    of_policy = {
        policy: {n for n, one in inner.items() if blocks.blocks[one.block].policy == policy}
        for policy in ("full", "selective", "budget")
    }
    again = of_policy["full"]
    cheap = {n for n in of_policy["selective"] if not COSTLY.fullmatch(nodes.kind(n))}
    cheap -= {*nodes.communication, *graph.effects}
    read = _read(graph, passes)
    if cheap:
        sizes = {name: nodes.nbytes(name) for name in passes.forward}
        again = again | (cheap - fewest_kept(graph, sizes, cheap, read))
    if of_policy["budget"]:
        mine = {n: inner[n] for n in of_policy["budget"] - set(graph.effects)}
        choosing = _Choosing(graph, nodes, mine, read, again)
        return again | choosing.chosen(blocks, peak, where)
    return again


def refuse_short(blocks: Blocks) -> None:
    """Refuses a budget that some stages do not fit, once all of them are known.

    Raises:
        ValueError: With the least that all fit.
    """
    if not blocks.short:
        return
    assert blocks.budget is not None
    where = max(blocks.short, key=blocks.short.__getitem__)
    least = blocks.short[where]
    blocks.short.clear()
    raise ValueError(
        f"With all that may run again, activations need {_up(least):g} MB "
        f"on a device{f' of {where}' if where else ''}. Give budget_mb at least that, "
        f"or name larger blocks. Received: budget_mb={blocks.budget / MB:.4g}"
    )


def _up(nbytes: int) -> float:
    """In MB, by four digits, rounded up."""
    digits = 3 - math.floor(math.log10(max(nbytes, 1) / MB))
    return math.ceil(nbytes / MB * 10**digits) / 10**digits


def _read(graph: Graph, passes: Passes) -> set[str]:
    """Forward nodes that the backward pass reads."""
    found = {
        node_of(r)
        for name, references in graph.inputs.items()
        if name not in passes.forward
        for r in references
        if not r.startswith("^")
    }
    return found & passes.forward


class _Choosing:
    """Chooses what runs again for a budget.

    Args:
        graph: The program.
        nodes: What is known of its nodes.
        inner: Nodes that may run again, with their segments.
        read: Nodes that the backward pass reads.
        others: What other blocks run again.
    """

    def __init__(
        self,
        graph: Graph,
        nodes: Nodes,
        inner: Mapping[str, Segment],
        read: set[str],
        others: set[str],
    ) -> None:
        self.graph, self.nodes, self.inner, self.others = graph, nodes, inner, others
        self.read = read
        views = {n for n in inner if nodes.kind(n) in VIEWS}
        self.timed = {n for n in inner if not UNTIMED.fullmatch(nodes.kind(n))}
        self.views = views & self.timed
        counted = self.timed - self.views
        self.seconds = {n: nodes.seconds(n) if n in counted else 0.0 for n in inner}
        self.every = self._needed()

    def chosen(self, blocks: Blocks, peak: Callable[[set[str]], int], where: str) -> set[str]:
        """The nodes; see `nodes_again`."""
        assert blocks.budget is not None
        total = sum(self.seconds[n] for n in self.every.again)
        if self.nodes.later:
            return set(self.every.again)
        if self.nodes.unknown:
            name = ", ".join(
                filter(None, [where, "other sizes" if where in blocks.choices else ""])
            )
            blocks.choices[name] = Choice(0, total, total, self.nodes.unknown)
            return set(self.every.again)
        peaks: dict[frozenset[str], int] = {}

        def needed(trade: Trade) -> int:
            if trade.again not in peaks:
                peaks[trade.again] = int(RAISED * peak(self.others | trade.again))
            return peaks[trade.again]

        trades = sorted([self.every, *self._trades()], key=lambda t: -t.seconds)
        found = largest_that_fits(trades, needed, blocks.budget)
        # Halving may pass by a trade that fits, since what repeats less may need less.
        least = trades[0] if found else min(trades, key=needed)
        if found is None and needed(least) > blocks.budget:
            blocks.short[where] = needed(least)
            if not where:
                refuse_short(blocks)
            return set(least.again)
        trade, most = found or (least, needed(least))
        mine = Choice(most, sum(self.seconds[n] for n in trade.again), total)
        # A last batch of an epoch has fewer rows: the largest program is told of.
        if (known := blocks.choices.get(where)) is None or known.seconds <= mine.seconds:
            blocks.choices[where] = mine
        return set(trade.again)

    def _trades(self) -> list[Trade]:
        """Bytes for time. What the last segment keeps is free if no other has more inside."""
        sizes = {n: self.nodes.nbytes(n) for n in self.graph.inputs}
        inside: dict[Segment, int] = {}
        for name in self.graph.inputs:
            if name in self.every.again:
                inside[self.inner[name]] = inside.get(self.inner[name], 0) + sizes[name]
        last = [*inside][-1] if inside and self.nodes.once else None
        others = [inside[n] for n in inside if n != last]
        if last is not None and inside[last] <= max(others, default=0):
            sizes |= {n: 0 for n, one in self.inner.items() if one == last}
        return best_trades(self.graph, sizes, self.seconds, self.timed, self.read, self.views)

    def _needed(self) -> Trade:
        """The choice to run everything again."""
        found: set[str] = set()
        waiting: list[str] = list(self.read)
        while waiting:
            name = waiting.pop()
            if name in self.inner and name not in found:
                found.add(name)
                data: Iterable[str] = self.graph.inputs[name]
                waiting.extend(node_of(r) for r in data if not r.startswith("^"))
        return Trade(0, sum(self.seconds[n] for n in found), frozenset(found))
