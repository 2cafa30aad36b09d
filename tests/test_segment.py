"""Cutting a run of nodes into segments: they cover it, are small, and cut where it is thin."""

from __future__ import annotations

from typing import Any

from kdist import _private_models
from kdist.segment import PARTS, NodeInfo, cut, info_of, looked_up, segment_limit

import keras
from hypothesis import given, settings
from hypothesis import strategies as st


def chain(*sizes: int, alone: tuple[int, ...] = ()) -> list[NodeInfo]:
    """Node i takes tensor i and makes tensor i + 1."""
    return [NodeInfo(f"n{i}", (i,), (i + 1,), size, i in alone) for i, size in enumerate(sizes)]


def spans(nodes: list[NodeInfo], limit: int, outputs: Any = None) -> list[tuple[int, int]]:
    outputs = outputs or [len(nodes)]
    return [(s.start, s.stop) for s in cut(nodes, outputs, limit)]


def test_segments_are_filled_up_to_the_limit() -> None:
    assert spans(chain(4, 4, 4, 4, 4), 8) == [(0, 2), (2, 4), (4, 5)]


def test_a_large_node_is_a_segment() -> None:
    assert spans(chain(4, 20, 4), 8) == [(0, 1), (1, 2), (2, 3)]


def test_what_is_alone_stays_alone() -> None:
    assert spans(chain(1, 1, 1, 1, alone=(1,)), 100) == [(0, 1), (1, 2), (2, 4)]


def test_a_cut_avoids_skip_connections() -> None:
    # 1 -> 2 -> 3 -> 4 with a skip from 2 to the node that makes 4.
    nodes = [
        NodeInfo("a", (0,), (1,), 4),
        NodeInfo("b", (1,), (2,), 4),
        NodeInfo("c", (2,), (3,), 1),
        NodeInfo("add", (2, 3), (4,), 0),
        NodeInfo("d", (4,), (5,), 8),
    ]
    assert spans(nodes, 10)[0] == (0, 4)


def test_boundaries_are_named() -> None:
    first, second = cut(chain(4, 4, 4, 4), [2, 4], 8)
    assert (first.reads, first.writes) == ((0,), (2,))
    assert (second.reads, second.writes) == ((2,), (4,))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=30), st.data())
def test_segments_tile_any_graph(shape: list[tuple[int, bool]], data: Any) -> None:
    nodes = []
    for i, (size, alone) in enumerate(shape):
        reads = data.draw(st.sets(st.integers(0, i), min_size=1, max_size=3))
        nodes.append(NodeInfo(f"n{i}", tuple(sorted(reads)), (i + 1,), size, alone))
    limit = data.draw(st.integers(1, 120))
    segments = cut(nodes, [len(nodes)], limit)
    assert [s.start for s in segments] == [0, *(s.stop for s in segments[:-1])]
    assert segments[-1].stop == len(nodes)
    for s in segments:
        mine = nodes[s.start : s.stop]
        assert len(mine) == 1 or sum(n.nbytes for n in mine) <= limit
        assert len(mine) == 1 or not any(n.alone for n in mine)
        made = {k for n in mine for k in n.writes}
        assert set(s.reads) == {k for n in mine for k in n.reads} - made
        later = {k for n in nodes[s.stop :] for k in n.reads} | {len(nodes)}
        assert set(s.writes) == made & later


def test_the_limit_leaves_room_for_the_largest() -> None:
    assert segment_limit([10] * 80) == 800 // PARTS
    assert segment_limit([10, 1000]) == 1000
    assert segment_limit([]) == 1


def test_nodes_of_a_model() -> None:
    inputs = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(5, 6, name="table")(inputs)
    x = keras.Sequential([keras.layers.Dense(2)], name="nested")(x)
    model = keras.Model(inputs, keras.layers.Dense(3, name="head")(x))
    infos = {n.name: n for n in map(info_of, _private_models.nodes_in_order(model))}
    assert {name for name, n in infos.items() if n.alone} == {"table", "nested"}
    assert infos["head"].nbytes == (2 * 3 + 3) * 4
    assert [v.path for v in looked_up(model)] == ["table/embeddings"]
