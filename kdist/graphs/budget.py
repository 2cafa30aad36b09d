"""Which forward nodes run again, if what is kept may take so many bytes: those that cost the least.

Backwards through the program, a node is *wanted* if the backward pass reads it or a node that runs
again does. A wanted node is kept, which costs bytes, or runs again, which costs time and makes what
it reads wanted. So what was chosen for later nodes matters through the set of wanted earlier ones
alone, and dynamic programming over that set finds every best trade of bytes for time. Parts of the
program that want nothing of each other, such as blocks, are solved apart and then combined.

Checkmate (Jain et al. 2020, arXiv:1910.02653) states the problem and solves it as an integer
program; the choice over a joint graph is that of PyTorch's `memory_budget` partitioner. Pure
Python.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from kdist.graphs.chunks import ProgramGraph, node_of

STATES = 96
"""Sets of wanted nodes that are followed at a time."""
TRADES = 48
"""Trades that are followed per set, and that a part, or the whole, has in the end."""


@dataclasses.dataclass(frozen=True)
class Trade:
    """One choice: bytes for time.

    Attributes:
        nbytes: Of what is kept.
        seconds: Of what runs again.
        again: What runs again.
    """

    nbytes: int
    seconds: float
    again: frozenset[str] = frozenset()


def best_trades(
    graph: ProgramGraph,
    nbytes: Mapping[str, int],
    seconds: Mapping[str, float],
    repeatable: Collection[str],
    read: Collection[str],
    views: Collection[str] = (),
) -> list[Trade]:
    """The choices of which no other one keeps fewer bytes and repeats less.

    Args:
        graph: The program.
        nbytes: Of the results of each node that may be kept.
        seconds: That each repeatable node takes.
        repeatable: Nodes that may run again.
        read: Nodes whose results the backward pass reads. What may not run again is kept.
        views: Repeatable nodes that take no memory beside what they read, so that keeping them is
            keeping that.

    Returns:
        By rising bytes and falling seconds, about `TRADES`; the first keeps the least, the last
        repeats nothing.
    """
    problem = _Problem(graph, nbytes, seconds, set(repeatable), set(read), set(views))
    base = sum(nbytes.get(n, 0) for n in problem.kept_anyway)
    found = [Trade(base, 0.0)]
    solved: dict[Hashable, list[Trade]] = {}
    for part in problem.parts():
        shape, names = problem.signature(part)
        if shape not in solved:
            index = {name: str(i) for i, name in enumerate(names)}
            solved[shape] = [_renamed(one, index) for one in problem.trades(part)]
        back = {str(i): name for i, name in enumerate(names)}
        mine = [_renamed(one, back) for one in solved[shape]]
        found = _thinned(_pareto(_joined(a, b) for a in found for b in mine))
    return [dataclasses.replace(one, again=problem.without_views(one.again)) for one in found]


def _joined(one: Trade, other: Trade) -> Trade:
    nbytes, seconds = one.nbytes + other.nbytes, one.seconds + other.seconds
    return Trade(nbytes, seconds, one.again | other.again)


def _renamed(one: Trade, names: Mapping[str, str]) -> Trade:
    return dataclasses.replace(one, again=frozenset(names[n] for n in one.again))


def _pareto(trades: Iterable[Trade]) -> list[Trade]:
    """Those that no other one beats, by rising bytes."""
    found: list[Trade] = []
    for one in sorted(trades, key=lambda t: (t.nbytes, t.seconds)):
        if not found or one.seconds < found[-1].seconds:
            found.append(one)
    return found


def _thinned(trades: list[Trade]) -> list[Trade]:
    """At most `TRADES` of them, evenly over the bytes, the first and the last included."""
    if len(trades) <= TRADES:
        return trades
    low, high = trades[0].nbytes, trades[-1].nbytes
    bins: dict[int, Trade] = {}
    for one in trades[:-1]:
        # Of what is about as large the one that repeats least.
        bins[(TRADES - 1) * (one.nbytes - low) // max(high - low, 1)] = one
    return _pareto([trades[0], *bins.values(), trades[-1]])[: TRADES + 2]


class _Problem:
    """What `best_trades` is given, and what follows from it."""

    def __init__(
        self,
        graph: ProgramGraph,
        nbytes: Mapping[str, int],
        seconds: Mapping[str, float],
        repeatable: set[str],
        read: set[str],
        views: set[str],
    ) -> None:
        self.nbytes, self.seconds = nbytes, seconds
        self.read, self.views = read, views & repeatable
        self.sources = {
            n: list(dict.fromkeys(node_of(r) for r in graph.inputs[n] if not r.startswith("^")))
            for n in graph.inputs
            if n in repeatable
        }
        self.position = {n: i for i, n in enumerate(graph.inputs)}
        self.kept_anyway = {n for n in read if n not in self.sources and n in self.position}
        self.reached = self._reached()

    def _reached(self) -> set[str]:
        """Nodes that may be wanted, and of which something is to be decided or paid."""
        found: set[str] = set()
        waiting = [n for n in self.read if n in self.sources]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting.extend(n for n in self.sources.get(name, ()) if n not in self.kept_anyway)
        return {n for n in found if n in self.sources or self.nbytes.get(n)}

    def wants(self, name: str) -> list[str]:
        """What is wanted if a node runs again."""
        return [n for n in self.sources[name] if n in self.reached]

    def without_views(self, again: frozenset[str]) -> frozenset[str]:
        """What runs again, but for views of what is kept."""
        left = set(again)
        for name in sorted(again & self.views, key=self.position.__getitem__):
            if not left.intersection(self.sources[name]):
                left.discard(name)
        return frozenset(left)

    def parts(self) -> list[list[str]]:
        """Nodes in the program's order, by what is connected."""
        parent = {n: n for n in self.reached}

        def root(name: str) -> str:
            while parent[name] != name:
                parent[name] = name = parent[parent[name]]
            return name

        for name in self.reached:
            for source in self.wants(name) if name in self.sources else ():
                parent[root(source)] = root(name)
        found: dict[str, list[str]] = {}
        for name in sorted(self.reached, key=lambda n: self.position.get(n, -1)):
            found.setdefault(root(name), []).append(name)
        return list(found.values())

    def signature(self, part: Sequence[str]) -> tuple[Hashable, Sequence[str]]:
        """What is the same of parts that have the same trades, and the nodes in that order."""
        number = {name: i for i, name in enumerate(part)}
        shape = tuple(
            (
                self.nbytes.get(n, 0),
                self.seconds.get(n, 0.0),
                n in self.read,
                n in self.views,
                tuple(number[s] for s in self.wants(n)) if n in self.sources else None,
            )
            for n in part
        )
        return shape, part

    def trades(self, part: Sequence[str]) -> list[Trade]:
        """The best trades of one part, by dynamic programming from its end."""
        first = frozenset(n for n in part if n in self.read)
        states: dict[frozenset[str], list[Trade]] = {first: [Trade(0, 0.0)]}
        for name in reversed(part):
            found: dict[frozenset[str], list[Trade]] = {}
            for wanted, trades in states.items():
                for left, made in self._decided(name, wanted):
                    mine = found.setdefault(left, [])
                    mine.extend(trades if made is None else [_joined(t, made) for t in trades])
            states = self._few({w: _thinned(_pareto(t)) for w, t in found.items()})
        return _pareto(itertools.chain(*states.values()))

    def _decided(
        self, name: str, wanted: frozenset[str]
    ) -> Iterable[tuple[frozenset[str], Trade | None]]:
        """What may be done with a node: the nodes that are wanted then, and what it costs."""
        if name not in wanted:
            yield wanted, None
            return
        left = wanted - {name}
        if name not in self.views:
            yield left, Trade(self.nbytes.get(name, 0), 0.0)
        if name in self.sources:
            again = Trade(0, self.seconds.get(name, 0.0), frozenset({name}))
            yield left.union(self.wants(name)), again

    def _few(self, states: dict[frozenset[str], list[Trade]]) -> dict[frozenset[str], list[Trade]]:
        """The most promising sets of wanted nodes: those that would keep the fewest bytes now."""
        if len(states) <= STATES:
            return states

        def promise(wanted: frozenset[str]) -> float:
            return states[wanted][0].nbytes + sum(self.nbytes.get(n, 0) for n in wanted)

        ranked = sorted(states, key=promise)
        # Both ends matter: what keeps little, and what repeats little.
        cheap = sorted(states, key=lambda w: states[w][-1].seconds)
        chosen = [*ranked[: STATES // 2], *cheap[: STATES // 2]]
        return {w: states[w] for w in dict.fromkeys(chosen)}


def together(trades: Sequence[Trade]) -> Trade:
    """One choice for several programs, of one for each; names begin with a program's number."""
    return functools.reduce(_joined, map(_numbered, itertools.count(), trades), Trade(0, 0.0))


def joined(programs: Sequence[Sequence[Trade]], held: Sequence[int]) -> list[Trade]:
    """The best choices for several programs, of those for each; see `together`.

    Args:
        programs: The trades of each.
        held: How often a device keeps at a time what each keeps.
    """
    parts = [
        [_numbered(n, dataclasses.replace(t, nbytes=times * t.nbytes)) for t in trades]
        for n, (trades, times) in enumerate(zip(programs, held))
    ]
    return functools.reduce(
        lambda one, other: _thinned(_pareto(_joined(a, b) for a in one for b in other)), parts
    )


def apart(trade: Trade, programs: int) -> list[set[str]]:
    """What runs again of each of several programs."""
    found: list[set[str]] = [set() for _ in range(programs)]
    for name in trade.again:
        number, _, mine = name.partition(":")
        found[int(number)].add(mine)
    return found


def _numbered(number: int, trade: Trade) -> Trade:
    return dataclasses.replace(trade, again=frozenset(f"{number}:{n}" for n in trade.again))


def largest_that_fits(
    trades: Sequence[Trade], peak: Callable[[Trade], int], budget: int
) -> tuple[Trade, int] | None:
    """The trade that repeats least among those that fit, with its peak; None if none does.

    By halving: whatever `peak` says, a larger budget never gives a trade that repeats more.

    Args:
        trades: By falling seconds, as of `best_trades`.
        peak: Bytes that a trade needs at most.
        budget: Bytes that there are.
    """
    low, high, found = 0, len(trades), None
    while low < high:
        middle = (low + high) // 2
        needed = peak(trades[middle])
        if needed <= budget:
            low, found = middle + 1, (trades[middle], needed)
        else:
            high = middle
    return found
