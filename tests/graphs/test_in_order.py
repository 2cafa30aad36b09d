"""One order of a graph."""

from __future__ import annotations

from kdist.graphs.in_order import peak_in_order
from kdist.graphs.live_tensors import LiveTensors, Op


def op(name: str, nbytes: int, *inputs: str, waits: tuple[str, ...] = ()) -> Op:
    return Op(name, "MatMul", "cpu", tuple((i, 0) for i in inputs), waits, (nbytes,))


def test_a_buffer_is_there_until_its_last_reader_has_run() -> None:
    live = LiveTensors([op("a", 1), op("b", 10, "a"), op("c", 100, "b"), op("d", 2, "c")], [], [])
    assert peak_in_order(live) == 110


def test_it_is_one_order_of_those_that_the_bound_is_for() -> None:
    """Two branches from one value, of which either may wait."""
    ops = [op("a", 1)]
    for side in "xy":
        ops += [op(f"{side}1", 10, "a"), op(f"{side}2", 1, f"{side}1", waits=("x1", "y1"))]
    live = LiveTensors([*ops, op("end", 1, "x2", "y2")], [], [])
    assert peak_in_order(live) == 21 <= live.peak("cpu").nbytes


def test_what_nobody_reads_goes_at_once() -> None:
    assert peak_in_order(LiveTensors([op("a", 5), op("b", 7)], [], [])) == 7
