"""Strategies as users write them: axis names, or counts as MindSpore has them."""

from kdist.sharding.dims import axes_of, cut_of, inner_dims
from kdist.sharding.layout import parse_strategy
from kdist.sharding.strategy import check_strategy, split_operands

import hypothesis
import pytest
from hypothesis import strategies as st

from ..runtime.mesh_parts import AXES, layouts, meshes, topology


@pytest.mark.parametrize(
    ("axes", "strategy", "batch_dim", "expected"),
    [
        ({"data": 4, "model": 2}, (4, 1), True, ("data", None)),
        ({"data": 4, "model": 2}, (4, 2), True, ("data", "model")),
        ({"data": 4, "model": 2}, (8, 1), True, (("data", "model"), None)),
        ({"data": 4, "model": 2}, (1, 2), True, (None, "model")),
        ({"data": 4, "model": 2}, (None, 2), True, (None, "model")),
        ({"data": 4, "model": 2}, (2, 1), False, ("model", None)),
        ({"data": 2, "model": 2}, (2, 2), True, ("data", "model")),
        ({"data": 2, "model": 2}, (1, 2), True, (None, "model")),
        ({"data": 2, "model": 2}, (2, 1), False, ("model", None)),
        ({"model": 2, "data": 4}, (8, 1), True, (("data", "model"), None)),
        ({"model": 2, "seq": 3}, (6,), False, (("model", "seq"),)),
        ({"model": 2, "seq": 2}, (4, 1), False, (("model", "seq"), None)),
        ({"model": 4, "expert": 1}, (4, 1), False, ("model", None)),
        ({"model": 4}, (1, 1), False, (None, None)),
        ({"model": 4}, (), False, ()),
        ({"data": 2, "model": 2}, ("data", "model"), True, ("data", "model")),
        ({"batch": 2, "model": 2}, ("data", None), True, ("batch", None)),
        ({"data": 2, "model": 2}, (("data", "model"), None), True, (("data", "model"), None)),
        ({"data": 2, "model": 2}, (None, "data"), False, (None, "data")),
        ({"data": 2, "model": 2}, [["model"], None], False, ("model", None)),
    ],
)
def test_parse_strategy(axes, strategy, batch_dim, expected):
    made = topology(**axes)
    assert parse_strategy(strategy, made, operand="x", batch_dim=batch_dim) == expected


@pytest.mark.parametrize(
    ("axes", "strategy", "batch_dim", "message"),
    [
        ({"data": 2, "model": 2}, (2, 1), True, "may mean .*'data'.*'model'.*names of the axes"),
        ({"model": 2, "seq": 2}, (2, 2), False, "may mean"),
        ({"model": 2, "seq": 2}, (1, 2), False, "may mean"),
        ({"model": 4, "a": 2, "b": 2}, (4, 1), False, "may mean"),
        ({"data": 4, "model": 2}, (1, 4), True, "fit no axes.*data=4, model=2"),
        ({"data": 4, "model": 2}, (4, 1), False, "fit no axes"),
        ({"data": 4, "model": 2}, (2, 2), True, "fit no axes"),
        ({"model": 2}, (3,), False, "fit no axes"),
        ({"model": 2}, (0,), False, "integer of at least 1"),
        ({"model": 2}, (True,), False, "integer of at least 1"),
        ({"model": 2}, (2, "model"), False, "all axis names or all cut counts"),
        ({"model": 2}, (2, ("model",)), False, "all axis names or all cut counts"),
        ({"model": 2}, "model", False, "one entry a dim"),
        ({"model": 2}, None, False, "one entry a dim"),
        ({"model": 2}, (2.0,), False, "one entry a dim"),
        ({"model": 2}, ("seq",), False, "no axis 'seq'"),
        ({"model": 2}, ("model", "model"), False, "more than once"),
        ({"data": 2, "model": 2}, (None, "data"), True, "cuts the batch, dim 0"),
        ({"data": 2, "model": 2}, (("model", "data"),), True, "cuts the batch, dim 0"),
    ],
)
def test_parse_strategy_refuses(axes, strategy, batch_dim, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_strategy(strategy, topology(**axes), operand="x", batch_dim=batch_dim)
    assert "Received: " in str(caught.value)


def test_parse_strategy_checks_the_rank():
    made = topology(model=2)
    assert parse_strategy((None, 2), made, 2, operand="x", batch_dim=False) == (None, "model")
    with pytest.raises(ValueError, match="strategy of x has 2 entries and the tensor 3 dims"):
        parse_strategy((None, 2), made, 3, operand="x", batch_dim=False)


@hypothesis.given(st.data())
def test_counts_parse_back(data):
    # With sizes that are different primes each count has one reading only.
    primes = data.draw(st.permutations([2, 3, 5]))
    count = data.draw(st.integers(1, 3))
    made = topology(**dict(zip(AXES, primes[:count], strict=False)))
    batch_dim = data.draw(st.booleans())
    dims = data.draw(layouts(made.axis_names))
    counts = tuple(cut_of(dim, made) for dim in dims)
    allowed = dims if not batch_dim else dims[1:]
    if any("data" in axes_of(dim) for dim in allowed):
        with pytest.raises(ValueError, match="fit no axes"):
            parse_strategy(counts, made, operand="x", batch_dim=batch_dim)
    else:
        parsed = parse_strategy(counts, made, operand="x", batch_dim=batch_dim)
        assert [set(axes_of(a)) for a in parsed] == [set(axes_of(b)) for b in dims]


@hypothesis.given(st.data())
def test_counts_cut_as_they_say_or_are_refused(data):
    made = data.draw(meshes())
    counts = tuple(data.draw(st.lists(st.sampled_from([None, 1, 2, 3, 4, 6]), max_size=3)))
    batch_dim = data.draw(st.booleans())
    try:
        dims = parse_strategy(counts, made, operand="x", batch_dim=batch_dim)
    except ValueError:
        return
    assert [cut_of(dim, made) for dim in dims] == [count or 1 for count in counts]
    # What it gives reads back as itself: the axes stand where names may put them, once each.
    assert parse_strategy(dims, made, operand="x", batch_dim=batch_dim) == dims
    for index, dim in enumerate(dims):
        assert made.data_axis not in axes_of(dim) or (batch_dim and index == 0)


@hypothesis.given(st.data())
def test_names_read_as_themselves(data):
    made = data.draw(meshes())
    dims = data.draw(layouts(made.axis_names))
    assert parse_strategy(dims, made, operand="x", batch_dim=False) == dims
    inner = inner_dims(dims, made)
    assert parse_strategy(inner, made, operand="x", batch_dim=True) == inner
    assert "data" not in [axis for dim in inner for axis in axes_of(dim)]


def test_split_operands():
    assert split_operands(((4, 1), (1, 1)), "s") == ((4, 1), (1, 1))
    assert split_operands(("model", None), "s") == (("model", None),)
    assert split_operands([[4, 1]], "s") == ((4, 1),)
    assert split_operands((("data", "model"), None), "s") == ((("data", "model"), None),)
    assert split_operands((("data", "model"),), "s") == (("data", "model"),)


@pytest.mark.parametrize("value", [(), [], "model", None, 3, (None, ("model", None))])
def test_split_operands_refuses(value):
    with pytest.raises(ValueError, match="Received"):
        split_operands(value, "in_strategy")


def test_check_strategy_takes_lists():
    assert check_strategy([["a", "b"], None, "c"], "s") == (("a", "b"), None, "c")
    assert check_strategy([4, None], "s") == (4, None)
