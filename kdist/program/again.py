"""Which nodes of a program run again in the backward pass, by what was said of their blocks."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence

from kdist.config.recompute_blocks import Blocks, Choice
from kdist.graphs.budget import Trade, apart, best_trades, joined, largest_that_fits, together
from kdist.graphs.chunks import ProgramGraph, node_of
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
"""What an estimate of a program without stages is raised by there, beside: chunks are no calls, and
parts of a loss may wait longer than it knows."""


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
        held: Micro-batches of which something is kept at a time. 0 if nothing runs between the
            program's forward pass and its backward pass, so that what the last block has inside is
            there when that begins, kept or not.
    """

    kind: Callable[[str], str]
    nbytes: Callable[[str], int]
    seconds: Callable[[str], float]
    communication: Collection[str] = ()
    unknown: str = ""
    later: bool = False
    held: int = 0


class Candidates:
    """The forward nodes of a program that may run again.

    Args:
        graph: The program.
        passes: Which of its nodes are what.
        blocks: The model's blocks.
        nodes: What is known of the nodes.

    Attributes:
        certain: Those that do, by policies "full" and "selective".
        inner: Those of which a budget decides, with their segments.
    """

    def __init__(self, graph: ProgramGraph, passes: Passes, blocks: Blocks, nodes: Nodes) -> None:
        self.graph, self.nodes = graph, nodes
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
            if n not in nodes.communication
            or blocks.blocks[segment.block].setting.mp_comm_recompute
        }
        of_policy = {
            policy: {n for n, one in inner.items() if blocks.blocks[one.block].policy == policy}
            for policy in ("full", "selective", "budget")
        }
        self.read = _read(graph, passes)
        self.certain = of_policy["full"] | self._cheap(of_policy["selective"], passes)
        self.inner = {n: inner[n] for n in of_policy["budget"] - set(graph.effects)}
        self.timed = {n for n in self.inner if not UNTIMED.fullmatch(nodes.kind(n))}
        self.views = {n for n in self.timed if nodes.kind(n) in VIEWS}
        counted = self.timed - self.views
        self.seconds = {n: nodes.seconds(n) if n in counted else 0.0 for n in self.inner}
        self.every = self._needed()

    def _cheap(self, selective: set[str], passes: Passes) -> set[str]:
        """What runs again of blocks of policy "selective"."""
        cheap = {n for n in selective if not COSTLY.fullmatch(self.nodes.kind(n))}
        cheap -= {*self.nodes.communication, *self.graph.effects}
        if not cheap:
            return set()
        sizes = {name: self.nodes.nbytes(name) for name in passes.forward}
        return cheap - fewest_kept(self.graph, sizes, cheap, self.read)

    def trades(self) -> list[Trade]:
        """Bytes for time. What the last segment keeps is free if no other has more inside."""
        sizes = {n: self.nodes.nbytes(n) for n in self.graph.inputs}
        inside: dict[Segment, int] = {}
        for name in self.graph.inputs:
            if name in self.every.again:
                inside[self.inner[name]] = inside.get(self.inner[name], 0) + sizes[name]
        last = [*inside][-1] if inside and not self.nodes.held else None
        others = [inside[n] for n in inside if n != last]
        if last is not None and inside[last] <= max(others, default=0):
            sizes |= {n: 0 for n, one in self.inner.items() if one == last}
        found = best_trades(self.graph, sizes, self.seconds, self.timed, self.read, self.views)
        return [self.every, *found]

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


def nodes_again(
    programs: Sequence[Candidates],
    blocks: Blocks,
    peak: Callable[[Sequence[set[str]]], int],
    where: str = "",
) -> list[set[str]]:
    """The forward nodes that may run again, of each program of a device.

    Args:
        programs: The programs: one, or the chunks of a pipeline's stage.
        blocks: The model's blocks; takes note of what was chosen for a budget.
        peak: Tells the bytes of activations that are there at once if some nodes of each program
            run again.
        where: The stage of a pipeline.

    Raises:
        ValueError: Activations do not fit the budget; of stages that is noted, see `refuse_short`.
    """
    every = together([one.every for one in programs])
    if not any(one.inner for one in programs):
        return [one.certain for one in programs]

    def of(trade: Trade) -> list[set[str]]:
        mine = apart(trade, len(programs))
        return [one.certain | chosen for one, chosen in zip(programs, mine)]

    if any(one.nodes.later for one in programs):
        return of(every)
    unknown = next((one.nodes.unknown for one in programs if one.nodes.unknown), "")
    if unknown:
        name = ", ".join(filter(None, [where, "other sizes" if where in blocks.choices else ""]))
        blocks.choices[name] = Choice(0, every.seconds, every.seconds, unknown)
        return of(every)
    trades = joined(
        [one.trades() for one in programs], [max(one.nodes.held, 1) for one in programs]
    )
    return of(_chosen([every, *trades], lambda trade: peak(of(trade)), blocks, where))


def _chosen(
    trades: Sequence[Trade], peak: Callable[[Trade], int], blocks: Blocks, where: str
) -> Trade:
    """The trade for a budget; see `nodes_again`.

    Args:
        trades: The first runs everything again.
        peak: Tells the bytes of activations that are there at once.
        blocks: See `nodes_again`.
        where: See `nodes_again`.
    """
    assert blocks.budget is not None
    peaks: dict[frozenset[str], int] = {}

    def needed(trade: Trade) -> int:
        if trade.again not in peaks:
            peaks[trade.again] = int(RAISED * peak(trade))
        return peaks[trade.again]

    total = trades[0].seconds
    trades = sorted(trades, key=lambda t: -t.seconds)
    found = largest_that_fits(trades, needed, blocks.budget)
    # Halving may pass by a trade that fits, since what repeats less may need less.
    least = trades[0] if found else min(trades, key=needed)
    if found is None and needed(least) > blocks.budget:
        blocks.short[where] = needed(least)
        if not where:
            refuse_short(blocks)
        return least
    trade, most = found or (least, needed(least))
    mine = Choice(most, trade.seconds, total)
    # A last batch of an epoch has fewer rows: the largest program is told of.
    if (known := blocks.choices.get(where)) is None or known.seconds <= mine.seconds:
        blocks.choices[where] = mine
    return trade


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


def _read(graph: ProgramGraph, passes: Passes) -> set[str]:
    """Forward nodes that the backward pass reads."""
    found = {
        node_of(r)
        for name, references in graph.inputs.items()
        if name not in passes.forward
        for r in references
        if not r.startswith("^")
    }
    return found & passes.forward
