"""A layout map for a model, found by the sizes and connections of its layers."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kdist._compat import keras_graphs, keras_models
from kdist.api.product_graph import ProductGraph, Weight, closed_in, has_convolutions
from kdist.config.tables import host_layers, split_layers
from kdist.display.warn import warn
from kdist.layers import DistributedEmbedding
from kdist.plan.column_row import LARGE, ProductGroup, Roles, chosen, pairs_by_size, wide_ends
from kdist.plan.convolutions import convolution_of
from kdist.plan.products import Product, filters_as_product, product_of, quantized_products
from kdist.sharding.dims import Dims
from kdist.sharding.mesh import Topology
from kdist.storage.variables import stored

import keras

FEW = 0.25
"""Of the weights that a pattern matches, those that may be laid out otherwise."""


def layout_map_for(
    model: keras.Model, mesh: keras.distribution.DeviceMesh, axis: str | None = None
) -> dict[str, Dims]:
    """Finds which weights of a model to cut over an inner axis, as Megatron-LM does it.

    Attention is cut by heads; of two products that follow each other the first is cut by columns
    and the second by rows, with nothing to send between them; so of two convolutions, by channels,
    and what has weights for each channel between them, such as a gate; large tables of embeddings,
    and last layers of many classes, by their entries. All else stays whole: other norms and
    convolutions, and recurrent cells, which are gathered for use anyway. Weights of layers that a
    parallel model over this mesh has already stay as they are there. Numbers do not depend on the
    choice. The map is a dict to print, to change, and to give to
    `ParallelConfig(layout_map=...)`. Since blocks of one kind share patterns, that of a small model
    serves a deeper one of the same names.

    Args:
        model: A model whose weights exist; one that only holds others needs no `call`.
        mesh: The mesh it is to be trained on.
        axis: The axis to cut over; by default the only one above 1 that is not `data`, `batch` or
            `pipe`.

    Returns:
        Layouts by pattern. One warning names what does not divide, and so is left out.

    Raises:
        ValueError: Weights of the model are not built; the axis is none that cuts layers, or there
            are several; or nothing in the model is to be cut.

    Example:
        >>> mesh = kdist.mesh(data=2, model=2)
        >>> up, down = keras.layers.Dense(64, name="up"), keras.layers.Dense(8, name="down")
        >>> network = keras.Sequential([keras.Input((8,)), up, down], name="net")
        >>> for pattern, layout in kdist.layout_map_for(network, mesh).items():
        ...     print(pattern, layout)
        net/up/kernel (None, 'model')
        net/up/bias ('model',)
        net/down/kernel ('model', None)
    """
    unbuilt = [] if model.built else keras_models.without_weights(model)
    if unbuilt or not model.weights:
        names = [one.name for one in unbuilt[:3]] or "no weights"
        raise ValueError(
            "Which weights to cut is read from their shapes. Build the model first (call it on a "
            "batch, or each of its layers), or use the map of a small one with the same names. "
            f"Received: {model.name!r}, with {names} not built"
        )
    topology = Topology.from_mesh(mesh)
    axis, parts = _axis(topology, axis)
    kept = _stored(model, topology)
    roles, layouts = _decided(model, axis, parts, kept)
    _leave_unlike(model, roles, layouts, parts)
    layouts = {path: dims for path, dims in (layouts | kept).items() if any(dims)}
    _tell(model, roles, layouts, parts)
    ranks = {v.path: len(v.shape) for v in model.weights}
    return _patterns({path: layouts[path] for path in ranks if path in layouts}, ranks)


def _decided(
    model: keras.Model, axis: str, parts: int, kept: Mapping[str, Dims]
) -> tuple[Roles, dict[str, Dims]]:
    """What is cut and what is not, and layouts by path."""
    roles = Roles()
    layers = keras_models.flat_layers(model)
    inside = {id(layer): one for layer in layers if (one := product_of(layer))}
    multiplied = list(inside.values())
    inside |= {id(layer): one for layer in layers if (one := filters_as_product(layer))}
    products = {one.path: one for one in inside.values()}
    between: dict[str, list[Weight]] = {}
    opened = set[int]()
    for parent in layers:
        for group in _groups(parent, inside, parts, between, opened, roles.left):
            if stays := _in_the_way(group, kept, axis):
                roles.left |= stays
            else:
                roles.group(group.columns, group.rows, parts)
    wide_ends(multiplied, roles, parts)
    roles.left |= {one.path: f"quantized to {mode}" for one, mode in quantized_products(layers)}
    layouts: dict[str, Dims] = {}
    for path, role in roles.roles.items():
        one = products[path]
        layouts[path] = _cut(one.shape, one.cut(role), axis)
        if role == "columns" and one.bias is not None and one.bias_dim is not None:
            layouts[one.bias] = _cut(one.bias_shape, one.bias_dim, axis)
        for variable, dim in between.get(path, ()) if role == "rows" else ():
            if variable.shape[dim] == one.shape[one.cut(role)]:  # a gate may have one for all
                layouts[variable.path] = _cut(variable.shape, dim, axis)
    for table, dim in _tables(model):
        if table.shape[dim] % parts == 0:
            layouts[table.path] = _cut(table.shape, dim, axis)
        else:
            roles.left[table.path] = f"dim {dim} has {table.shape[dim]}, no multiple of {parts}"
    return roles, layouts


def _axis(topology: Topology, wanted: str | None) -> tuple[str, int]:
    """The axis to cut over, and its size."""
    inner = {name: size for name, size in topology.inner_axes if size > 1}
    if wanted is None and len(inner) == 1:
        return next(iter(inner.items()))
    if wanted is None or wanted not in inner:
        raise ValueError(
            "A layout map cuts weights over one axis above 1 that is not 'data', 'batch' or "
            f"'pipe': name it with axis=, and give the mesh one, such as model=2. The mesh has "
            f"{topology.describe_axes()}. Received: axis={wanted!r}"
        )
    return wanted, inner[wanted]


def _groups(
    parent: keras.layers.Layer,
    products: Mapping[int, Product],
    parts: int,
    between: dict[str, list[Weight]],
    opened: set[int],
    left: dict[str, str],
) -> Iterable[ProductGroup]:
    found: list[ProductGroup] = []
    functional = keras_models.functional_of(parent)
    inner = functional or (None if id(parent) in opened else _graph_inside(parent, products, left))
    if inner is not None:
        graph = ProductGraph(inner, products)
        found = chosen(graph.groups())
        between |= graph.between
        opened |= graph.opened
        left |= graph.closed
    if functional is not None:
        return found
    heads = getattr(parent, "num_heads", None)
    attends = isinstance(heads, int) and heads > 0 and heads % parts == 0
    inside = keras_models.layers_inside(parent)
    # Sizes say too little of convolutions.
    inside = [one for one in inside if id(one) in products and convolution_of(one) is None]
    return [*found, *pairs_by_size([products[id(one)] for one in inside], attends)]


def _graph_inside(
    parent: keras.layers.Layer, products: Mapping[int, Product], left: dict[str, str]
) -> Any:
    """The graph of a layer, or model, whose `call` is its own; None without convolutions, or any.

    Then it is noted why.
    """
    if id(parent) in products or not has_convolutions(parent):
        return None
    try:
        given = keras_graphs.known_inputs(parent)
        return None if given is None else keras_graphs.called_graph(parent, *given)
    except keras_graphs.NoGraph as error:
        left |= closed_in(parent, products, error)
        return None


def _tables(model: keras.Model) -> Iterator[tuple[keras.Variable, int]]:
    """Large tables of embeddings, and the dim of their entries; not those placed elsewhere."""
    placed = {id(layer) for layer in (*host_layers(model), *split_layers(model))}
    layers = keras_models.flat_layers(model)
    for dealt in (layer for layer in layers if isinstance(layer, DistributedEmbedding)):
        placed |= set(map(id, keras_models.flat_layers(dealt)))
    for layer in layers:
        if id(layer) in placed or not isinstance(layer, keras.layers.Embedding):
            continue
        for variable in layer.weights:
            large = len(variable.shape) == 2 and math.prod(variable.shape) >= LARGE
            if large and variable.name in ("embeddings", "reverse_embeddings"):
                yield variable, 0 if variable.name == "embeddings" else 1


def _cut(shape: Sequence[int], dim: int, axis: str) -> Dims:
    return tuple(axis if n == dim else None for n in range(len(shape)))


def _leave_unlike(model: keras.Model, roles: Roles, layouts: dict[str, Dims], parts: int) -> None:
    """Leaves out layouts that do not fit each weight of their path: networks may share paths."""
    for variable in model.weights:
        path, shape = variable.path, tuple(variable.shape)
        dims = layouts.get(path, ())
        fits = len(dims) == len(shape) and not any(n % parts for n, d in zip(shape, dims) if d)
        if path in layouts and not fits:
            del layouts[path]
            roles.left[path] = f"one of that path has shape {shape}"


def _stored(model: keras.Model, topology: Topology) -> dict[str, Dims]:
    """Layouts of weights that another model has over this mesh, by path."""
    found: dict[str, Dims] = {}
    for variable in model.weights:
        entry = stored(variable)
        if entry and entry.topology == topology.with_merged(entry.topology.merged):
            found[variable.path] = entry.placement.layout.dims
    return found


def _in_the_way(group: ProductGroup, kept: Mapping[str, Dims], axis: str) -> dict[str, str]:
    """Why a group is not cut where weights of it are stored in another way, by their paths."""
    cuts = [(one, one.cut("columns")) for one in group.columns]
    cuts += [(one, one.cut("rows")) for one in group.rows]
    return {
        one.path: f"another model has it as {kept[one.path]}"
        for one, dim in cuts
        if kept.get(one.path, dims := _cut(one.shape, dim, axis)) != dims
    }


def _tell(model: keras.Model, roles: Roles, layouts: dict[str, Dims], parts: int) -> None:
    left = [f"{path} ({why})" for path, why in roles.left.items() if path not in layouts]
    shown = "; ".join(left[:3]) + (f"; and {len(left) - 3} more" if len(left) > 3 else "")
    if not layouts:
        raise ValueError(
            "Nothing to cut was found: no attention, no two products or convolutions that "
            "follow each other, no large table. Write a layout map by hand (of a quantized model: "
            "find it before quantize, whose kernels keep their paths), or use replicas and "
            f"optimizer levels. Received: {model.name!r}, {parts} parts, left whole: {shown or '-'}"
        )
    if left:
        warn(f"{model.name}: these stay whole: {shown}")


def _patterns(layouts: dict[str, Dims], weights: Mapping[str, int]) -> dict[str, Dims]:
    """Layouts by pattern: any number in the place of each, or of all but the last.

    Where a few of those that it matches are laid out in another way, or whole, their paths say so,
    which count for more; where many are, all have paths.

    Args:
        layouts: By path, of what is cut.
        weights: How many dims each has, by path.
    """
    of_pattern: dict[str, dict[str, Dims]] = {}
    for path, rank in weights.items():
        for pattern in _wider(path):
            of_pattern.setdefault(pattern, {})[path] = layouts.get(path, (None,) * rank)
    found: dict[str, Dims] = {}
    decided: set[str] = set()
    for path in layouts:
        for pattern in _wider(path) if path not in decided else ():
            alike = of_pattern[pattern]
            most, count = collections.Counter(alike.values()).most_common(1)[0]
            others = {one: dims for one, dims in alike.items() if dims != most}
            if any(most) and len(others) <= count * FEW and all(map(_is_plain, others)):
                found |= {pattern: most, **others}
                decided |= set(alike)
                break
        else:
            if path not in decided:
                found[re.escape(path)] = layouts[path]
    return found


def _is_plain(path: str) -> bool:
    """Whether a path, as a pattern, matches itself."""
    return re.escape(path) == path


def _wider(path: str) -> list[str]:
    """Patterns that match a path and others like it, the widest first."""
    *parts, end = re.split(r"\d+", re.escape(path))
    numbers = re.findall(r"\d+", path)
    found = [r"\d+".join([*parts, end])]
    if numbers:
        found.append(r"\d+".join(parts) + numbers[-1] + end)
    return found
