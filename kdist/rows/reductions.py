"""Rules of operations along dims: reductions, softmax, sorting, cumulative sums, matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from kdist.rows.joins import without_dims
from kdist.rows.node import Node, aligned, broadcast_flat, named, rule
from kdist.rows.values import Apart, Const, Linear, Rows, RowsMeet, Value, powers

LAST = named(
    """
    LogSoftmax Softmax TopKV2 NthElement FFT IFFT RFFT IRFFT LRN
    """
)
SEGMENTS = named(
    """
    SegmentMax SegmentMaxV2 SegmentMean SegmentMin SegmentMinV2 SegmentProd SegmentProdV2 SegmentSum
    SegmentSumV2 UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum
    """
)
LAST_TWO = named(
    """
    BatchMatrixBandPart Cholesky MatrixBandPart MatrixDeterminant MatrixExponential MatrixInverse
    LogMatrixDeterminant MatrixLogarithm MatrixSquareRoot Qr SelfAdjointEigV2 Eig Svd FFT2D IFFT2D
    RFFT2D IRFFT2D MatrixDiagPartV3 MatrixDiagPartV2 MatrixDiagPart
    MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3
    """
)


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
def reduce(node: Node) -> Value:
    """Sums and means over the batch stay linear, everything else over it mixes."""
    node.only_constants(1)
    value, shape = node.values[0], node.shape(0)
    dims = sorted(node.axes(1, len(shape)))
    keep = bool(node.attr("keep_dims"))
    kind = node.op.type
    if isinstance(value, Rows) and value.dim in dims:
        if kind not in ("Sum", "Mean"):
            raise RowsMeet
        return node.linear(value.power - (kind == "Mean"))
    if not isinstance(value, Rows):
        value = _of_constant(node, value, [shape[d] for d in dims])
    elif value.power and kind not in ("Sum", "Mean"):
        raise RowsMeet
    if not keep:
        return without_dims(value, dims)
    if isinstance(value, Const) and value.flat is not None:
        return Const(value.flat | set(dims), value.power)
    return value


def _of_constant(
    node: Node, value: Const | Linear, sizes: Collection[int | None]
) -> Const | Linear:
    """The power of a reduction that goes over as many entries as the batch has, or not."""
    kind = node.op.type
    over_batch = sum(node.is_batch_multiple(s) for s in sizes)
    if isinstance(value, Linear):
        if kind not in ("Sum", "Mean"):
            raise RowsMeet
        return dataclasses.replace(value, power=value.power + over_batch * (kind == "Sum"))
    if kind == "Mean" or not over_batch:
        same = kind in ("Sum", "Mean", "Max", "Min") or value.power == 0
        return value if same else Const(value.flat, None)
    if kind == "Sum" and value.flat is None and value.power is not None:
        return Const(None, value.power + over_batch)
    same = kind in ("Max", "Min", "All", "Any") and value.power == 0
    return value if same else Const(value.flat, None)


@rule("ArgMax", "ArgMin")
def arg_max(node: Node) -> Value:
    """The chosen place along a dim, which goes."""
    node.only_constants(1)
    axis = node.axes(1, len(node.shape(0)))[0]
    return without_dims(_along(node, (axis,)), (axis,))


@rule("Cumsum", "CumulativeLogsumexp", "Cumprod", "ReverseV2")
def along_axes(node: Node) -> Value:
    """Along the dims that input 1 names."""
    node.only_constants(1)
    axes = node.axes(1, len(node.shape(0)))
    return _along(node, axes, linear=node.op.type in ("Cumsum", "ReverseV2"))


@rule("Roll")
def roll(node: Node) -> Value:
    """Along the dims that input 2 names."""
    node.only_constants(1, 2)
    return _along(node, node.axes(2, len(node.shape(0))), linear=True)


@rule(*LAST)
def along_last(node: Node) -> Value:
    """Along the last dim."""
    node.only_constants(*range(1, len(node.values)))
    rank = len(node.shape(0))
    value = _along(node, (rank - 1,))
    return without_dims(value, (rank - 1,)) if node.op.type == "NthElement" else value


@rule(*LAST_TWO)
def along_last_two(node: Node) -> Value:
    """Matrices in the last two dims."""
    node.only_constants(*range(1, len(node.values)))
    rank = len(node.shape(0))
    value = _along(node, (rank - 2, rank - 1))
    return Const(frozenset(), value.power) if isinstance(value, Const) else value


@rule("Cross")
def cross(node: Node) -> Value:
    """Of two vectors in the last dim."""
    last = len(node.out_shape()) - 1
    if any(p != 0 for p in powers(node.values)):
        raise RowsMeet
    found = aligned(node, last + 1)
    if found is not None and found.dim == last:
        raise RowsMeet
    return Const() if found is None else found


@rule("ReverseSequence")
def reverse_sequence(node: Node) -> Value:
    """Each entry of one dim along another one, up to a length of its own."""
    value, lengths = node.values
    if any(p != 0 for p in powers(node.values)):
        raise RowsMeet
    if node.constant:
        return Const()
    along, entries = node.attr("seq_dim"), node.attr("batch_dim")
    rows = [Rows(entries, v.outer, v.inner) for v in (lengths,) if isinstance(v, Rows)]
    rows += [v for v in (value,) if isinstance(v, Rows)]
    if len({*rows}) != 1 or rows[0].dim == along:
        raise RowsMeet
    flat = value.is_flat(entries) if isinstance(value, Const) else True
    if isinstance(lengths, Const) and rows[0].dim == entries:
        flat = lengths.is_flat(0)
    if not flat:
        raise RowsMeet
    return rows[0]


@rule("MatrixSolve", "MatrixTriangularSolve")
def solve(node: Node) -> Value:
    """Two matrices in the last two dims."""
    if any(p != 0 for p in powers(node.values)):
        raise RowsMeet
    rank = len(node.shape(0))
    found = aligned(node, rank)
    if found is None:
        flat = broadcast_flat(node, rank)
        return Const(frozenset(d for d in range(rank - 2) if flat is None or d in flat))
    if len(node.shape(1)) != rank or found.dim >= rank - 2:
        raise RowsMeet
    return found


@rule(*SEGMENTS)
def segments(node: Node) -> Value:
    """Along the first dims, as many as ids have, the other dims apart."""
    node.only_constants(*range(1, len(node.values)))
    value, rank = node.values[0], len(node.shape(1))
    if isinstance(value, Const):
        return Const(frozenset(), value.power)
    if not isinstance(value, Rows) or value.dim < rank or value.power:
        raise RowsMeet
    return dataclasses.replace(value, dim=value.dim - rank + 1)


@rule("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3")
def matrix_diag(node: Node) -> Value:
    """From the last dim to the last two."""
    node.only_constants(*range(1, len(node.values)))
    return _along(node, (len(node.shape(0)) - 1,))


@rule("L2Loss")
def l2_loss(node: Node) -> Value:
    """A sum over everything."""
    value = node.values[0]
    if isinstance(value, Const):
        return Const(power=None if value.power != 0 or value.flat is None else 0)
    if isinstance(value, Rows) and value.power == 0:
        return node.linear(0)
    raise RowsMeet


@rule("SoftmaxCrossEntropyWithLogits")
def cross_entropy(node: Node) -> list[Value]:
    """Per row of a matrix: the loss, and its gradient."""
    if node.constant:
        return [Const(power=None if any(p != 0 for p in powers(node.values)) else 0)] * 2
    return [_losses(node, aligned(node, 2))] * 2


@rule("SparseSoftmaxCrossEntropyWithLogits")
def sparse_cross_entropy(node: Node) -> list[Value]:
    """The same with one label per row."""
    if node.constant:
        return [Const(power=None if any(p != 0 for p in powers(node.values)) else 0)] * 2
    rows = [v for v in node.values if isinstance(v, Rows)]
    constants = [v for v in node.values if isinstance(v, Const)]
    if len(set(rows)) != 1 or len(rows) + len(constants) != 2:
        raise RowsMeet
    if any(not c.is_flat(0) for c in constants):
        raise RowsMeet
    return [_losses(node, rows[0])] * 2


def _losses(node: Node, rows: Rows | None) -> Rows:
    if rows is None or rows.dim != 0 or any(p != 0 for p in powers(node.values)):
        raise RowsMeet
    return rows


@rule("DenseBincount")
def bincount(node: Node) -> Value:
    """How often each number is in each row of a matrix, with a weight each or none."""
    if node.constant:
        return Const()
    node.only_constants(1)
    numbers, _, weights = node.values
    if not isinstance(numbers, Rows) or numbers.dim != 0 or numbers.power:
        raise RowsMeet
    if len(node.shape(0)) != 2 or (weights != numbers and node.shape(2) != (0,)):
        raise RowsMeet
    return numbers


@rule("InTopK", "InTopKV2")
def in_top_k(node: Node) -> Value:
    """Whether a row's label is among its best."""
    if node.constant:
        return Const()
    node.only_constants(2)
    scores, labels = node.values[:2]
    if scores != labels or not isinstance(scores, Rows) or scores.dim != 0 or scores.power:
        raise RowsMeet
    return scores


def _along(node: Node, dims: Collection[int], linear: bool = False) -> Apart:
    """A function of all entries along some dims of input 0, the other dims apart."""
    value = node.values[0]
    if isinstance(value, Const):
        if value.flat is None:
            rank = len(node.shape(0))
            return Const(frozenset(range(rank)) - frozenset(dims), value.power)
        return Const(value.flat - frozenset(dims), value.power)
    if not linear and (isinstance(value, Linear) or value.power):
        raise RowsMeet
    if isinstance(value, Rows) and value.dim in dims:
        raise RowsMeet
    return value
