"""Products of a weight of three dims or more by a matrix, without its dims merged into one.

Keras multiplies the factors of LoRA for attention, (width, heads, rank) by (rank, head), as
matrices of width · heads rows. Heads that are cut cannot be merged into such rows: DTensor would
gather the first factor, and in the backward pass the whole gradient of the weight that is adapted.
As einsums of the dims themselves nothing but the gradient of the second factor is a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kdist.dtensor.body import Body, control_inputs, data_inputs
from kdist.graphs.chunks import node_of

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.experimental import dtensor

_COPIES = ("Identity", "Cast")
_ROWS = "abcdefgh"
"""Labels of the dims that rows are merged of."""


def unmerge_products(body: Body, layouts: Sequence[dtensor.Layout]) -> int:
    """Rewrites products of arguments, of which a dim behind the first merged one is cut.

    Args:
        body: The traced function.
        layouts: Of each flat input.

    Returns:
        How many nodes it has rewritten, those of gradients included.
    """
    pairs = zip(body.inputs, layouts)
    cut = {r: one for r, one in pairs if _is_cut_behind(one.sharding_specs)}
    count = 0
    for name in list(body.nodes):
        if (argument := _merged_argument(body, name)) in cut:
            count += _rewrite(body, name, cut[argument])
    if count:
        body.drop_unused()
    return count


def _rewrite(body: Body, name: str, layout: dtensor.Layout) -> int:
    """Rewrites what multiplies a weight, of some layout, whose dims a node merges."""
    merged, weight = f"{name}:output:0", _unmerged(body, name)
    rows, count = _ROWS[: body.specs[weight].shape.rank - 1], 0
    for product, other, transposed in list(_products(body, merged)):
        if transposed == (False, False):
            count += _split(body, product, weight, other, f"{rows}y,yz->{rows}z")
        elif transposed == (True, False) and _merges_alike(body, node := node_of(other), weight):
            # Cut along another of the rows' dims, DTensor would add it up for each device.
            dims = [*layout.sharding_specs[:-1], dtensor.UNSHARDED]
            like = dtensor.Layout(dims, layout.mesh)
            gradient = body.lay_out(_unmerged(body, node), like, f"{product}/laid_out")
            _einsum(body, product, product, [weight, gradient], f"{rows}y,{rows}z->yz")
            body.redirect({f"{product}:product:0": f"{product}:output:0"}, list(body.nodes))
            count += 1
            for back, factor, way in list(_products(body, other)):
                if way == (False, True):
                    count += _split(body, back, gradient, factor, f"{rows}z,yz->{rows}y")
    return count


def _split(body: Body, product: str, left: str, right: str, equation: str) -> int:
    """Has what splits the rows of a product again make the product itself."""
    leading, count = body.specs[left].shape[:-1], 0
    for reader in body.readers().get(f"{product}:product:0", ()):
        made = body.specs.get(f"{reader}:output:0")
        if body.nodes[reader].op == "Reshape" and made is not None and made.shape[:-1] == leading:
            _einsum(body, reader, product, [left, right], equation)
            count += 1
    return count


def _einsum(body: Body, name: str, like: str, inputs: Sequence[str], equation: str) -> None:
    """Puts an einsum in the place of a node, of the dtype of a product."""
    made = node_def_pb2.NodeDef(name=name, op="Einsum")
    made.input.extend([*inputs, *control_inputs(body.nodes[name])])
    made.attr["equation"].s = equation.encode()
    made.attr["N"].i, made.attr["T"].type = 2, body.nodes[like].attr["T"].type
    spec = body.specs.get(f"{name}:product:0")
    body.nodes[name] = made
    if spec is not None:
        body.note(f"{name}:output:0", spec.shape, spec.dtype)


def _products(body: Body, left: str) -> Iterator[tuple[str, str, tuple[bool, bool]]]:
    """Matrix products by a tensor on the left: their names, the right one, which are turned."""
    for name in body.readers().get(left, ()):
        node = body.nodes[name]
        if node.op == "MatMul" and data_inputs(node)[0] == left:
            turned = node.attr["transpose_a"].b, node.attr["transpose_b"].b
            yield name, data_inputs(node)[1], turned


def _is_cut_behind(dims: Sequence[str]) -> bool:
    """Whether a dim is cut that is neither the first nor the last."""
    return any(dim != dtensor.UNSHARDED for dim in dims[1:-1])


def _merged_argument(body: Body, name: str) -> str | None:
    """The argument of the program of which a node merges all dims but the last, if it does."""
    if not _merges(body, name):
        return None
    source = _unmerged(body, name)
    while source not in body.inputs:
        node = body.nodes[node_of(source)]
        if node.op not in _COPIES:
            return None
        (source,) = data_inputs(node)
    return source


def _merges_alike(body: Body, name: str, weight: str) -> bool:
    """Whether a node merges dims of the same sizes as another one does."""
    if not _merges(body, name):
        return False
    return bool(body.specs[_unmerged(body, name)].shape[:-1] == body.specs[weight].shape[:-1])


def _merges(body: Body, name: str) -> bool:
    """Whether a node makes a matrix of a tensor of three dims or more, whose last dim stays."""
    node, made = body.nodes.get(name), body.specs.get(f"{name}:output:0")
    if node is None or node.op != "Reshape" or made is None or made.shape.rank != 2:
        return False
    shape: tf.TensorShape = body.specs[_unmerged(body, name)].shape
    known = shape.is_fully_defined() and 3 <= shape.rank <= len(_ROWS)
    return bool(known and made.shape.as_list() == [int(np.prod(shape[:-1])), shape[-1]])


def _unmerged(body: Body, name: str) -> str:
    return data_inputs(body.nodes[name])[0]
