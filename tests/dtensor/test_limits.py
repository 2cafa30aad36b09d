"""What DTensor cannot run is known before it is tried; layers on cut weights equal plain ones."""

from kdist.dtensor import limits, relayout
from kdist.dtensor.body import Body
from kdist.dtensor.rewrites import rewrite
from kdist.dtensor.sharded import replicate

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from tensorflow.experimental import dtensor
from tensorflow.python.framework import error_interpolation

from .dtensor_parts import cut, inner_mesh, kinds, lowered_program, run, specs, whole


def loss_and_gradients(layer, variables, params, x):
    with tf.GradientTape() as tape:
        tape.watch(params)
        with keras.StatelessScope(zip(variables, params, strict=True)):
            y = layer(x)
        loss = tf.reduce_sum(y * tf.sin(y + 1.0))
    return [tf.convert_to_tensor(g) for g in tape.gradient(loss, params)]


def images():
    return np.random.randn(2, 6, 6, 4).astype("float32")


def sequences():
    return np.random.randn(4, 5, 8).astype("float32")


GATHERED = {
    "Conv1D": (lambda: keras.layers.Conv1D(4, 3), sequences),
    "Conv2D": (lambda: keras.layers.Conv2D(4, 3), images),
    "Conv2DTranspose": (lambda: keras.layers.Conv2DTranspose(4, 3), images),
    "DepthwiseConv2D": (lambda: keras.layers.DepthwiseConv2D(3), images),
    "SeparableConv2D": (lambda: keras.layers.SeparableConv2D(4, 3), images),
    "LSTM": (lambda: keras.layers.LSTM(4), sequences),
    "GRU": (lambda: keras.layers.GRU(4, unroll=True), sequences),
    "SimpleRNN": (lambda: keras.layers.SimpleRNN(4), sequences),
}
AS_THEY_ARE = {
    "Dense": (lambda: keras.layers.Dense(4), sequences),
    "EinsumDense": (
        lambda: keras.layers.EinsumDense("abc,cd->abd", (None, 4), bias_axes="d"),
        sequences,
    ),
    "LayerNormalization": (lambda: keras.layers.LayerNormalization(), sequences),
    "GroupNormalization": (lambda: keras.layers.GroupNormalization(2), images),
    "BatchNormalization": (lambda: keras.layers.BatchNormalization(), images),
}


@pytest.mark.parametrize("name", [*GATHERED, *AS_THEY_ARE])
def test_layers_on_cut_weights_equal_plain(name):
    make, data = {**GATHERED, **AS_THEY_ARE}[name]
    mesh, _ = inner_mesh(model=2)
    layer, x = make(), data()
    layer.build(x.shape)
    variables = layer.trainable_variables
    statistics = [(v, v.numpy()) for v in layer.non_trainable_variables]
    gathered = isinstance(layer, limits.GATHER_ON_READ)
    assert gathered == (name in GATHERED)
    values = [np.random.randn(*v.shape).astype("float32") / 3 for v in variables]
    expected = loss_and_gradients(layer, variables, [tf.constant(v) for v in values], x)
    # Each weight cut along its last dim.
    dims = [(None,) * (v.ndim - 1) + ("model",) * (v.shape[-1] % 2 == 0) for v in values]
    dims = [d + (None,) * (v.ndim - len(d)) for d, v in zip(dims, values, strict=True)]
    params = [cut(v, mesh, *d) for v, d in zip(values, dims, strict=True)]

    def program(params, x):
        with tf.GradientTape() as tape:
            tape.watch(params)
            used = list(params)
            if gathered:
                used = [
                    relayout.relayout(
                        p, dtensor.Layout.replicated(mesh, p.shape.rank), alltoall=False
                    )
                    for p in params
                ]
            fixed = [(v, tf.constant(value)) for v, value in statistics]
            with keras.StatelessScope([*zip(variables, used, strict=True), *fixed]):
                y = layer(x)
            loss = tf.reduce_sum(y * tf.sin(y + 1.0))
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, params)]

    found, _ = run(mesh, program, params, replicate(x, mesh))
    for one, reference, d in zip(found, expected, dims, strict=True):
        scale = np.abs(reference).max()
        np.testing.assert_allclose(whole(one), reference, atol=2e-5 * scale)
        if gathered:
            assert specs(one) == d


class Applied(keras.layers.Layer):
    """A dense layer, then an operation: the operation needs a gradient."""

    def __init__(self, operation):
        super().__init__()
        self.dense = keras.layers.Dense(8)
        self.operation = operation

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.operation(self.dense(x))


# Those with a reason end the process if they are tried, or make a program that fails.
LOOP, BRANCHES = "the backward pass of a loop", "the backward pass of branches"
OPERATIONS = {
    "map": (lambda x: ops.map(lambda e: e * e, x), LOOP),
    "scan": (lambda x: ops.scan(lambda c, e: (c + e, c * e), ops.zeros_like(x[0]), x)[1], LOOP),
    "loop": (lambda x: ops.fori_loop(0, 3, lambda i, a: ops.sin(a) * a, x), LOOP),
    "computing branches": (
        lambda x: ops.cond(ops.sum(x) > 0, lambda: ops.sin(x) * x, lambda: x * x * x),
        BRANCHES,
    ),
    "python": (lambda x: x + tf.numpy_function(np.sin, [x], tf.float32), "Python"),
    "backwards": (lambda x: x[:, ::-1], "StridedSlice with a negative stride"),
    "new axis at a computed place": (
        lambda x: x[: tf.shape(tf.unique(x[0])[0])[0] - 4, None],
        "StridedSliceGrad with a new axis",
    ),
    "branches": (lambda x: ops.cond(ops.sum(x) > 0, lambda: x * 2.0, lambda: x), None),
    "new axis": (lambda x: x[None], None),
    "inner new axis": (lambda x: x[:, None], None),
    "sort": (ops.sort, "the gradient of TopKV2"),
    "scatter": (
        lambda x: ops.scatter(np.array([[1], [3]], "int64"), x[:2], (5, 8)),
        "ScatterNd with indices of int64",
    ),
    "cross-entropy": (
        lambda x: ops.sparse_categorical_crossentropy(ops.argmax(x, 1), x, from_logits=True),
        None,
    ),
    "cross-entropy in bfloat16": (
        lambda x: tf.cast(
            ops.sparse_categorical_crossentropy(
                ops.argmax(x, 1), tf.cast(x, "bfloat16"), from_logits=True
            ),
            "float32",
        ),
        "SparseSoftmaxCrossEntropyWithLogits in bfloat16",
    ),
    "slice": (lambda x: x[:, 2:6], None),
    "index": (lambda x: x[:, 0], None),
    "cumsum": (lambda x: ops.cumsum(x, 1), None),
    "reversed": (lambda x: ops.flip(x, 1), None),
}


def traced_program(operation, mesh):
    layer = Applied(operation)
    x = np.random.randn(4, 8).astype("float32")
    layer.build(x.shape)
    variables = layer.trainable_variables
    program = tf.function(
        lambda params, x: loss_and_gradients(layer, variables, params, x), autograph=False
    )
    params = [v.value.read_value() for v in variables]
    return program, params, x


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_operations_that_dtensor_must_not_try_are_found_before(name):
    operation, expected = OPERATIONS[name]
    mesh, _ = inner_mesh(model=2)
    program, params, x = traced_program(operation, mesh)
    body = Body(program.get_concrete_function(params, tf.constant(x)))
    rewrite(body)
    found = ", ".join(limits.unsupported(body).values())
    if expected is not None:
        assert expected in found
        return
    assert found == ""
    # What the scan lets through does run, and is right.
    reference = program(params, tf.constant(x))
    parts = [replicate(p, mesh) for p in params]
    result, lowered = run(mesh, program.python_function, parts, replicate(x, mesh))
    assert lowered.islands == ()
    for one, other in zip(result, reference, strict=True):
        np.testing.assert_allclose(whole(one), other, atol=1e-4)


@pytest.mark.parametrize("differentiated", [True, False])
def test_a_recurrent_loop_is_found_where_it_is_differentiated(differentiated):
    inputs = keras.Input((5, 8))
    model = keras.Model(inputs, keras.layers.LSTM(4)(inputs))
    variables = model.trainable_variables

    def forward(params, x):
        with keras.StatelessScope(zip(variables, params, strict=True)):
            return model(x)

    def backward(params, x):
        return loss_and_gradients(model, variables, params, x)

    program = tf.function(backward if differentiated else forward, autograph=False)
    params = [v.value.read_value() for v in variables]
    body = Body(program.get_concrete_function(params, tf.zeros((4, 5, 8))))
    assert (LOOP in limits.unsupported(body).values()) == differentiated


def test_a_failed_lowering_is_explained_and_leaves_the_mesh_working():
    mesh, _ = inner_mesh(model=2)
    filters = cut(np.ones((3, 4, 4), "float32"), mesh, None, None, "model")
    x = replicate(sequences()[..., :4], mesh)
    square = np.arange(16, dtype="float32").reshape(4, 4)
    for _ in range(3):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            lowered_program(
                mesh, lambda x, f: tf.nn.conv1d(x, f, 1, "VALID"), x, filters, islands=False
            )
        reason = limits.explain(caught.value)
        assert reason is not None and reason.startswith("Conv2D: "), reason
        assert "\n" not in reason
        result, _ = kinds(mesh, lambda x: x + 1.0, cut(square, mesh, "model", None))
        np.testing.assert_array_equal(whole(result), square + 1)


def test_names_of_nodes_are_not_looked_for_in_the_message_of_a_failed_lowering(monkeypatch):
    """A message is the whole program: that took 45 s for one of 144 operations."""

    def look(message):
        raise AssertionError(message[:80])

    monkeypatch.setattr(error_interpolation, "parse_message", look)
    test_a_failed_lowering_is_explained_and_leaves_the_mesh_working()


def test_other_errors_are_not_explained():
    assert limits.explain(ValueError("Shapes (2,) and (3,) are incompatible")) is None
    running = tf.errors.InvalidArgumentError(None, None, "{{function_node f}} tensorflow/dtensor/x")
    assert limits.explain(running) is None
