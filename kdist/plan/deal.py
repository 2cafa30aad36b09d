"""Deals embedding tables to devices, so that each holds and looks up about as much.

A device's load is its share of all bytes and its share of all traffic, as multiples of an even
share. Dealing tables whole is scheduling on identical machines: the largest first, each to the
device with the least (Graham, 1969), then moves and swaps while they help. Cutting a table evens
loads out, and costs every device the reading of all its ids.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

Kind = Literal["whole", "rows", "columns", "host"]
WHOLE: Kind = "whole"
ROWS: Kind = "rows"
COLUMNS: Kind = "columns"
HOST: Kind = "host"

ID_BYTES = 8
# A row on the host travels over a link that is some ten times slower than a device's memory.
HOST_COST = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableLoad:
    """What a table asks of the devices that hold it.

    Attributes:
        name: Unique name.
        rows: Size of its vocabulary.
        dim: Values of a row.
        lookups: Ids that a step looks up in it, duplicates included.
        value_bytes: Bytes of one value.
    """

    name: str
    rows: int
    dim: int
    lookups: int
    value_bytes: int = 4

    def __post_init__(self) -> None:
        for field in ("rows", "dim", "value_bytes"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} of table {self.name!r} must be at least 1: {self}")
        if self.lookups < 0:
            raise ValueError(f"lookups of table {self.name!r} must not be negative: {self}")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dim * self.value_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.rows * self.row_bytes

    @property
    def traffic(self) -> int:
        """Bytes that a step reads of it where it is whole: rows and their ids."""
        return self.lookups * (self.row_bytes + ID_BYTES)


@dataclasses.dataclass(frozen=True)
class Dealt:
    """Where one table goes.

    Attributes:
        kind: "whole" (on one device), "rows" or "columns" (cut over all), or "host".
        device: Position of the device that has a whole table; None otherwise.
    """

    kind: Kind
    device: int | None = None

    def __str__(self) -> str:
        return f"device {self.device}" if self.kind == WHOLE else self.kind


@dataclasses.dataclass(frozen=True)
class Deal:
    """A choice for every table.

    Attributes:
        tables: What was dealt.
        devices: Between how many devices.
        choices: Where each table goes, in order.
    """

    tables: tuple[TableLoad, ...]
    devices: int
    choices: tuple[Dealt, ...]

    @functools.cached_property
    def _shares(self) -> tuple[list[float], list[float], float]:
        nbytes, traffic, host = [0.0] * self.devices, [0.0] * self.devices, 0.0
        for table, choice in zip(self.tables, self.choices, strict=True):
            if choice.kind == HOST:
                host += HOST_COST * table.traffic
            for device, held, read in _on_devices(table, choice, self.devices):
                nbytes[device] += held
                traffic[device] += read
        return nbytes, traffic, host

    @property
    def nbytes(self) -> list[int]:
        """Bytes of tables on each device."""
        return [round(one) for one in self._shares[0]]

    @property
    def traffic(self) -> list[int]:
        """Bytes that a step reads on each device."""
        return [round(one) for one in self._shares[1]]

    @functools.cached_property
    def loads(self) -> list[float]:
        """Each device's load, then the host's: 1 is an even share of bytes and of traffic."""
        nbytes, traffic, host = self._shares
        all_bytes = max(1, sum(t.nbytes for t in self.tables))
        all_traffic = max(1, sum(t.traffic for t in self.tables))
        share = self.devices / 2
        found = [
            share * (held / all_bytes + read / all_traffic)
            for held, read in zip(nbytes, traffic, strict=True)
        ]
        return [*found, share * host / all_traffic]

    @property
    def cost(self) -> float:
        """The largest load: a step waits for the device that has most to do."""
        return max(self.loads)

    def fits(self, capacity: int | None) -> bool:
        """Whether no device holds more than so many bytes."""
        return capacity is None or max(self._shares[0]) <= capacity

    def __str__(self) -> str:
        lines = [
            f"{table.name}: {choice}, {table.nbytes:,} bytes, {table.lookups:,} ids a step"
            for table, choice in zip(self.tables, self.choices, strict=True)
        ]
        loads = ", ".join(f"{one:.2f}" for one in self.loads)
        lines.append(f"load of each device and the host (1 is an even share): {loads}")
        return "\n".join(lines)


def _on_devices(
    table: TableLoad, choice: Dealt, devices: int
) -> Iterator[tuple[int, float, float]]:
    """For each device that has some of it: bytes held, and bytes read in a step."""
    if choice.kind == WHOLE:
        assert choice.device is not None
        yield choice.device, table.nbytes, table.traffic
    elif choice.kind == ROWS:
        ids, rows = table.lookups * ID_BYTES, table.lookups * table.row_bytes
        for device in range(devices):
            held = len(range(device, table.rows, devices))
            yield device, held * table.row_bytes, ids + rows / devices
    elif choice.kind == COLUMNS:
        ids, rows = table.lookups * ID_BYTES, table.lookups * table.row_bytes
        for device in range(devices):
            yield device, table.nbytes / devices, ids + rows / devices


def choices_of(table: TableLoad, devices: int, host: bool) -> list[Dealt]:
    """Where a table may go.

    Args:
        table: The table.
        devices: How many devices there are.
        host: Whether the host takes tables.
    """
    found = [Dealt(WHOLE, device) for device in range(devices)]
    if devices > 1 and table.rows >= devices:
        found.append(Dealt(ROWS))
    if devices > 1 and table.dim % devices == 0:
        found.append(Dealt(COLUMNS))
    return [*found, Dealt(HOST)] if host else found


def deal(
    tables: Iterable[TableLoad],
    devices: int,
    *,
    capacity: int | None = None,
    host: bool = False,
) -> Deal:
    """Deals tables to devices.

    Args:
        tables: What to deal.
        devices: Between how many devices.
        capacity: Bytes of tables that a device may hold; None for any number.
        host: Whether the host's memory, without limit and slow, takes tables too.

    Returns:
        The best deal found; deterministic.

    Raises:
        ValueError: If there is no device, names repeat, or no deal was found that fits.

    Example:
        >>> big = TableLoad(name="big", rows=1000, dim=8, lookups=64)
        >>> small = TableLoad(name="small", rows=1000, dim=8, lookups=64)
        >>> print(deal([big, small], 2).choices[0])
        device 0
    """
    tables = tuple(tables)
    if devices < 1:
        raise ValueError(f"Tables are dealt to at least one device. Received: devices={devices}")
    names = [one.name for one in tables]
    if len(set(names)) != len(names):
        raise ValueError(f"Each table needs a name of its own. Received: {names}")
    options = [choices_of(table, devices, host) for table in tables]
    rank = functools.partial(_rank, capacity=capacity)
    starts = [_greedy(tables, devices, options, rank)]
    for kind in (ROWS, COLUMNS, HOST):
        picked = [_of_kind(given, kind) for given in options]
        starts.append(Deal(tables, devices, tuple(picked)))
    found = min((_improved(one, options, rank) for one in starts), key=rank)
    if not found.fits(capacity):
        raise ValueError(
            f"{devices} devices of {capacity:,} bytes do not hold these tables in any way that was "
            f"tried; the fullest would hold {max(found.nbytes):,}. Give them more room, more "
            "devices, or let the host take tables (host=True)."
        )
    return found


def _of_kind(options: Sequence[Dealt], kind: str) -> Dealt:
    return next((one for one in options if one.kind == kind), options[0])


Rank = Callable[[Deal], tuple[float, float, float]]


def _rank(found: Deal, capacity: int | None) -> tuple[float, float, float]:
    """Less is better: what does not fit, then the largest load, then how uneven they are."""
    over = 0.0
    if capacity is not None:
        over = sum(max(0.0, held - capacity) for held in found._shares[0])
    # Rounded, so that the search does not follow differences that are rounding.
    return over, round(found.cost, 9), round(math.fsum(one * one for one in found.loads), 9)


def _greedy(
    tables: Sequence[TableLoad], devices: int, options: Sequence[Sequence[Dealt]], rank: Rank
) -> Deal:
    """The largest first, each where it does least harm."""
    order = sorted(range(len(tables)), key=lambda i: -(tables[i].nbytes + tables[i].traffic))
    chosen: dict[int, Dealt] = {}
    for i in order:
        known = [tables[j] for j in (*chosen, i)]
        deals = [Deal(tuple(known), devices, (*chosen.values(), one)) for one in options[i]]
        chosen[i] = min(deals, key=rank).choices[-1]
    return Deal(tuple(tables), devices, tuple(chosen[i] for i in range(len(tables))))


def _improved(found: Deal, options: Sequence[Sequence[Dealt]], rank: Rank) -> Deal:
    """Changes one table, or two at once, as long as that helps."""
    while True:
        best = min(_neighbours(found, options), key=rank, default=found)
        if rank(best) >= rank(found):
            return found
        found = best


def _neighbours(found: Deal, options: Sequence[Sequence[Dealt]]) -> Iterator[Deal]:
    def changed(*changes: tuple[int, Dealt]) -> Deal:
        choices = list(found.choices)
        for i, choice in changes:
            choices[i] = choice
        return dataclasses.replace(found, choices=tuple(choices))

    for i, given in enumerate(options):
        yield from (changed((i, one)) for one in given if one != found.choices[i])
    for i, j in itertools.combinations(range(len(options)), 2):
        one, other = found.choices[i], found.choices[j]
        if one != other and other in options[i] and one in options[j]:
            yield changed((i, other), (j, one))
