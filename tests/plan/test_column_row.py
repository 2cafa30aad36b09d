"""Which products are cut by columns, and which by rows: groups that exclude each other."""

from __future__ import annotations

from kdist.plan.column_row import Group, Roles, by_worth
from kdist.plan.products import Product


def dense(path: str, taken: int, given: int) -> Product:
    return Product(path, (taken, given), (0,), (1,))


def pair(*products: Product) -> Group:
    return Group(products[:-1], products[-1:])


def cut(groups: list[Group], parts: int = 2) -> dict[str, str]:
    roles = Roles()
    for group in by_worth(groups):
        roles.group(group.columns, group.rows, parts)
    return dict(roles.roles)


def chain(*widths: int) -> list[Group]:
    layers = [dense(f"d{n}", *pair) for n, pair in enumerate(zip(widths, widths[1:]))]
    return [pair(*both) for both in zip(layers, layers[1:])]


def test_what_is_wide_inside_is_cut_inside() -> None:
    assert cut(chain(8, 64, 8, 64, 8)) == {
        "d0": "columns", "d1": "rows", "d2": "columns", "d3": "rows"
    }  # fmt: skip


def test_equal_ones_are_cut_in_their_order() -> None:
    assert cut(chain(8, 8, 8, 8)) == {"d0": "columns", "d1": "rows"}


def test_a_small_last_layer_does_not_keep_larger_ones_from_being_cut() -> None:
    assert cut(chain(1024, 512, 256, 10))["d0"] == "columns"
    # Its group has more elements for each feature that is sent.
    large, small = chain(25088, 4096, 4096, 1000)
    assert large.worth < small.worth
    assert by_worth([small, large]) == [large, small]


def test_a_gate_is_cut_with_what_it_gates() -> None:
    """The layers of a gate alone would be a pair too."""
    wide, narrow = dense("wide", 8, 32), dense("narrow", 32, 8)
    squeeze, excite = dense("squeeze", 32, 2), dense("excite", 2, 32)
    groups = [Group((wide, excite), (squeeze, narrow)), pair(squeeze, excite)]
    for order in (groups, groups[::-1]):
        assert cut(order) == {
            "wide": "columns", "excite": "columns", "squeeze": "rows", "narrow": "rows"
        }  # fmt: skip


def test_what_many_blocks_hand_on_comes_late() -> None:
    blocks = [(dense(f"in{n}", 64, 16), dense(f"out{n}", 16, 64)) for n in range(3)]
    stream = Group(tuple(out for _, out in blocks), tuple(taken for taken, _ in blocks))
    assert by_worth([stream, *(pair(*block) for block in blocks)])[-1] == stream


def test_columns_that_give_other_features_stay() -> None:
    first, gate, last = dense("first", 4, 8), dense("gate", 4, 1), dense("last", 8, 4)
    (found,) = by_worth([pair(first, gate, last)])
    assert found.columns == (first,)
    assert by_worth([pair(gate, last)]) == []


def test_rows_that_do_not_divide_leave_all_of_a_group() -> None:
    roles = Roles()
    first, one, other = dense("first", 4, 6), dense("one", 6, 4), dense("other", 6, 2)
    roles.group((first,), (one, other), 4)
    assert roles.roles == {}
    assert roles.left.keys() == {"first", "one", "other"}
    roles.group((first,), (one, other), 2)
    assert roles.roles == {"first": "columns", "one": "rows", "other": "rows"}
    # What has a role keeps it.
    roles.group((other,), (dense("more", 2, 2),), 2)
    assert "more" not in roles.roles
