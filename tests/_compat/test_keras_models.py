"""Every internal behind `kdist._compat.keras_models` is there and does what is expected."""

from __future__ import annotations

from kdist._compat import keras_models

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..parity import assert_close, mlp
from .private_checks import two_outputs, untested


def test_each_function_has_a_test():
    """So that what moves is named by what fails."""
    assert untested(keras_models, __file__) == []


def test_functional_of():
    model = mlp()
    assert keras_models.functional_of(model) is model
    layers = [keras.Input((2,)), keras.layers.Dense(1)]
    built = keras_models.functional_of(keras.Sequential(layers))
    assert [t.shape for t in built.inputs] == [(None, 2)]
    assert keras_models.functional_of(keras.Sequential([keras.layers.Dense(1)])) is None
    assert keras_models.functional_of(keras.layers.Dense(1)) is None

    class Own(keras.Model):
        def call(self, inputs):
            return super().call(inputs)

    assert keras_models.functional_of(Own(model.inputs, model.outputs)) is None


def test_nodes_in_order():
    model = mlp()
    nodes = keras_models.nodes_in_order(model)
    assert [node.operation for node in nodes] == model.layers[1:]
    up, down = nodes
    assert up.arguments.args[0] is up.arguments.keras_tensors[0] is model.inputs[0]
    assert down.arguments.keras_tensors[0] is up.outputs[0]
    assert down.arguments.kwargs == {}
    args, kwargs = up.arguments.fill_in({id(model.inputs[0]): 3})
    assert (args, kwargs) == ((3,), {})


def test_layers_inside():
    inner = keras.Sequential([keras.layers.Dense(1), keras.layers.Dense(1)])
    outer = keras.Sequential([inner, keras.layers.Dense(1)])
    assert keras_models.layers_inside(outer) == outer.layers
    assert keras_models.layers_inside(inner) == inner.layers


def test_held_layers():
    class Base(keras.Model):
        def __init__(self):
            super().__init__()
            self.body = keras.Sequential([keras.layers.Dense(2)])
            self.head, self.several = keras.layers.Dense(3), [keras.layers.Dense(2)]
            self.by_name = {"far": [keras.layers.ReLU(), keras.layers.Dense(1)]}

    class Other(Base):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(4)
            self.several = (keras.layers.Dense(2), keras.layers.Dense(2))

    base = Base()
    held = {id(one) for one in keras_models.held_layers(base)}
    assert held == {id(one) for one in keras_models.flat_layers(base)}
    model = Other()
    every, held = keras_models.flat_layers(model), keras_models.held_layers(model)
    gone = [one for one in every if not any(one is other for other in held)]
    assert [one.units for one in gone] == [2, 3] or [one.units for one in gone] == [3, 2]
    assert held[0] is model and len(every) == len(held) + 2
    gone[0].build((None, 5))  # it has weights: the model's still
    assert len(keras_models.held_layers(model)) == len(held) + 1


def test_flat_layers():
    inner = mlp()
    outer = keras.Sequential([inner, keras.layers.Dense(2, name="last")])
    found = keras_models.flat_layers(outer)
    assert found[0] is outer
    assert {layer.name for layer in found[1:]} >= {"mlp", "up", "down", "last"}


def test_without_weights():
    class Own(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=shape[-1:])

    kinds = keras.layers
    bare = [kinds.Concatenate(), kinds.Dot(1), kinds.Rescaling(2.0), kinds.Softmax(), mlp()]
    late = [kinds.Dense(2), kinds.PReLU(), kinds.LayerNormalization(), kinds.GRUCell(2), Own()]
    holder = keras.Model()
    holder.inside = [*bare, keras.Sequential(late)]
    found = keras_models.without_weights(holder)
    assert {one.name for one in found} == {one.name for one in late}
    late[-1].build((None, 2))
    assert late[-1] not in keras_models.without_weights(holder)


def test_layers_of():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.ops.tanh(inputs))
    (node,) = keras_models.nodes_in_order(model)
    assert keras_models.layers_of(node) == []
    model = mlp()
    nodes = keras_models.nodes_in_order(model)
    assert [layer.name for node in nodes for layer in keras_models.layers_of(node)] == [
        layer.name for layer in model.layers[1:]
    ]


def test_calls_of():
    shared = keras.layers.Dense(3)
    first, second = keras.Input((3,)), keras.Input((3,))
    outputs = [shared(first), shared(second)]
    calls = keras_models.calls_of(shared)
    assert [call.arguments.keras_tensors for call in calls] == [[first], [second]]
    assert [call.outputs for call in calls] == [[output] for output in outputs]


def test_pack_outputs():
    model = two_outputs()
    found = keras_models.pack_outputs(model, [1, 2])
    assert found == dict(zip(model.output_names, [1, 2]))


def test_flat_inputs():
    model = two_inputs()
    x = {"b": tf.ones((2, 1)), "a": tf.zeros((2,))}
    first, second = keras_models.flat_inputs(model, x)
    assert np.ptp(first) == 0 == first[0, 0] and first.shape == (2, 1)  # as the model expects
    assert second[0, 0] == 1


def two_inputs():
    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    return keras.Model({"a": a, "b": b}, keras.layers.Add()([a, b]))


def test_as_model_call():
    class Part(keras.layers.Layer):
        def call(self, inputs):
            return inputs

    part = Part(dtype="float32")
    with keras_models.as_model_call(part):
        assert part([tf.ones(2, tf.float64)])[0].dtype == tf.float64
    assert part([tf.ones(2, tf.float64)])[0].dtype == tf.float32


def test_takes_training():
    assert keras_models.takes_training(keras.layers.Dropout(0.5))
    assert not keras_models.takes_training(keras.layers.Flatten())
    (node,) = keras_models.nodes_in_order(keras.Model(x := keras.Input((1,)), x * 2))
    assert not keras_models.takes_training(node.operation)


def test_model_outputs():
    model = two_outputs()
    assert keras_models.model_outputs(model, [1, 2]) == dict(zip(model.output_names, [1, 2]))
    x = keras.Input((1,))
    assert keras_models.model_outputs(keras.Model(x, [x * 2]), [3]) == 3


def test_has_call():
    class Holder(keras.Model):
        pass

    class Called(keras.Model):
        def call(self, x):
            return x

    assert [keras_models.has_call(one) for one in (Holder(), Called(), mlp())] == [
        False,
        True,
        True,
    ]
    assert keras_models.has_call(keras.Sequential([keras.layers.Dense(2)]))


def quantized(mode: str) -> keras.layers.Layer:
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    layer.quantize(mode)
    return layer


@pytest.mark.parametrize("mode", [None, "int8", "float8"])
def test_give_call(mode):
    layer = keras.layers.Dense(2) if mode is None else quantized(mode)
    x = np.ones((1, 3), "float32")
    expected = np.asarray(layer(x))
    call = keras_models.call_of(layer)
    with keras_models.calls_kept([layer]):
        keras_models.give_call(layer, lambda *args, **kwargs: 1.0 + call(*args, **kwargs))
        assert_close(layer(x), 1.0 + expected)
    assert_close(layer(x), expected)


def test_call_name():
    assert keras_models.call_name(keras.layers.Dense(2)) == "call"
    assert keras_models.call_name(quantized("int8")) == "quantized_call"


def test_call_of():
    layer, eighth = keras.layers.Dense(2), quantized("int8")
    assert keras_models.call_of(layer) == layer.call
    assert keras_models.call_of(eighth) == eighth.quantized_call


def test_calls_kept():
    one, other = keras.layers.Dense(2), keras.layers.Dense(2)
    keras_models.give_call(other, "of its own")
    with keras_models.calls_kept([one, other]):
        for layer in (one, other):
            keras_models.give_call(layer, "another")
            object.__setattr__(layer, "quantized_call", "another")
    assert not {"call", "quantized_call"} & set(vars(one))
    assert other.call == "of its own" and "quantized_call" not in vars(other)


def trained(layer):
    return [v.path for v in layer.trainable_variables]


def test_trainable_flags():
    model = mlp()
    model.layers[-1].trainable = False
    flags, before = keras_models.trainable_flags(model), trained(model)
    model.trainable = False
    with keras_models.trainable_as(flags):
        assert trained(model) == before
    assert not model.trainable and not trained(model)


def test_trainable_as():
    """What says so already is the user's to change meanwhile."""
    model = mlp()
    first, last = model.layers[1], model.layers[-1]
    flags = keras_models.trainable_flags(model)
    first.trainable = False
    with keras_models.trainable_as(flags):
        assert first.trainable
        last.trainable = False
    assert not first.trainable and not last.trainable


def test_flags_to_train():
    model = mlp()
    model.trainable = False
    wanted = model.layers[-1].weights
    with keras_models.trainable_as(keras_models.flags_to_train(model, wanted)):
        assert trained(model) == [v.path for v in wanted]
    assert not trained(model)


def test_synchronizes():
    norms = [keras.layers.BatchNormalization(synchronized=one) for one in (False, True)]
    found = [keras_models.synchronizes(keras.Sequential([keras.Sequential([n])])) for n in norms]
    assert found == [False, True]


def test_kept_of_calls():
    """What says how one computes is not among them, and is there to be looked at."""
    layer = keras.layers.Dense(2, activity_regularizer="l2", dtype="mixed_bfloat16")
    layer.supports_masking = False
    told = set(vars(layer)) - keras_models.kept_of_calls()
    assert {"activity_regularizer", "_dtype_policy", "_supports_masking", "units"} <= told
    assert {"autocast", "_remat_mode", "_convert_input_args"} <= told
    assert "loss" not in keras_models.kept_of_calls()  # which a layer of the user's may have
    assert {"_layers", "_losses", "built", "call"} <= keras_models.kept_of_calls()
