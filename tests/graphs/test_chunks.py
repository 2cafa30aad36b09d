"""A program cut anywhere into chunks equals the model's own call: outputs, masks, gradients."""

from __future__ import annotations

from typing import Any

from kdist.graphs.chunks import (
    MOST_BYTES,
    PARTS,
    Chunk,
    ProgramGraph,
    cut,
    node_of,
    parameter_chunks,
)
from kdist.graphs.recompute import descendants

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from ..equivalence.random_graphs import Net, Step, data, nets
from ..equivalence.repeatable import repeatable
from ..parity import in_float64
from .chunk_parts import in_chunks

ROWS = 4


# -- which chunk a parameter belongs to ----------------------------------------------------------


def test_chunks_of_parameters_are_filled_up_to_a_part() -> None:
    assert parameter_chunks(range(6), [4, 4, 4, 4, 4, 4], parts=3) == [0, 0, 1, 1, 2, 2]


def test_a_large_parameter_is_a_chunk_and_biases_stay_with_kernels() -> None:
    assert parameter_chunks(range(6), [16, 1, 16, 1, 64, 2]) == [0, 0, 1, 1, 2, 2]


def test_the_order_is_that_of_their_use() -> None:
    assert parameter_chunks([2, 0, 1], [8, 8, 8], parts=3) == [1, 2, 0]


def test_chunks_of_large_models_are_no_larger() -> None:
    nbytes = [MOST_BYTES // 4] * 400
    found = parameter_chunks(range(400), nbytes)
    assert max(found.count(n) for n in set(found)) == 4


@hypothesis.given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40))
def test_chunks_are_few_and_small(nbytes: list[int]) -> None:
    found = parameter_chunks(range(len(nbytes)), nbytes)
    assert found == sorted(found)
    assert max(found) < 2 * PARTS + 1
    limit = -(-sum(nbytes) // PARTS)
    for number in set(found):
        mine = [n for n, chunk in zip(nbytes, found) if chunk == number]
        assert 8 * sum(mine) <= 9 * max(limit, *mine)


# -- which chunk a node belongs to ---------------------------------------------------------------


def layers(count: int) -> ProgramGraph:
    """A chain of matrix products with its backward pass; `w` cast before it is used."""
    inputs: dict[str, list[str]] = {}
    for i in range(count):
        inputs[f"cast{i}"] = [f"w{i}"]
        inputs[f"y{i}"] = [f"y{i - 1}:0:0" if i else "x", f"cast{i}:0:0"]
    inputs[f"d{count}"] = [f"y{count - 1}:0:0", "scale"]
    for i in reversed(range(count)):
        inputs[f"dw{i}"] = [f"d{i + 1}:0:0", f"y{i - 1}:0:0" if i else "x"]
        inputs[f"d{i}"] = [f"d{i + 1}:0:0", f"cast{i}:0:0"]
    return ProgramGraph(inputs, [f"y{count - 1}:0:0", *(f"dw{i}:0:0" for i in range(count))])


def nodes(chunks: list[Chunk]) -> list[set[str]]:
    return [set(one.nodes) for one in chunks]


def test_backward_chunks_are_those_of_forward_in_reverse() -> None:
    names = {"w0": 0, "w1": 1, "w2": 2}
    assert nodes(cut(layers(3), names, names, {"scale"})) == [
        {"cast0", "y0"},
        {"cast1", "y1"},
        {"cast2", "y2", "d3", "dw2", "d2", "dw1"},
        {"cast1", "d1", "dw0"},
        {"cast0", "d0"},
    ]


def test_passes_may_be_apart() -> None:
    names = {"w0": 0, "w1": 1, "w2": 2}
    assert nodes(cut(layers(3), names, names, {"scale"}, apart=True)) == [
        {"cast0", "y0"},
        {"cast1", "y1"},
        {"cast2", "y2"},
        {"cast2", "d3", "dw2", "d2", "dw1"},
        {"cast1", "d1", "dw0"},
        {"cast0", "d0"},
    ]
    whole = nodes(cut(layers(3), names, (), {"scale"}, whole_forward=True, apart=True))
    assert [n for n in whole if n][0] == {f"{kind}{i}" for kind in ("cast", "y") for i in range(3)}


def test_what_follows_from_a_gathered_parameter_is_computed_again() -> None:
    names = {"w0": 0, "w1": 1}
    gathered = cut(layers(2), names, names, {"scale"})
    stored = cut(layers(2), names, (), {"scale"})
    assert sum("cast0" in one.nodes for one in gathered) == 2
    assert sum("cast0" in one.nodes for one in stored) == 1


def test_a_result_of_many_steps_from_parameters_alone_comes_with_the_last_of_them() -> None:
    """As of powers of a kernel; each step takes the one before twice."""
    graph, steps = layers(2), 60
    inputs = {**graph.inputs, "power0": ["w1", "w1"]}
    inputs |= {f"power{i}": [f"power{i - 1}:0:0"] * 2 for i in range(1, steps)}
    results = [*graph.results, f"power{steps - 1}:0:0"]
    names = {"w0": 0, "w1": 1}
    chunks = cut(ProgramGraph(inputs, results), names, names, {"scale"})
    assert [n for n, one in enumerate(chunks) if results[-1] in one.gives] == [1]


def test_a_whole_forward_pass_is_one_chunk_with_the_start_of_the_backward_pass() -> None:
    names = {"w0": 0, "w1": 1, "w2": 2}
    found = [n for n in nodes(cut(layers(3), names, (), {"scale"}, whole_forward=True)) if n]
    assert {"y0", "y1", "y2", "d2"} <= found[0]
    assert len(found) == 3


def test_a_shared_parameter_does_not_hold_the_backward_pass_back() -> None:
    graph = layers(3)
    shared = {n: ["w0" if r == "w2" else r for r in refs] for n, refs in graph.inputs.items()}
    chunks = nodes(cut(ProgramGraph(shared, graph.results), {"w0": 0, "w1": 1}, (), {"scale"}))
    assert {"d2", "dw1"} <= chunks[1]


def test_random_numbers_wait_for_their_use() -> None:
    graph = layers(3)
    inputs = {"mask": ["seed"], **graph.inputs}
    inputs["y2"] = [*inputs["y2"], "mask:0:0"]
    chunks = nodes(
        cut(ProgramGraph(inputs, graph.results), {f"w{i}": i for i in range(3)}, (), {"scale"})
    )
    assert "mask" in chunks[2]


@hypothesis.given(st.data())
def test_every_node_runs_once_after_what_it_needs(draws: Any) -> None:
    count = draws.draw(st.integers(1, 12))
    names = {f"w{i}": i // 2 for i in range(draws.draw(st.integers(1, 6)))}
    inputs: dict[str, list[str]] = {}
    for i in range(count):
        pool = ["x", "scale", *names, *(f"n{j}:0:0" for j in range(i))]
        inputs[f"n{i}"] = draws.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
    results = draws.draw(st.lists(st.sampled_from([f"n{i}:0:0" for i in range(count)]), min_size=1))
    fetched = draws.draw(st.sets(st.sampled_from(sorted(names))))
    apart = draws.draw(st.booleans())
    chunks = cut(ProgramGraph(inputs, results), names, fetched, {"scale"}, apart=apart)
    assert len(chunks) % 2 != apart
    known = {"x", "scale", *names}
    given_out: set[str] = set()
    if apart:
        seeded = descendants(ProgramGraph(inputs, results), {"scale"})
        forward, backward = chunks[: len(chunks) // 2], chunks[len(chunks) // 2 :]
        assert not any(seeded & set(one.nodes) for one in forward)
        of_forward = {r for r in results if node_of(r) not in seeded}
        assert of_forward <= {r for one in forward for r in one.gives} or not of_forward
        assert not any(of_forward & set(one.gives) for one in backward)
    for chunk in chunks:
        assert set(chunk.takes) <= known | given_out
        inside = {*chunk.takes}
        for name in chunk.nodes:
            for reference in inputs[name]:
                assert reference in inside or node_of(reference) in inside
            inside.add(name)
        given_out |= set(chunk.gives)
    assert set(results) <= given_out


# -- whole models --------------------------------------------------------------------------------


def own_call(model: keras.Model, x: Any, y: Any) -> tuple[Any, ...]:
    """Loss, gradients (0 where there is none), outputs and masks of Keras's own training pass."""
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = model.compute_loss(x, y, outputs)
    gradients = tape.gradient(
        loss, [v.value for v in model.trainable_variables], unconnected_gradients="zero"
    )
    flat = keras.tree.flatten(outputs)
    masks = [getattr(t, "_keras_mask", None) for t in flat]
    return loss, gradients, flat, masks


def check(net: Net, cuts: Any) -> None:
    with in_float64():
        model = net.build()
        x, target = data(0, ROWS)
        x = [tf.constant(part) for part in x]
        y = [tf.constant(target)] * len(model.outputs)
        y = y[0] if len(y) == 1 else y
        model.compile("sgd", ["mse"] * len(model.outputs))
        model.built = True
        expected, found = own_call(model, x, y), in_chunks(model, x, y, cuts)
    for name, a, b in zip(("loss", "gradients", "outputs", "masks"), expected, found):
        for i, (left, right) in enumerate(zip(keras.tree.flatten(a), keras.tree.flatten(b))):
            assert (left is None) == (right is None), (name, i, left, right)
            if left is not None:
                left, right = (
                    np.asarray(tf.convert_to_tensor(t), "float64") for t in (left, right)
                )
                np.testing.assert_allclose(
                    right, left, rtol=1e-9, atol=1e-12, err_msg=f"{name} {i}"
                )


GIVEN = {"net": nets(), "cuts": st.sets(st.integers(1, 12))}
POST_NORM = Net((Step("attention", 0, 0, False), Step("add", 0, 1, False)), ())
ALIAS = Net(
    (Step("nothing", 0, 0, False), Step("attention", 0, 0, False), Step("add", 0, 2, False)), ()
)


@pytest.mark.parametrize("net", [POST_NORM, ALIAS], ids=["post_norm", "one_object_twice"])
def test_attention_takes_the_mask_off_what_later_chunks_read(net: Net) -> None:
    check(net, {2})
    check(net, set(range(8)))


@repeatable(8)
@hypothesis.given(**GIVEN)
def test_a_random_graph_cut_anywhere_equals_the_whole(net: Net, cuts: set[int]) -> None:
    check(net, cuts)


@pytest.mark.long
@repeatable(300)
@hypothesis.given(**GIVEN)
def test_many_random_graphs_cut_anywhere_equal_the_whole(net: Net, cuts: set[int]) -> None:
    check(net, cuts)
