"""What may be alive at once, in graphs made by hand."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from kdist.graphs.live_tensors import LiveTensors, Op, kinds

import pytest

HERE, THERE = "/device:CPU:0", "/device:CPU:1"


def op(name: str, kind: str, *inputs: str, nbytes: Any = 8, device: str = HERE, **more: Any) -> Op:
    """An operation; inputs as "name" or "name:1"."""
    outputs = nbytes if isinstance(nbytes, tuple) else (nbytes,)
    read = tuple((i.split(":")[0], int((i.split(":") + ["0"])[1])) for i in inputs)
    more["waits"] = tuple(more.get("waits", ()))
    return Op(name, kind, device, read, nbytes=outputs, **more)


def live(*ops: Op, gradients: Any = (), parameters: Any = (), **more: Any) -> LiveTensors:
    return LiveTensors(ops, gradients, parameters, **more)


def names(found: LiveTensors, device: str = HERE, **of: Any) -> list[str]:
    return sorted(t.output[0] for t in found.peak(device, **of).tensors)


def test_results_take_the_place_of_what_is_read_unless_a_call_makes_them() -> None:
    chain = [op("a", "Exp"), op("b", "Exp", "a"), op("c", "Exp", "b")]
    assert live(*chain).peak(HERE).nbytes == 8
    calls = [op("a", "Exp"), op("b", "Call", "a", call=True), op("c", "Exp", "b")]
    assert names(live(*calls)) == ["a", "b"]


def test_what_nothing_orders_may_be_there_together() -> None:
    gathers = [op(f"gather_{k}", "ConcatV2", nbytes=8) for k in range(3)]
    uses = [op("use_0", "Call", "gather_0", nbytes=1, call=True)]
    uses += [op(f"use_{k}", "Call", f"gather_{k}", f"use_{k - 1}", nbytes=1, call=True)
             for k in (1, 2)]  # fmt: skip
    assert live(*gathers, *uses).peak(HERE).nbytes >= 24


def test_a_gate_keeps_them_apart() -> None:
    """The same, where a gather waits for the use before the last."""
    ops = [op("gather_0", "ConcatV2"), op("gather_1", "ConcatV2"), op("start", "Exp", nbytes=1)]
    ops += [op("use_0", "Call", "gather_0", "start", nbytes=1, call=True)]
    ops += [op("use_1", "Call", "gather_1", "use_0", nbytes=1, call=True)]
    ops += [op("gather_2", "ConcatV2", waits=["use_0"])]
    ops += [op("use_2", "Call", "gather_2", "use_1", nbytes=1, call=True)]
    found = live(*ops)
    assert found.peak(HERE).nbytes < 24
    assert len([n for n in names(found) if n.startswith("gather")]) == 2


def test_a_view_keeps_what_it_looks_at() -> None:
    ops = [op("a", "Exp"), op("v", "Reshape", "a"), op("w", "Identity", "v")]
    ops += [op("b", "Exp", nbytes=8, waits=["v"]), op("end", "_Retval", "w", "b", nbytes=())]
    found = live(*ops)
    assert names(found) == ["a", "b"]
    assert {t.output[0] for t in found.tensors} == {"a", "b"}


def test_a_variable_is_not_counted_again() -> None:
    ops = [op("handle", "_Arg"), op("read", "ReadVariableOp", "handle", nbytes=64)]
    assert live(*ops, op("v", "Identity", "read", nbytes=64)).tensors == []


def test_what_nothing_reads_is_gone_at_once() -> None:
    ops = [op("a", "Call", nbytes=(4, 8), call=True), op("b", "Exp", "a", nbytes=16)]
    assert live(*ops).peak(HERE).nbytes == 16
    assert names(live(*ops[:1])) == ["a", "a"]


def test_what_the_function_returns_stays() -> None:
    ops = [op("a", "Exp"), op("c", "Exp", "a", nbytes=1), op("b", "Exp", waits=["c"])]
    assert names(live(*ops)) in (["a", "c"], ["b"])
    assert names(live(*ops, op("out", "_Retval", "a", nbytes=()))) == ["a", "b"]


def test_a_transfer_is_a_copy_unless_memory_is_shared() -> None:
    ops = [op("a", "Exp", device=THERE), op("r", "_Recv", "a"), op("b", "Exp", "r")]
    copied = live(*ops)
    assert (copied.peak(THERE).nbytes, copied.peak(HERE).nbytes) == (8, 8)
    assert names(copied) in (["b"], ["r"])
    shared = live(*ops, shared_memory=True)
    assert names(shared) == ["b"] and names(shared, THERE) == ["a"]


def test_order_goes_through_other_devices() -> None:
    """The sum there needs both messages; what comes back cannot meet what was sent."""
    ops = [op("a", "Exp"), op("sent", "_Recv", "a", device=THERE)]
    ops += [op("sum", "AddN", "sent", device=THERE), op("back", "_Recv", "sum")]
    assert names(live(*ops, op("use", "Exp", "back", nbytes=1))) in (["a"], ["back"])


def test_merge_waits_for_one_input_only() -> None:
    ops = [op("a", "Exp"), op("b", "Exp", nbytes=1), op("use", "Exp", "a", nbytes=1)]
    ops += [op("merge", "Merge", "use", "b", nbytes=1), op("c", "Exp", waits=["merge"])]
    assert names(live(*ops))[:2] == ["a", "c"]


def test_a_loop_is_read() -> None:
    ops = [op("a", "Exp"), op("enter", "Enter", "a"), op("merge", "Merge", "enter", "next")]
    ops += [op("body", "Exp", "merge"), op("next", "NextIteration", "body")]
    assert live(*ops).peak(HERE).nbytes >= 8


# -- kinds -----------------------------------------------------------------------------------


def test_gradients_are_followed_to_their_use() -> None:
    ops = [op("call", "Call", nbytes=(8, 8), call=True), op("axis", "Const")]
    ops += [op("flat", "Reshape", "call:0"), op("matrix", "ConcatV2", "flat", "other", "axis")]
    ops += [op("other", "Exp"), op("rows", "Unpack", "matrix", nbytes=(4, 4))]
    ops += [op("got", "_Recv", "rows:1", device=THERE), op("sum", "AddN", "got", device=THERE)]
    ops += [op("square", "Square", "sum", device=THERE)]
    found = kinds(LiveTensors(ops, (), ()).ops.values(), [("call", 0)], [])
    assert set(found.values()) == {"gradient"}
    names = {"call", "flat", "matrix", "rows", "got", "sum"}
    assert {name for name, _ in found} == names and ("call", 1) not in found


def test_what_gradients_are_summed_from_is_gradient_too() -> None:
    ops = [op("one", "Call", call=True), op("two", "Call", call=True)]
    ops += [op("both", "AddN", "one", "two"), op("view", "Identity", "both")]
    found = kinds(ops, [("view", 0)], [])
    assert {name for name, _ in found} == {"one", "two", "both", "view"}


def test_gathered_is_what_has_a_part_from_elsewhere() -> None:
    ops = [op("mine", "ReadVariableOp"), op("far", "ReadVariableOp", device=THERE)]
    ops += [op("got", "_Recv", "far"), op("axis", "Const"), op("own", "ConcatV2", "mine", "axis")]
    ops += [op("whole", "ConcatV2", "mine", "got", "axis"), op("use", "MatMul", "whole")]
    ops += [op("mixed", "ConcatV2", "got", "use", "axis")]
    found = kinds(ops, [], ["mine", "far"])
    assert found == {("got", 0): "gathered", ("whole", 0): "gathered"}


def test_new_values_from_elsewhere_are_gathered_too() -> None:
    """The rows of two owners, joined on one of them and assigned here and there."""
    ops = [op("size", "Const"), op("mine", "Sub"), op("far", "Sub", device=THERE)]
    ops += [op("got", "_Recv", "far"), op("all", "Pack", "mine", "got"), op("norm", "Exp", "mine")]
    ops += [op("part", "SplitV", "all", "size", "size"), op("v", "VarHandleOp")]
    ops += [op("write", "AssignVariableOp", "v", "part", nbytes=())]
    found = kinds(ops, [], [], ["write"])
    assert {name for name, _ in found} == {"got", "all", "part"}
    assert set(found.values()) == {"gathered"}
    assert kinds(ops, [], []) == {}


def test_a_peak_counts_what_is_asked_for() -> None:
    ops = [op("g", "Call", call=True), op("o", "Exp", nbytes=64)]
    ops += [op("use", "Call", "g", "o", nbytes=1, call=True)]
    found = live(*ops, gradients=[("g", 0)])
    assert found.peak(HERE, ("gradient",)).nbytes == 8
    assert found.peak(HERE, ("gathered",)).nbytes == 0
    assert found.peak(HERE, ("gradient", "other")).nbytes == found.peak(HERE).nbytes == 73


@pytest.mark.parametrize("device", ["/device:CPU:7"])
def test_a_device_without_tensors(device: str) -> None:
    assert live(op("a", "Exp")).peak(device).nbytes == 0


def test_what_was_analysed_goes() -> None:
    """With its graph, which is large, when nobody has it any more."""
    found = live(op("a", "Add"), op("b", "Add", "a"))
    assert names(found)
    gone = weakref.ref(found)
    del found
    gc.collect()
    assert gone() is None
