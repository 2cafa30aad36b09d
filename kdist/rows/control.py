"""Rules of lists of tensors, random numbers, and of what has no rule of its own."""

from __future__ import annotations

import dataclasses

from kdist.rows.joins import without_dims
from kdist.rows.node import Node, named, rule
from kdist.rows.numbers import power_of
from kdist.rows.values import Const, Rows, RowsMeet, Value, join, powers

import numpy as np
import tensorflow as tf

RANDOM = named(
    """
    RandomGamma RandomPoissonV2 RandomStandardNormal RandomUniform RandomUniformInt
    StatefulStandardNormalV2 StatefulUniform StatefulUniformInt StatefulTruncatedNormal
    StatelessParameterizedTruncatedNormal StatelessRandomBinomial StatelessRandomGammaV2
    StatelessRandomGammaV3 StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomPoisson
    StatelessRandomUniform StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2
    StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformV2
    StatelessTruncatedNormal StatelessTruncatedNormalV2 TruncatedNormal
    """
)


@rule("Const")
def constant(node: Node) -> Value:
    """Numbers that the trace contains."""
    value = tf.get_static_value(node.op.outputs[0])
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        return Const(flat=None if array.size == 1 else frozenset())
    power = power_of(array, node.batch)
    if array.size == 0 or (array == array.reshape(-1)[0]).all():
        return Const(flat=None, power=power)
    same = (d for d in range(array.ndim) if (array == array.take([0], axis=d)).all())
    return Const(frozenset(same), power)


@rule(*RANDOM)
def noise(node: Node) -> Value:
    """Numbers of one distribution everywhere, so equal for all rows in that sense."""
    if not node.constant:
        raise RowsMeet
    return Const(flat=None)


@rule("Multinomial", "StatelessMultinomial")
def draws(node: Node) -> Value:
    """Draws by the logits of each row."""
    node.only_constants(*range(1, len(node.values)))
    value = node.values[0]
    if isinstance(value, Rows) and (value.dim != 0 or value.power):
        raise RowsMeet
    if not isinstance(value, Const | Rows):
        raise RowsMeet
    return value


@rule("ResourceGather")
def resource_gather(node: Node) -> Value:
    """Rows choose from a table that a variable holds."""
    table, indices = node.values
    if not isinstance(table, Const) or table.power != 0 or node.attr("batch_dims"):
        raise RowsMeet
    if isinstance(indices, Rows) and indices.power == 0:
        return indices
    if isinstance(indices, Const):
        return Const(power=0 if indices.power == 0 else None)
    raise RowsMeet


@rule("TensorListReserve", "EmptyTensorList")
def new_list(node: Node) -> Value:
    """A list without tensors. A list's value is that of each of its tensors."""
    return Const(flat=None)


@rule("TensorListFromTensor")
def list_of(node: Node) -> Value:
    """Dim 0 becomes the place in the list, and must not be the batch's."""
    return without_dims(node.values[0], (0,))


@rule("TensorListStack", "TensorListGather")
def stack(node: Node) -> Value:
    """The place in the list becomes dim 0."""
    node.only_constants(*range(1, len(node.values)))
    value = node.values[0]
    if isinstance(value, Rows):
        return dataclasses.replace(value, dim=value.dim + 1)
    if isinstance(value, Const):  # tensors at different places may differ
        dims = range(len(node.out_shape()) - 1) if value.flat is None else value.flat
        return Const(frozenset(d + 1 for d in dims), value.power)
    return value


@rule("TensorListGetItem", "TensorListResize")
def get_item(node: Node) -> Value:
    """One tensor of the list, at a place that no row decides."""
    node.only_constants(*range(1, len(node.values)))
    return node.values[0]


@rule("TensorListSetItem")
def set_item(node: Node) -> Value:
    """The list with another tensor at a place that no row decides."""
    node.only_constants(1)
    return join(node.values[0], node.values[2])


@rule("TensorListPushBack")
def push_back(node: Node) -> Value:
    """The list with one more tensor."""
    return join(node.values[0], node.values[1])


@rule("TensorListPopBack")
def pop_back(node: Node) -> Value:
    """The list without its last tensor, and that one."""
    node.only_constants(1)
    return node.values[0]


def without_rule(node: Node) -> Value:
    """An operation that is not known: constant if all it gets is, else it counts as mixing."""
    if not node.constant:
        raise RowsMeet
    return Const(power=0 if all(p == 0 for p in powers(node.values)) else None)
