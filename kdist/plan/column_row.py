"""Which of a model's products are cut by columns, and which by rows.

Of two products that follow each other, the first is cut by columns and the second by rows: what
lies between is cut, needs no communication, and the pair ends in one sum over the devices
(Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053). Pure: sizes in, roles out.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kdist.plan.products import Product, Role


@dataclasses.dataclass
class Roles:
    """What was decided.

    Attributes:
        roles: Role of each product that is cut, by the path of its kernel.
        left: Why products that would be cut are not, by path.
    """

    roles: dict[str, Role] = dataclasses.field(default_factory=dict)
    left: dict[str, str] = dataclasses.field(default_factory=dict)

    def pair(self, columns: Sequence[Product], rows: Product, parts: int) -> None:
        """Cuts products by columns, and the one that takes what they give by rows.

        Of those by columns some may not divide (one key head of many query heads): they stay whole.
        """
        if any(one.path in self.roles for one in (*columns, rows)):
            return
        fitting = [one for one in columns if one.divides("columns", parts)]
        for one in columns:
            if one not in fitting:
                self._leave(one, "columns", parts)
        if not fitting or not rows.divides("rows", parts):
            self._leave(rows, "rows", parts)
            return
        self.roles.update((one.path, "columns") for one in fitting)
        self.roles[rows.path] = "rows"

    def _leave(self, product: Product, role: Role, parts: int) -> None:
        dim = product.cut(role)
        self.left[product.path] = f"dim {dim} has {product.shape[dim]}, no multiple of {parts}"


def connected_pairs(
    products: Sequence[Product], sources: Mapping[str, Sequence[Product]]
) -> Iterator[tuple[Sequence[Product], Product]]:
    """Pairs of a model that is a graph of layers.

    Args:
        products: Its products, in the order in which they run.
        sources: By path, the products whose results reach a product through nothing but
            elementwise operations; none for one that something else reaches too.
    """
    for rows in products:
        # A product over another dim than the last may be joined to one that does not sum over it.
        if columns := [one for one in sources.get(rows.path, ()) if one.given == rows.taken]:
            yield columns, rows


def pairs_by_size(
    products: Sequence[Product], attends: bool
) -> Iterator[tuple[Sequence[Product], Product]]:
    """Pairs of a layer whose `call` is not known: those whose sizes leave no other reading.

    Heads are made and taken, or a width that is not the one it is made of. Where all have one
    width, four products of a layer with heads are those of query, key, value, and of the result.

    Args:
        products: The products directly inside the layer, in the order in which it made them.
        attends: Whether the layer says that it has heads.
    """
    sizes = {one.given + one.taken for one in products}
    if attends and len(products) == 4 and len(sizes) == 1 and len(products[0].shape) == 2:
        yield products[:3], products[3]
        return
    before: list[Product] = []
    for rows in products:
        columns = [one for one in before if _fits(one, rows)]
        if any(_whole(one, rows) for one in columns):
            yield columns, rows
            before = [one for one in before if one not in columns]
        else:
            before.append(rows)


def _fits(one: Product, rows: Product) -> bool:
    """Whether a product may make what another takes.

    Keys may have fewer heads than that, or, with queries, heads of another width.
    """
    if len(rows.taken) == 2:
        return len(one.given) == 2 and any(map(operator.eq, one.given, rows.taken))
    return one.taken == rows.given and _whole(one, rows)


def _whole(one: Product, rows: Product) -> bool:
    """Whether a product makes all that another takes."""
    if len(one.given) == 2 and len(rows.taken) == 1:  # several of all heads, in one
        return rows.taken[0] % one.given[0] == 0
    return one.given == rows.taken and one.given != one.taken


def wide_ends(products: Iterable[Product], roles: Roles, parts: int, elements: int) -> None:
    """Cuts what is left and makes many classes of few features, by columns.

    Args:
        products: All of a model.
        roles: What pairs have decided; added to.
        parts: Devices of the axis.
        elements: How many a kernel has at least, to be worth it.
    """
    for one in products:
        wide = math.prod(one.given) >= 4 * math.prod(one.taken) and one.elements >= elements
        if wide and one.path not in roles.roles and one.divides("columns", parts):
            roles.roles[one.path] = "columns"
