"""Programs in which forward nodes run again give what they gave, and nothing runs too early."""

from __future__ import annotations

from typing import Any

from kdist.graphs.chunks import ProgramGraph, cut, node_of, whole_blocks
from kdist.graphs.recompute import (
    AGAIN,
    GATE,
    Passes,
    Repeated,
    ancestors,
    descendants,
    handed_out,
    repeat,
)

import hypothesis
from hypothesis import strategies as st


def chain(count: int) -> ProgramGraph:
    """Products and activations with their backward pass, which reads inputs of both."""
    inputs: dict[str, list[str]] = {}
    x = "x"
    for i in range(count):
        inputs[f"mul{i}"] = [x, f"w{i}"]
        inputs[f"act{i}"] = [f"mul{i}:0:0"]
        x = f"act{i}:0:0"
    inputs["loss"] = [x]
    inputs["start"] = ["scale", x]
    d = "start:0:0"
    for i in reversed(range(count)):
        inputs[f"slope{i}"] = [f"mul{i}:0:0"]  # of the forward pass alone
        inputs[f"dmul{i}"] = [d, f"slope{i}:0:0"]
        inputs[f"dw{i}"] = [f"dmul{i}:0:0", f"act{i - 1}:0:0" if i else "x"]
        inputs[f"dx{i}"] = [f"dmul{i}:0:0", f"w{i}"]
        d = f"dx{i}:0:0"
    return ProgramGraph(inputs, ["loss:0:0", *(f"dw{i}:0:0" for i in range(count))])


def again(graph: ProgramGraph, nodes: set[str], fetched: tuple[str, ...] = ()) -> Repeated:
    return repeat(graph, Passes.of(graph, {"scale"}), nodes, {"scale"}, fetched)


def test_what_the_backward_pass_reads_is_computed_again_from_what_is_kept() -> None:
    found = again(chain(2), {"mul0", "act0", "mul1"})
    assert set(found.originals) == {AGAIN + "mul0", AGAIN + "act0", AGAIN + "mul1"}
    inputs = found.graph.inputs
    assert inputs["slope1"] == (f"{AGAIN}mul1:0:0",)
    assert inputs["dw1"] == ("dmul1:0:0", f"{AGAIN}act0:0:0")
    # The first use is where the gradient arrives.
    gate, waits = f"{GATE}dmul1", f"^{GATE}dmul1/arrival0"
    assert found.gates == {
        f"{gate}/arrival0": ("start:0:0",),
        f"{gate}/0": ("w0", waits),
        f"{gate}/1": ("w1", waits),
        f"{gate}/2": ("x", waits),
    }
    assert inputs[f"{AGAIN}mul0"] == (f"{gate}/2:output:0", f"{gate}/0:output:0")


def test_each_copy_waits_for_its_own_gradient() -> None:
    found = again(chain(3), {"mul0", "mul2"})
    # Nor does anything run while a copy from before is still read.
    assert found.gates[f"{GATE}dmul1/arrival0"] == ("dx2:0:0", "^slope2")
    assert gated(found) == {
        "act1:0:0": "start:0:0",
        "w2": "start:0:0",
        "mul1:0:0": "dx2:0:0",  # for `slope1`, which the gradient does not go into
        "w0": "dx1:0:0",
        "x": "dx1:0:0",
    }


def gated(found: Repeated) -> dict[str, str]:
    """By what goes through a gate, what that waits for."""
    gates = {n: taken for n, taken in found.gates.items() if n not in found.graph.arrivals}
    return {taken[0]: found.gates[taken[1][1:]][0] for taken in gates.values()}


def test_nothing_is_copied_that_nobody_reads() -> None:
    assert again(chain(2), {"act1", "loss"}).originals == {AGAIN + "act1": "act1"}
    assert not again(chain(2), {"loss"}).originals


def test_effects_are_not_repeated() -> None:
    graph = chain(2)
    with_effect = ProgramGraph(graph.inputs, graph.results, effects={"mul0"})
    found = again(with_effect, {"mul0", "act0"})
    assert set(found.originals.values()) == {"act0"}


def test_gathered_parameters_need_no_gate() -> None:
    found = again(chain(2), {"mul0"}, fetched=("w0", "w1"))
    assert found.graph.inputs[f"{AGAIN}mul0"][1] == "w0"
    assert gated(found) == {"x": "dx1:0:0", "mul1:0:0": "start:0:0"}


def test_copies_run_in_the_chunk_in_which_their_gradient_arrives() -> None:
    parameters = {"w0": 0, "w1": 0, "w2": 1}
    found = again(chain(3), {"mul0", "act0", "mul1"}, fetched=tuple(parameters))
    chunks = cut(found.graph, parameters, parameters, {"scale"})
    assert [{n for n in one.nodes if n.startswith(AGAIN)} for one in chunks] == [
        set(),
        set(),
        set(found.originals),
    ]
    # Each parameter is there once for the forward, and once for the backward pass.
    assert ["w0" in one.takes for one in chunks] == [True, False, True]


def test_a_block_s_parameters_are_in_one_chunk() -> None:
    assert whole_blocks(range(7), [0, 0, 1, 1, 2, 2, 2], [None, 0, 0, 1, 1, None, None]) == [
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]


def test_what_a_block_hands_out() -> None:
    graph = chain(3)
    blocks = {"mul0": 0, "act0": 0, "mul1": 1, "act1": 1}
    passes = Passes.of(graph, {"scale"})
    assert list(handed_out(graph, passes, blocks)) == ["act0", "act1"]


def values(inputs: Any, results: Any, originals: Any, gates: Any) -> list[Any]:
    """What a program computes: who is made of whom. Fails if a node comes before what it needs."""
    known: dict[str, Any] = {}

    def value(reference: str) -> Any:
        name = node_of(reference)
        if name in gates:
            return value(gates[name][0])
        return known[name] if name in inputs else name

    for name, taken in inputs.items():
        assert all(node_of(r) in known or node_of(r) not in inputs for r in taken), name
        data = [r for r in taken if not r.startswith("^")]
        known[name] = hash((originals.get(name, name), *map(value, data)))
    return [value(r) for r in results]


@st.composite
def programs(draw: Any) -> ProgramGraph:
    """A random forward pass with a backward pass that reads whatever it likes of it."""
    inputs: dict[str, list[str]] = {}
    forward = ["x", "w"]
    for i in range(draw(st.integers(1, 10))):
        inputs[f"f{i}"] = draw(st.lists(st.sampled_from(forward), min_size=1, max_size=3))
        forward.append(f"f{i}:0:0")
    backward = ["scale"]
    for i in range(draw(st.integers(1, 10))):
        pool = st.sampled_from(forward + backward)
        helper = draw(st.booleans())
        one = [] if helper else [draw(st.sampled_from(backward))]
        inputs[f"b{i}"] = [*one, *draw(st.lists(pool, min_size=1, max_size=3))]
        (forward if helper else backward).append(f"b{i}:0:0")
    results = draw(st.lists(st.sampled_from(backward), min_size=1, max_size=4))
    results = [r for r in results if r != "scale"] or [f"{next(reversed(inputs))}:0:0"]
    live = ancestors(ProgramGraph(inputs, []), ["f0:0:0", *results])
    return ProgramGraph({n: r for n, r in inputs.items() if n in live}, ["f0:0:0", *results])


@hypothesis.given(programs(), st.data())
def test_values_stay_and_copies_wait(graph: ProgramGraph, draws: Any) -> None:
    passes = Passes.of(graph, {"scale"})
    nodes = draws.draw(st.sets(st.sampled_from(sorted(graph.inputs))))
    found = again(graph, nodes)
    before = values(graph.inputs, graph.results, {}, {})
    assert values(found.graph.inputs, graph.results, found.originals, found.gates) == before
    late = descendants(found.graph, {"scale"})
    assert set(found.originals) <= late
    assert set(found.originals.values()) <= nodes & passes.forward
    for name, taken in found.graph.inputs.items():
        if name in late and name not in found.gates:
            assert not {node_of(r) for r in taken} & set(found.originals.values())
