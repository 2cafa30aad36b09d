"""How operations that look at windows take their operands."""

from __future__ import annotations

from kdist.dtensor.window_rules import GIVEN, RULES, follows, has_whole_windows, places, spatial

import pytest
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import op_def_registry

X = (4, 6, 7, 8)


def node(op: str, **sizes: list[int]) -> node_def_pb2.NodeDef:
    made = node_def_pb2.NodeDef(op=op)
    for name, entries in sizes.items():
        made.attr[name].list.i.extend(entries)
    return made


@pytest.mark.parametrize("op", list(RULES))
def test_inputs_and_results_are_those_of_tensorflow(op: str) -> None:
    rule, known = RULES[op], op_def_registry.get(op)
    assert [one.name for one in known.output_arg] == [rule.name]
    others = {rule.sizes, rule.shaped, *rule.constants} - {None}
    assert {*rule.operands, *others} == {*range(len(known.input_arg))}
    assert not others & {*rule.operands}
    stand_in = op_def_registry.get(rule.stand_in)
    assert stand_in.output_arg[0].name == GIVEN
    many = bool(stand_in.input_arg[0].number_attr)
    assert many or len(stand_in.input_arg) == len(rule.operands)


@pytest.mark.parametrize(
    ("op", "equation"),
    [
        ("Conv2D", "nijc,cg->nijg"),
        ("Conv2DBackpropInput", "nijg,cg->nijc"),
        ("Conv2DBackpropFilter", "nijc,nijg->ijcg"),
        ("DepthwiseConv2dNativeBackpropFilter", "nijcm,nijc->ijcm"),
    ],
)
def test_a_convolution_is_a_product_of_channels(op: str, equation: str) -> None:
    found = RULES[op].equation(2)
    assert found.split("->")[1] == equation.split("->")[1]
    assert found.split(",")[0] == equation.split(",")[0]
    assert RULES[op].convolves


def test_spatial_dims() -> None:
    assert spatial("n.c", X) == [1, 2]
    assert places("n.c", X) == [6, 7]
    assert places(".cg", (3, 2, 8, 10)) == [3, 2]
    assert spatial("n.c", (4, 8)) == []


def test_what_follows_its_rule() -> None:
    pooled, pool = (4, 3, 3, 8), RULES["MaxPool"]
    assert follows(pool, node("MaxPool", ksize=[1, 2, 2, 1]), {0: X}, pooled)
    # Over channels, and over rows.
    assert not follows(pool, node("MaxPool", ksize=[1, 1, 1, 2]), {0: X}, pooled)
    assert not follows(pool, node("MaxPool", strides=[2, 1, 1, 1]), {0: X}, pooled)
    assert not follows(pool, node("MaxPool"), {0: X}, (4, 3, 3, 4))
    first = node("MaxPool")
    first.attr["data_format"].s = b"NCHW"
    assert not follows(pool, first, {0: X}, pooled)
    assert "ksize" not in first.attr  # an attribute without a value would break its program
    convolve, filters = RULES["Conv2D"], (3, 3, 8, 10)
    assert follows(convolve, node("Conv2D"), {0: X, 1: filters}, (4, 4, 5, 10))
    # In two groups.
    assert not follows(convolve, node("Conv2D"), {0: X, 1: (3, 3, 4, 10)}, (4, 4, 5, 10))


def test_parts_that_a_device_may_pool() -> None:
    rule, pooled = RULES["MaxPoolGrad"], (4, 3, 3, 8)
    half, pooled_half = (2, 6, 7, 4), (2, 3, 3, 4)

    def found(x: tuple[int, ...], y: tuple[int, ...], result: tuple[int, ...]) -> bool:
        given = {0: (X, x), 1: (pooled, y), 2: (pooled, pooled_half)}
        return has_whole_windows(rule, given, (X, result))

    assert found(half, pooled_half, half)
    assert not found((2, 3, 7, 4), pooled_half, half)  # half of the places
    assert not found(half, pooled_half, (2, 3, 7, 4))
    assert not found(half, (2, 3, 3, 8), half)  # other channels than the rest
    assert not found(half, pooled_half, X)


def test_dtypes_of_what_is_resized() -> None:
    """A float32, whatever was resized: stand-ins are given that dtype."""
    for op, rule in RULES.items():
        known = op_def_registry.get(op)
        if not rule.convolves and rule.name != GIVEN and op != "ResizeNearestNeighbor":
            assert known.output_arg[0].type == tf.float32.as_datatype_enum
