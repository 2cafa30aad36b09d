"""Estimates of layers against what is counted by hand."""

from __future__ import annotations

from kdist.stages.layer_costs import LayerCost, Machine, itemsize, layer_cost, used_variables

import keras
import pytest
from keras import layers, ops

T, D = 5, 8
WORDS = ((T,), "int32")
ROWS = ((T, D), "float32")
IMAGE = ((6, 6, 3), "float32")

# Layer, shapes and dtypes of its inputs, multiply-adds per example.
MULTIPLIES = {
    "dense": (lambda: layers.Dense(4), [((D,), "float32")], D * 4),
    "dense-per-position": (lambda: layers.Dense(4), [ROWS], T * D * 4),
    "einsum-dense": (lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3)), [ROWS], T * D * 6),
    "einsum-dense-two": (lambda: layers.EinsumDense("abc,bcd->ad", 7), [ROWS], T * D * 7),
    "convolution": (lambda: layers.Conv2D(4, 3), [IMAGE], 4 * 4 * 3 * 3 * 3 * 4),
    "convolution-strided": (
        lambda: layers.Conv2D(4, 3, strides=2, padding="same"), [IMAGE], 3 * 3 * 9 * 3 * 4,
    ),
    "convolution-groups": (lambda: layers.Conv1D(4, 3, groups=2), [ROWS], 3 * 3 * 4 * 4),
    "depthwise": (
        lambda: layers.DepthwiseConv2D(3, depth_multiplier=2), [IMAGE], 4 * 4 * 9 * 3 * 2,
    ),
    "separable": (lambda: layers.SeparableConv2D(4, 3), [IMAGE], 4 * 4 * (9 * 3 + 3 * 4)),
    "transposed": (
        lambda: layers.Conv2DTranspose(4, 3, strides=2), [IMAGE], 6 * 6 * 9 * 3 * 4,
    ),
    "attention": (
        lambda: layers.MultiHeadAttention(2, 4), [ROWS, ROWS], 4 * T * D * 8 + 2 * T * T * 8,
    ),
    "grouped-attention": (
        lambda: layers.GroupQueryAttention(4, 4, 2), [ROWS, ROWS],
        2 * T * D * 16 + 2 * T * D * 8 + 2 * T * T * 16,
    ),
    "cross-attention": (
        lambda: layers.MultiHeadAttention(2, 4), [ROWS, ((3, 6), "float32")],
        2 * T * D * 8 + 2 * 3 * 6 * 8 + 2 * T * 3 * 8,
    ),
    "dot-attention": (lambda: layers.Attention(), [[ROWS, ROWS]], 2 * T * T * D),
    "lstm": (lambda: layers.LSTM(4), [ROWS], T * (D + 4) * 16),
    "gru": (lambda: layers.GRU(4, return_sequences=True), [ROWS], T * (D + 4) * 12),
    "bidirectional": (lambda: layers.Bidirectional(layers.LSTM(4)), [ROWS], 2 * T * (D + 4) * 16),
    "time-distributed": (lambda: layers.TimeDistributed(layers.Dense(4)), [ROWS], T * D * 4),
    "norm": (lambda: layers.LayerNormalization(), [ROWS], T * 2 * D),
    "unknown": (lambda: TwoProducts(), [ROWS], 2 * T * D * D),
}  # fmt: skip


class TwoProducts(layers.Layer):
    """A layer that no rule knows."""

    def build(self, shape):
        self.a = self.add_weight((shape[-1], shape[-1]))
        self.b = self.add_weight((shape[-1], shape[-1]))

    def call(self, x):
        return x @ self.a @ self.b


def tensors(spec):
    if isinstance(spec, list):
        return [tensors(one) for one in spec]
    return keras.Input(spec[0], dtype=spec[1])


def cost_of(layer, specs, **arguments):
    inputs = tensors(specs)
    made = keras.tree.flatten(layer(*inputs, **arguments))
    return layer_cost(layer, keras.tree.flatten(inputs), made, arguments)


@pytest.mark.parametrize("name", MULTIPLIES)
def test_multiplies(name):
    make, specs, count = MULTIPLIES[name]
    assert cost_of(make(), specs).flops == 2 * count


def test_look_ups_read_rows_only():
    cost = cost_of(layers.Embedding(1000, D), [WORDS])
    assert (cost.flops, cost.weight_bytes) == (0, 0)
    assert cost.activation_bytes == 4 * T + 4 * T * D


@pytest.mark.parametrize("tied", [True, False])
def test_reversed_embeddings_multiply(tied):
    layer = layers.ReversibleEmbedding(100, D, tie_weights=tied)
    assert cost_of(layer, [WORDS]).flops == 0
    cost = cost_of(layer, [ROWS], reverse=True)
    assert cost.flops == 2 * T * D * 100
    assert cost.weight_bytes == 4 * 100 * D
    there, back = ({id(v) for v in used_variables(layer, {"reverse": r})} for r in (False, True))
    assert (there == back) == tied
    assert tied or not there & back


def test_layers_without_weights_count_what_they_make():
    assert cost_of(layers.Dropout(0.5), [ROWS]).flops == T * D
    assert cost_of(layers.Add(), [[ROWS, ROWS]]).flops == T * D
    x, y = keras.Input((T, D)), keras.Input((D, 3))
    node = ops.matmul(x, y)
    assert layer_cost(node._keras_history.operation, [x, y], [node]).flops == 2 * T * D * 3


@pytest.mark.parametrize("layer", [layers.Flatten(), layers.Reshape((D, T))], ids=str)
def test_a_change_of_shape_costs_nothing(layer):
    assert cost_of(layer, [ROWS]) == LayerCost(flops=0, weight_bytes=0, activation_bytes=0)


def test_unknown_dims_count_as_told():
    x = keras.Input((None, D))
    dense = layers.Dense(4)
    made = [dense(x)]
    assert layer_cost(dense, [x], made, unknown_dim=10).flops == 2 * 10 * D * 4
    assert layer_cost(dense, [x], made).flops == 2 * 128 * D * 4


def test_bytes():
    cost = cost_of(layers.Dense(4, dtype="float64"), [((D,), "float64")])
    assert cost.weight_bytes == 8 * (D * 4 + 4)
    assert cost.activation_bytes == 8 * (D + 4)
    sizes = {"float16": 2, "bfloat16": 2, "int64": 8, "bool": 1, "uint8": 1, "float8_e4m3fn": 1}
    assert {name: itemsize(name) for name in sizes} == sizes


def test_seconds_are_the_longer_of_computing_and_moving():
    cost = LayerCost(flops=100, weight_bytes=1000, activation_bytes=10)
    machine = Machine(flops_per_second=10, bytes_per_second=10)
    assert cost.seconds(1, machine) == 101
    assert cost.seconds(1000, machine) == 10000
