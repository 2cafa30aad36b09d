"""Rules of operations that work element by element, after broadcasting."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kdist.rows.node import Node, aligned, broadcast_flat, named, rule, total_power
from kdist.rows.values import Apart, Const, Linear, Rows, RowsMeet, Value, powers

NONLINEAR = named(
    """
    Abs Acos Acosh Asin Asinh Atan Atan2 Atanh BesselI0 BesselI0e BesselI1 BesselI1e Bucketize Ceil
    ClipByValue Complex ComplexAbs Angle Cos Cosh Digamma Elu Equal Erf Erfc Erfinv Exp Expm1 Floor
    FloorDiv FloorMod Greater GreaterEqual Igamma Igammac Inv Invert IsFinite IsInf IsNan LeakyRelu
    LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod
    Ndtri NextAfter NotEqual Polygamma Pow Reciprocal Relu Relu6 RightShift Rint Round Rsqrt Selu
    Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square SquaredDifference Tan Tanh TruncateDiv
    TruncateMod Xdivy Xlog1py Xlogy Zeta BitwiseAnd BitwiseOr BitwiseXor ApproximateEqual
    QuantizeAndDequantizeV2 QuantizeAndDequantizeV4 FakeQuantWithMinMaxArgs
    FakeQuantWithMinMaxVars Betainc AsString StringLower StringUpper RegexReplace
    StaticRegexReplace StringToHashBucketFast StringToHashBucketStrong StringToNumber
    EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad
    SoftplusGrad SoftsignGrad SqrtGrad TanhGrad
    """
)
LINEAR = named(
    """
    Identity StopGradient Snapshot PreventGradient CheckNumerics CheckNumericsV2 Neg EnsureShape
    Real Imag Conj DebugGradientIdentity
    """
)


@rule(*NONLINEAR)
def nonlinear(node: Node) -> Value:
    """Any function of the elements at one position."""
    return combine(node, _same_size)


@rule(*LINEAR)
def linear(node: Node) -> Value:
    """A linear function of one tensor: whatever it was, it stays."""
    return node.values[0]


@rule("Cast", "Bitcast")
def cast(node: Node) -> Value:
    """Linear between kinds of floats, and from integers to floats."""
    target = node.op.outputs[0].dtype
    source = node.op.inputs[0].dtype
    if target.is_floating or target.is_complex or (source.is_integer and target.is_integer):
        return node.values[0]
    return nonlinear(node)


@rule("Add", "AddV2", "Sub", "AddN", "AccumulateNV2")
def add(node: Node) -> Value:
    """Sums of means are means, sums of sums are sums."""
    value = added(node, range(len(node.values)))
    rank = len(node.out_shape())
    return _placed(node, value, rank, range(len(node.values)))


@rule("BiasAdd", "BiasAddV1")
def bias_add(node: Node) -> Value:
    """The bias belongs to the channels, whichever dim these are."""
    node.only_constants(1)
    given, rank = node.values[0], len(node.shape(0))
    first = node.op.type == "BiasAdd" and node.attr("data_format") == b"NCHW"
    channels = 1 if first else rank - 1
    if isinstance(given, Rows) and given.dim == channels:
        raise RowsMeet
    value = added(node, (0, 1))
    if not isinstance(given, Const):
        return value
    return Const(frozenset(d for d in range(rank) if given.is_flat(d)) - {channels}, value.power)


@rule("Mul", "MulNoNan")
def multiply(node: Node) -> Value:
    """Linear where all factors but one are constants."""
    return combine(node, total_power, factors=1)


@rule("Div", "RealDiv", "DivNoNan")
def divide(node: Node) -> Value:
    """Linear in the numerator."""
    if isinstance(node.values[1], Linear):
        raise RowsMeet
    return combine(node, lambda p: total_power([p[0], None if p[1] is None else -p[1]]), factors=1)


@rule("Select", "SelectV2")
def select(node: Node) -> Value:
    """Linear in both branches if the condition is a constant."""
    condition, rank = node.values[0], len(node.out_shape())
    if node.op.type == "Select" and len(node.shape(0)) not in (0, rank):
        return _select_rows(node)
    value = added(node, (1, 2))
    if isinstance(condition, Linear) or (isinstance(condition, Rows) and condition.power):
        raise RowsMeet
    if isinstance(condition, Const) and condition.power != 0:
        if not node.constant:
            raise RowsMeet
        value = Const(flat=None, power=None)
    if isinstance(condition, Rows) and isinstance(value, Linear):
        raise RowsMeet
    if isinstance(condition, Rows) and isinstance(value, Const):
        if value.power != 0:
            raise RowsMeet
        value = Rows(0)
    return _placed(node, value, rank, range(3))


def _select_rows(node: Node) -> Value:
    """The old `Select`, whose condition may be a vector along dim 0."""
    layouts = {v.layout for v in node.values if isinstance(v, Rows)}
    if not layouts:
        return Const(power=0 if all(p == 0 for p in powers(node.values)) else None)
    first, *others = layouts
    constants = [v for v in node.values if isinstance(v, Const)]
    if others or first[0] != 0 or any(isinstance(v, Linear) for v in node.values):
        raise RowsMeet
    if any(not c.is_flat(0) for c in constants) or any(p != 0 for p in powers(node.values)):
        raise RowsMeet
    return Rows(*first)


def combine(node: Node, power_of: object, factors: int = 0) -> Value:
    """What a broadcast combination of all inputs is.

    Args:
        node: The operation.
        power_of: From the powers of the inputs to that of the output; None where there is none.
        factors: How many of the inputs may be a sum over rows, the others being constants.
    """
    rank, values = len(node.out_shape()), node.values
    power = power_of(powers(values))  # type: ignore[operator]
    sums = [v for v in values if isinstance(v, Linear)]
    if node.constant:
        return Const(broadcast_flat(node, rank), power)
    if power is None:
        raise RowsMeet
    if sums:
        if len(sums) > factors or any(isinstance(v, Rows) for v in values):
            raise RowsMeet
        return dataclasses.replace(sums[0], power=power)
    rows = aligned(node, rank)
    assert rows is not None
    return dataclasses.replace(rows, power=power)


def added(node: Node, indices: Sequence[int]) -> Apart:
    """What a sum, or a choice, of some inputs is; where its rows are is not said.

    Raises:
        RowsMeet: A sum over rows meets rows, or summands depend on the number of rows unalike.
    """
    values = [node.values[i] for i in indices]
    sums = [v for v in values if isinstance(v, Linear)]
    rows = [v for v in values if isinstance(v, Rows)]
    if sums and rows:
        raise RowsMeet
    leading: Sequence[Linear | Rows] = sums or rows
    if not leading:
        wanted = powers(values)
        return Const(power=wanted[0] if len(set(wanted)) == 1 else None)
    power = leading[0].power
    if any(v.power != power for v in leading):
        raise RowsMeet
    allowed = power + 1 if sums else power
    for i in indices:
        value = node.values[i]
        if isinstance(value, Const) and value.power != allowed and not node.is_zero(i):
            raise RowsMeet
    return leading[0]


def _placed(node: Node, value: Value, rank: int, indices: Sequence[int]) -> Value:
    """Says where the rows of a combined value are, or along which dims a constant is flat."""
    if isinstance(value, Const):
        return Const(broadcast_flat(node, rank, indices), value.power)
    if isinstance(value, Rows):
        rows = aligned(node, rank, indices)
        assert rows is not None
        return dataclasses.replace(rows, power=value.power)
    return value


def _same_size(found: Sequence[int | None]) -> int | None:
    return 0 if all(p == 0 for p in found) else None
