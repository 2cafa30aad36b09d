"""Which products are cut by columns, and which by rows: groups that exclude each other."""

from __future__ import annotations

from kdist.plan.column_row import ProductGroup, Roles, chosen, wide_ends
from kdist.plan.products import Product

import pytest


def dense(path: str, taken: int, given: int) -> Product:
    return Product(path, (taken, given), (0,), (1,))


def pair(*products: Product) -> ProductGroup:
    return ProductGroup(products[:-1], products[-1:])


def cut(groups: list[ProductGroup], parts: int = 2) -> dict[str, str]:
    roles = Roles()
    for group in chosen(groups):
        roles.group(group.columns, group.rows, parts)
    return dict(roles.roles)


def chain(*widths: int) -> list[ProductGroup]:
    layers = [dense(f"d{n}", *pair) for n, pair in enumerate(zip(widths, widths[1:]))]
    return [pair(*both) for both in zip(layers, layers[1:])]


def test_what_is_wide_inside_is_cut_inside() -> None:
    assert cut(chain(8, 64, 8, 64, 8)) == {
        "d0": "columns", "d1": "rows", "d2": "columns", "d3": "rows"
    }  # fmt: skip


def test_equal_ones_are_cut_in_their_order() -> None:
    assert cut(chain(8, 8, 8, 8)) == {"d0": "columns", "d1": "rows"}


@pytest.mark.parametrize(
    ("widths", "columns"),
    [
        ((2048, 512, 512, 1000), [0]),
        ((1024, 512, 256, 10), [0]),
        ((25088, 4096, 4096, 1000), [0]),
        ((1024, 128, 256, 256, 512), [0, 2]),
        ((64, 256, 256, 256, 256, 1), [1, 3]),
        ((2048, 8, 256, 16, 512), [0, 2]),
    ],
    ids=str,
)
def test_pairs_of_a_chain_cut_most_of_it(widths: tuple[int, ...], columns: list[int]) -> None:
    found = cut(chain(*widths))
    assert [n for n in range(len(widths) - 1) if found.get(f"d{n}") == "columns"] == columns


def test_many_classes_are_never_added_up() -> None:
    """By columns they send nothing, whether a pair before them is cut or not."""
    for widths in ((64, 512, 512, 50000), (64, 512, 20000)):
        roles = Roles()
        for group in chosen(chain(*widths)):
            roles.group(group.columns, group.rows, 2)
        last = len(widths) - 2
        wide_ends([dense(f"d{last}", *widths[-2:])], roles, 2)
        assert roles.roles[f"d{last}"] == "columns"


def test_a_gate_is_cut_with_what_it_gates() -> None:
    """The layers of a gate alone would be a pair too."""
    wide, narrow = dense("wide", 8, 32), dense("narrow", 32, 8)
    squeeze, excite = dense("squeeze", 32, 2), dense("excite", 2, 32)
    groups = [ProductGroup((wide, excite), (squeeze, narrow)), pair(squeeze, excite)]
    for order in (groups, groups[::-1]):
        assert cut(order) == {
            "wide": "columns", "excite": "columns", "squeeze": "rows", "narrow": "rows"
        }  # fmt: skip


def test_a_trunk_is_cut_with_all_of_its_heads() -> None:
    before, trunk = dense("before", 16, 32), dense("trunk", 32, 64)
    heads = tuple(dense(f"head{n}", 64, 3 + n) for n in range(6))
    found = cut([pair(before, trunk), ProductGroup((trunk,), heads)])
    assert found == {"trunk": "columns"} | dict.fromkeys((one.path for one in heads), "rows")


def test_what_many_blocks_hand_on_comes_late() -> None:
    blocks = [(dense(f"in{n}", 64, 16), dense(f"out{n}", 16, 64)) for n in range(4)]
    stream = ProductGroup(tuple(out for _, out in blocks), tuple(taken for taken, _ in blocks))
    assert chosen([stream, *(pair(*block) for block in blocks)])[-1] == stream


def test_columns_that_give_other_features_stay() -> None:
    first, gate, last = dense("first", 4, 8), dense("gate", 4, 1), dense("last", 8, 4)
    (found,) = chosen([pair(first, gate, last)])
    assert found.columns == (first,)
    assert chosen([pair(gate, last)]) == []


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
