"""Predicted times: the closed forms against the messages, and against the field's formulas."""

from __future__ import annotations

from math import log2

from kdist.comm.algorithms import ALGORITHMS, OPERATIONS, schedule
from kdist.comm.cost import LinkCost, cheapest, predict, terms

import pytest

LINK = LinkCost(a=3e-5, b=7e-10)
A, B = LINK.a, LINK.b
L = 40_320.0  # divides by every size here
POWERS = (2, 4, 8, 16)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_closed_form_counts_the_messages(operation, algorithm):
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16):
        if algorithm == "hypercube" and size & (size - 1):
            continue
        found = schedule(operation, algorithm, size)
        blocks = ("gather", "all_gather", "scatter", "reduce_scatter", "all_to_all")
        cut = size if operation in blocks else found.pieces
        startups, share = terms(operation, algorithm, size)
        assert startups == len(found.rounds), str(found)
        assert share == pytest.approx(found.critical_bytes(1.0 / cut)), str(found)


@pytest.mark.parametrize(("a", "b"), [(2, 2), (3, 2), (1, 4), (4, 1), (4, 3)])
def test_the_closed_form_of_a_torus(a, b):
    found = schedule("all_reduce", f"torus:{a}x{b}", a * b)
    startups, share = terms("all_reduce", f"torus:{a}x{b}", a * b)
    assert startups == len(found.rounds) == 2 * (a - 1) + 2 * (b - 1)
    assert share == pytest.approx(found.critical_bytes(1.0 / found.pieces))
    rows, columns = 2 * (a - 1) * (A + B * L / a), 2 * (b - 1) * (A + B * L / (a * b))
    got = predict("all_reduce", f"torus:{a}x{b}", L, a * b, LINK)
    assert got == pytest.approx(rows + columns)


@pytest.mark.parametrize("p", POWERS)
def test_the_formulas_of_the_field(p):
    """Here l is the value, or one device's block of gather, scatter and all-gather."""
    message = A + B * L
    logs = {
        ("broadcast", "direct", L): message * (p - 1),
        ("broadcast", "tree", L): message * log2(p),
        ("reduce", "tree", L): message * log2(p),
        ("gather", "tree", p * L): A * log2(p) + (p - 1) * B * L,
        ("scatter", "tree", p * L): A * log2(p) + (p - 1) * B * L,
        ("gather", "hypercube", p * L): A * log2(p) + (p - 1) * B * L,
        ("scatter", "hypercube", p * L): A * log2(p) + (p - 1) * B * L,
        ("all_gather", "hypercube", p * L): A * log2(p) + (p - 1) * B * L,
        ("all_reduce", "ring", L): 2 * (p - 1) * (A + B * L / p),
        ("all_reduce", "halving", L): 2 * A * log2(p) + 2 * (p - 1) / p * B * L,
        ("all_reduce", "hypercube", L): message * log2(p),
        ("all_to_all", "direct", L): (p - 1) * (A + B * L / p),
        ("all_to_all", "hypercube", L): log2(p) * (A + B * L / 2),
    }
    for (operation, algorithm, nbytes), seconds in logs.items():
        assert predict(operation, algorithm, nbytes, p, LINK) == pytest.approx(seconds)


@pytest.mark.parametrize("p", POWERS)
def test_all_gather_as_gather_and_broadcast(p):
    """The field's a·log₂ p + p·l·b·log₂ p is the broadcast; the gather before it also travels."""
    broadcast = A * log2(p) + p * L * B * log2(p)
    gather = predict("gather", "tree", p * L, p, LINK)
    assert predict("all_gather", "tree", p * L, p, LINK) == pytest.approx(gather + broadcast)
    assert predict("broadcast", "tree", p * L, p, LINK) == pytest.approx(broadcast)


def test_large_sizes_are_priced_at_once():
    startups, share = terms("all_reduce", "halving", 4096)
    assert (startups, share) == (24, pytest.approx(2 * 4095 / 4096))
    assert terms("all_reduce", "ring", 4096)[0] == 8190


def test_one_device_costs_nothing():
    assert predict("all_reduce", "hypercube", L, 1, LINK) == 0


def test_the_cheapest_depends_on_the_size():
    assert cheapest("all_reduce", 8, 8, LINK) == "hypercube"
    assert cheapest("all_reduce", 1e9, 8, LINK) == "halving"
    assert cheapest("all_reduce", 8, 6, LINK) != "hypercube"


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_link_is_checked(name, value):
    with pytest.raises(ValueError, match=f"`{name}` of a link.*calibrate.*Received: {name}="):
        LinkCost(**{"a": 1.0, "b": 1.0, name: value})


@pytest.mark.parametrize("nbytes", [float("nan"), float("inf"), True, "8"])
def test_a_size_is_a_number(nbytes):
    for call in (
        lambda: predict("reduce", "tree", nbytes, 2, LINK),
        lambda: cheapest("reduce", nbytes, 2, LINK),
    ):
        with pytest.raises(ValueError, match="finite number.*Received: nbytes="):
            call()


def test_the_number_of_devices_is_checked_whatever_ran_before():
    predict("reduce", "tree", 8, 12, LINK)
    schedule("reduce", "tree", 1)
    for call in (
        lambda: predict("reduce", "tree", 8, 12.0, LINK),
        lambda: cheapest("reduce", 8, 12.0, LINK),
        lambda: schedule("reduce", "tree", True),
    ):
        with pytest.raises(ValueError, match="integer of at least 1"):
            call()


def test_predictions_are_checked():
    with pytest.raises(ValueError, match="not negative.*Received: nbytes=-1"):
        predict("reduce", "tree", -1, 2, LINK)
    with pytest.raises(ValueError, match="power of two"):
        predict("reduce", "hypercube", 1, 3, LINK)


def test_a_link_prints_its_units():
    assert str(LinkCost(a=20e-6, b=1e-10)) == (
        "message time 20.0 us + 0.100 ns per byte (10.00 GB/s)"
    )
    assert str(LinkCost(a=0, b=0, error=0.1)).endswith("median error 10%")
