"""Which of a model's products are cut by columns, and which by rows.

Of two products that follow each other, the first is cut by columns and the second by rows: what
lies between is cut, needs no communication, and the pair ends in one sum over the devices
(Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053). Pure: sizes in, roles out.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Iterator, Sequence

from kdist.plan.products import Product, Role
from kdist.plan.set_packing import heaviest

MANY = 3
"""Columns of a group that comes last if it has more."""
LARGE = 2**18
"""Elements of tables and last layers that are cut: 1 MiB of float32."""


@dataclasses.dataclass
class Roles:
    """What was decided.

    Attributes:
        roles: Role of each product that is cut, by the path of its kernel.
        left: Why products that would be cut are not, by path.
    """

    roles: dict[str, Role] = dataclasses.field(default_factory=dict)
    left: dict[str, str] = dataclasses.field(default_factory=dict)

    def group(self, columns: Sequence[Product], rows: Sequence[Product], parts: int) -> None:
        """Cuts products by columns, and those that take what they give by rows.

        Of those by columns some may not divide (one key head of many query heads): they stay whole.
        """
        if any(one.path in self.roles for one in (*columns, *rows)):
            return
        fitting = [one for one in columns if one.divides("columns", parts)]
        for one in columns:
            if one not in fitting:
                self._leave(one, "columns", parts)
        if not fitting or not all(one.divides("rows", parts) for one in rows):
            for one in rows:
                self._leave(one, "rows", parts)
            return
        self.roles.update((one.path, "columns") for one in fitting)
        self.roles.update((one.path, "rows") for one in rows)

    def _leave(self, product: Product, role: Role, parts: int) -> None:
        dim = product.cut(role)
        self.left[product.path] = f"dim {dim} has {product.shape[dim]}, no multiple of {parts}"


@dataclasses.dataclass(frozen=True)
class ProductGroup:
    """Products that are cut together: whatever lies between them is of their features alone.

    Attributes:
        columns: Those that make it.
        rows: Those that take it.
    """

    columns: tuple[Product, ...]
    rows: tuple[Product, ...]

    @property
    def paths(self) -> frozenset[str]:
        """Of all its products."""
        return frozenset(one.path for one in (*self.columns, *self.rows))

    @property
    def elements(self) -> int:
        """How many of weights are cut."""
        return sum(one.elements for one in (*self.columns, *self.rows))

    @property
    def worth(self) -> float:
        """Elements, and less for more features that are added up over the devices.

        By the fourth root, which decides between groups of about as many elements.
        """
        sent = sum(math.prod(one.given) for one in self.rows)
        return float(self.elements / sent**0.25)


def chosen(groups: Iterable[ProductGroup]) -> list[ProductGroup]:
    """Groups of a model that is a graph of layers, in the order in which to cut them.

    They may share products: what one block hands on to the next has a group too, at the expense of
    those inside both. Those come first that are worth most together. One of many columns, such as
    all that residual blocks add up, comes after them: it is cut as a whole or not at all.

    Args:
        groups: Of which columns may give other features than rows take: a gate for all.
    """
    fitting = []
    for group in groups:
        taken = {one.taken for one in group.rows}
        columns = tuple(one for one in group.columns if {one.given} == taken)
        if columns and not any(is_wide(one) for one in group.rows):
            fitting.append(ProductGroup(columns, group.rows))
    few = [one for one in fitting if len(one.columns) <= MANY]
    first = [few[n] for n in heaviest([(one.worth, one.paths) for one in few])]
    rest = sorted((one for one in fitting if one not in first), key=lambda one: -one.worth)
    return first + rest


def is_wide(product: Product) -> bool:
    """Whether a product makes many features of few, and is worth to be cut by them alone."""
    many = math.prod(product.given) >= 4 * math.prod(product.taken)
    return many and product.elements >= LARGE


def pairs_by_size(products: Sequence[Product], attends: bool) -> Iterator[ProductGroup]:
    """Pairs of a layer whose `call` is not known: those whose sizes leave no other reading.

    Heads are made and taken, or a width that is not the one it is made of. Where all have one
    width, four products of a layer with heads are those of query, key, value, and of the result.

    Args:
        products: The products directly inside the layer, in the order in which it made them.
        attends: Whether the layer says that it has heads.
    """
    sizes = {one.given + one.taken for one in products}
    if attends and len(products) == 4 and len(sizes) == 1 and len(products[0].shape) == 2:
        yield ProductGroup(tuple(products[:3]), tuple(products[3:]))
        return
    before: list[Product] = []
    for rows in products:
        columns = [one for one in before if _fits(one, rows)]
        if any(_whole(one, rows) for one in columns):
            yield ProductGroup(tuple(columns), (rows,))
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


def wide_ends(products: Iterable[Product], roles: Roles, parts: int) -> None:
    """Cuts what is left and makes many classes of few features, by columns.

    Args:
        products: All of a model.
        roles: What groups have decided; added to.
        parts: Devices of the axis.
    """
    for one in products:
        if is_wide(one) and one.path not in roles.roles and one.divides("columns", parts):
            roles.roles[one.path] = "columns"
