"""Cutting a graph: the objective by brute force, assignments by hand, what is impossible."""

from __future__ import annotations

import dataclasses
import itertools

from kdist.pipeline import Graph, GraphNode, partition
from kdist.pipeline.partition import describe

import hypothesis
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def node(name, *inputs, cost=1, size=8, stage=None, parameters=()):
    """A node that makes one tensor of its own name."""
    return GraphNode(
        name=name,
        cost=cost,
        inputs=inputs,
        outputs={name: size},
        stage=stage,
        parameters=parameters,
    )


def chain(*costs, sizes=None, stages=None, **options):
    """X -> n0 -> n1 -> ..."""
    nodes = [
        node(
            f"n{i}", f"n{i - 1}" if i else "x", cost=cost,
            size=sizes[i] if sizes else 8, stage=stages[i] if stages else None,
        )
        for i, cost in enumerate(costs)
    ]  # fmt: skip
    return Graph(nodes=nodes, inputs=["x"], outputs=[nodes[-1].name], **options)


@st.composite
def graphs(draw, fixed=False):
    """Random acyclic graphs, in the order of their names."""
    count = draw(st.integers(1, 7))
    nodes = []
    for i in range(count):
        others = [f"n{j}" for j in range(i)]
        used = draw(st.lists(st.sampled_from(others), unique=True, max_size=3)) if others else []
        stage = draw(st.none() | st.integers(0, 2)) if fixed else None
        nodes.append(
            node(
                f"n{i}",
                *used,
                cost=draw(st.integers(0, 9)),
                size=draw(st.integers(0, 9)),
                stage=stage,
            )
        )
    outputs = {f"n{count - 1}", f"n{draw(st.integers(0, count - 1))}"}
    return Graph(nodes=nodes, outputs=sorted(outputs))


def contiguous(graph, stages):
    """Every way to cut the nodes' own order."""
    count = len(graph.nodes)
    for cuts in itertools.combinations(range(1, count), stages - 1):
        ends = [*cuts, count]
        yield {
            n.name: next(k for k, end in enumerate(ends) if i < end)
            for i, n in enumerate(graph.nodes)
        }


@settings(max_examples=150, deadline=None)
@given(graphs(), st.integers(1, 4), st.sampled_from([0, 0.05, 0.5]))
def test_the_objective_by_brute_force(graph, stages, slack):
    hypothesis.assume(stages <= len(graph.nodes))
    found = partition(graph, stages, slack=slack)
    every = [describe(graph, stages, way) for way in contiguous(graph, stages)]
    smallest = min(way.bottleneck for way in every)
    allowed = [way for way in every if way.bottleneck <= smallest * (1 + slack)]
    best = min((sum(way.boundary_bytes), way.bottleneck) for way in allowed)
    assert (sum(found.boundary_bytes), found.bottleneck) == best


def test_a_chain_is_balanced():
    result = partition(chain(1, 1, 1, 3, 3, 3), 3)
    assert result.bottleneck == 6
    assert partition(chain(1, 1, 1, 1), 4).stages == (("n0",), ("n1",), ("n2",), ("n3",))
    assert partition(chain(1, 1, 1, 1), 4).imbalance == 1


def test_bytes_break_ties_and_use_the_slack():
    sizes = (100, 1, 100, 100)
    assert partition(chain(1, 1, 1, 1, sizes=sizes), 2).stages[0] == ("n0", "n1")
    graph = chain(10, 10, 10, 10.5, 10.5, sizes=(9, 9, 100, 1, 1))
    assert partition(graph, 2, slack=0).stages[0] == ("n0", "n1", "n2")
    assert partition(graph, 2, slack=0.4).boundary_bytes == (1,)


def test_a_skip_connection_passes_through():
    nodes = [node("a", "x", size=5), node("b", "a", size=7), node("c", "b"), node("d", "c", "a")]
    result = partition(Graph(nodes=nodes, inputs=["x"], outputs=["d"]), 4)
    assert result.boundaries == (("a",), ("a", "b"), ("a", "c"))
    assert result.boundary_bytes == (5, 12, 13)


def test_model_inputs_cross_no_boundary_and_outputs_travel_to_the_end():
    nodes = [node("a", "x", size=5), node("b", "a"), node("c", "b", "mask")]
    graph = Graph(nodes=nodes, inputs=["x", "mask"], outputs=["a", "c"])
    assert partition(graph, 3).boundaries == (("a",), ("a", "b"))


def test_tied_parameters_are_reported():
    nodes = [
        node("embed", "x", parameters=("table",)),
        node("body", "embed", parameters=("kernel",)),
        node("embed#1", "body", parameters=("table",)),
    ]
    result = partition(Graph(nodes=nodes, inputs=["x"], outputs=["embed#1"]), 3)
    assert result.tied == {"table": (0, 2)}
    assert "tied: table on stages 0, 2" in str(result)
    assert partition(Graph(nodes=nodes, inputs=["x"]), 1).tied == {}


def test_printed():
    text = str(partition(chain(1, 1, 2), 2))
    assert "slowest stage 1.00 x the mean" in text
    assert "n0 ... n1" in text


def test_numbers_of_numpy_are_numbers():
    nodes = chain(1, 1, 2).nodes
    given = [dataclasses.replace(n, stage=np.int64(k > 0)) for k, n in enumerate(nodes)]
    plain = [dataclasses.replace(n, stage=int(k > 0)) for k, n in enumerate(nodes)]
    found = partition(Graph(nodes=given, inputs=["x"]), np.int64(2))
    assert found == partition(Graph(nodes=plain, inputs=["x"]), 2)


def test_brackets_in_names_are_printed():
    nodes = [
        GraphNode(name="block[red]x", cost=1, outputs={"h[bold]": 8}),
        GraphNode(name="b", cost=1, inputs=("h[bold]",), outputs={"y": 8}),
    ]
    text = str(partition(Graph(nodes=nodes, outputs=["y"]), 2))
    assert "block[red]x" in text and "h[bold]" in text


# -- by hand -------------------------------------------------------------------------------------


def test_every_node_by_hand():
    result = partition(chain(1, 1, 1, stages=(0, 0, 1)), 2)
    assert result.stages == (("n0", "n1"), ("n2",))


def test_unassigned_nodes_follow_their_neighbours():
    nodes = [
        node("position"),  # uses no placed node: goes to its user
        node("a", "x", stage=0),
        node("b", "a"),  # follows a
        node("c", "b", "position", stage=1),
        node("d", "c"),  # follows c
        node("alone"),  # nobody uses it
        node("e", "a", "d", stage=2),
    ]
    result = partition(Graph(nodes=nodes, inputs=["x"], outputs=["e"]), 3)
    assert result.stages == (("a", "b", "alone"), ("position", "c", "d"), ("e",))


def test_unassigned_nodes_can_be_balanced_instead():
    stages = (None, None, None, None, 1, None)
    with pytest.raises(ValueError, match=r"stage 0 has none.*unassigned='balance'"):
        partition(chain(*[1] * 6, stages=stages), 2)
    balanced = partition(chain(*[1] * 6, stages=stages), 2, unassigned="balance")
    assert balanced.stages == (("n0", "n1", "n2"), ("n3", "n4", "n5"))


def test_fixed_branches_that_alternate_in_the_order():
    """Two towers, one on each stage: no contiguous cut of the given order, but of another one."""
    nodes = [
        node("a0", "x", stage=0), node("b0", "x", stage=1), node("a1", "a0", stage=0),
        node("b1", "b0", stage=1), node("join", "a1", "b1"),
    ]  # fmt: skip
    graph = Graph(nodes=nodes, inputs=["x"], outputs=["join"])
    for way in ("balance", "follow"):
        result = partition(graph, 2, unassigned=way)
        assert result.stages == (("a0", "a1"), ("b0", "b1", "join"))


@settings(max_examples=200, deadline=None)
@given(graphs(fixed=True), st.sampled_from(["balance", "follow"]))
def test_an_assignment_keeps_what_is_fixed_or_is_refused(graph, unassigned):
    try:
        result = partition(graph, 3, unassigned=unassigned)
    except ValueError as error:
        hypothesis.event("refused")
        assert "Received: " in str(error)
        return
    hypothesis.event("placed")
    stage_of = result.stage_of
    assert all(n.stage in (None, stage_of[n.name]) for n in graph.nodes)
    assert all(result.stages)
    for name, used in graph.predecessors().items():
        assert all(stage_of[other] <= stage_of[name] for other in used)


@settings(max_examples=100, deadline=None)
@given(graphs(), st.integers(1, 3), st.data())
def test_what_is_possible_by_hand_is_accepted(graph, stages, data):
    """Any assignment that ascends along the edges and leaves no stage empty."""
    stage_of: dict = {}
    for n in graph.nodes:
        least = max((stage_of[other] for other in graph.predecessors()[n.name]), default=0)
        stage_of[n.name] = data.draw(st.integers(least, stages - 1))
    hypothesis.assume(len(set(stage_of.values())) == stages)
    by_hand = graph.assign(stage_of)
    for way in ("balance", "follow"):
        assert partition(by_hand, stages, unassigned=way).stage_of == stage_of


def test_a_free_node_is_kept_behind_those_that_a_fixed_one_needs():
    """Only b may go to stage 2: c is needed by d, on stage 1."""
    nodes = [node("a", "x", stage=1), node("b", "a"), node("c", "a"), node("d", "c", stage=1)]
    graph = Graph(nodes=[*nodes, node("e", "x", stage=0)], inputs=["x"], outputs=["b"])
    result = partition(graph, 3, unassigned="balance")
    assert result.stages[2] == ("b",)


# -- impossible ----------------------------------------------------------------------------------

IMPOSSIBLE = {
    "later-stage": (
        lambda: partition(chain(1, 1, 1, stages=(1, None, 0)), 2),
        r"'n2' on stage 0 uses the output of layer 'n0' on the later stage 1 through 'n1'.*"
        r"put 'n2' on stage 1.*Received: 'n0': 1, 'n2': 0",
    ),
    "stage-cycle": (
        lambda: partition(chain(1, 1, 1, stages=(0, 1, 0)), 2),
        r"'n2' on stage 0 uses the output of layer 'n1' on the later stage 1",
    ),
    "empty-stage": (
        lambda: partition(chain(1, 1, 1, stages=(0, None, 2)), 3),
        r"stage 1 has none.*Received: stages=3, 0: n0, n1; 2: n2",
    ),
    "empty-stage-balanced": (
        lambda: partition(chain(1, 1, 1, stages=(0, 2, None)), 3, unassigned="balance"),
        r"none is left for stage 1:.*'n0': 0, 'n1': 2",
    ),
    "stage-unknown": (
        lambda: partition(chain(1, 1, stages=(0, 2)), 2),
        r"Stages are 0 to 1. Received: stage 2 for layer 'n1'",
    ),
    "too-many-stages": (
        lambda: partition(chain(1, 1), 3),
        r"2 calls of layers: n0, n1.*Received: stages=3",
    ),
    "graph-cycle": (
        lambda: Graph(nodes=[node("a", "c"), node("b", "a"), node("c", "b")]),
        r"cycle.*Received: a -> b -> c -> a",
    ),
    "order": (
        lambda: Graph(nodes=[node("b", "a"), node("a")]),
        r"put 'a' before 'b'.*Received: nodes=\['b', 'a'\]",
    ),
    "unknown-tensor": (lambda: Graph(nodes=[node("a", "y")]), r"Received: 'y', used by 'a'"),
    "same-name": (lambda: Graph(nodes=[node("a"), node("a")]), r"name of its own.*\['a'\]"),
    "cost": (lambda: node("a", cost=-1), r"Received: cost=-1 of 'a'"),
    "cost-nan": (lambda: node("a", cost=float("nan")), r"Received: cost=nan"),
    "bytes": (lambda: node("a", size=-1), r"Received: outputs=\{'a': -1\}"),
    "stage-type": (lambda: node("a", stage=1.5), r"Received: stage=1.5 of 'a'"),
    "pattern-unknown": (
        lambda: chain(1, 1).assign({"m.*": 0}),
        r"calls are n0, n1. Received: 'm\.\*': 0",
    ),
    "pattern-twice": (
        lambda: chain(1, 1).assign({"n.": 0, "n1": 1}),
        r"'n1' on different stages.*Received: 'n\.': 0, 'n1': 1",
    ),
    "pattern-wrong": (lambda: chain(1).assign({"n(": 0}), r"regular expression.*Received: 'n\('"),
    "measured": (
        lambda: chain(1, 1).with_costs({"n0": 1, "n9": 1}),
        r"Received: costs without \['n1'\], with unknown \['n9'\]",
    ),
    "stages": (lambda: partition(chain(1), 0), r"Received: stages=0"),
    "slack": (lambda: partition(chain(1), 1, slack=-1), r"Received: slack=-1"),
    "unassigned": (lambda: partition(chain(1), 1, unassigned="x"), r"Received: unassigned='x'"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible(name):
    call, words = IMPOSSIBLE[name]
    with pytest.raises(ValueError, match=f"(?s){words}"):
        call()


def test_assign_by_pattern_and_measured_costs():
    graph = (
        chain(1, 1, 1, 1).assign({"n[01]": 0, "n2": 1}).with_costs({f"n{i}": i for i in range(4)})
    )
    assert [n.stage for n in graph.nodes] == [0, 0, 1, None]
    assert partition(graph, 2).costs == (1, 5)
