"""`kdist.shard` on tensors, and the layer it adds."""

from kdist.config.shard import shard
from kdist.layers.relayout import Relayout
from kdist.sharding.active import laying_out

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers


@pytest.fixture
def relayouts():
    """Records what a trace would be asked to lay out; it adds 1 here to be seen."""
    calls = []

    def relayout(tensor, strategy, what="", *, batch_dim=True):
        calls.append((tensor, strategy))
        return tensor + 1

    with laying_out(relayout):
        yield calls


def test_shard_of_a_keras_tensor_adds_a_layer(relayouts):
    x = keras.Input((4,))
    y = shard(keras.ops.relu(x), out_strategy=("data", "model"))
    model = keras.Model(x, y)
    assert isinstance(model.layers[-1], Relayout)
    assert relayouts == []
    np.testing.assert_array_equal(model(np.ones((2, 4), "float32")), np.full((2, 4), 2.0))
    assert [strategy for _, strategy in relayouts] == [("data", "model")]


def test_shard_of_a_tensor_calls_the_engine(relayouts):
    x = tf.ones((2, 4))
    np.testing.assert_array_equal(shard(x, out_strategy=((2, 1),)), np.full((2, 4), 2.0))
    assert relayouts[0][0] is x
    assert relayouts[0][1] == (2, 1)


def test_shard_of_a_symbolic_tensor_inside_a_call(relayouts):
    class Inside(layers.Layer):
        def call(self, x):
            return shard(x, out_strategy=("data", None))

    x = keras.Input((4,))
    model = keras.Model(x, Inside()(x))
    np.testing.assert_array_equal(model.predict(np.ones((2, 4)), verbose=0), np.full((2, 4), 2.0))
    assert not any(isinstance(layer, Relayout) for layer in model.layers)


@pytest.mark.parametrize(
    "arguments",
    [
        {"in_strategy": ("data", None)},
        {"in_strategy": ("data", None), "out_strategy": ("data", None)},
        {"out_strategy": ("data", None), "weights": {"kernel": (None, None)}},
        {"weights": {"kernel": (None, None)}},
    ],
)
def test_a_tensor_takes_out_strategy_alone(arguments):
    for target in (keras.Input((4,)), tf.ones((2, 4))):
        with pytest.raises(ValueError, match="A tensor has one layout: give out_strategy alone"):
            shard(target, **arguments)


def test_relayout_config_round_trips():
    layer = Relayout((("data", "model"), None, "seq"), name="here")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert isinstance(again, Relayout)
    assert again.layout == layer.layout == (("data", "model"), None, "seq")
    assert again.name == "here"
    assert again.get_config() == layer.get_config()


def test_relayout_survives_saving(tmp_path):
    x = keras.Input((4,))
    model = keras.Model(x, shard(layers.Dense(4)(x), out_strategy=(2, 1)))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.layers[-1].layout == (2, 1)


@pytest.mark.parametrize("layout", [None, "model", (2, "model"), (0,), ("model", "model")])
def test_relayout_refuses_other_layouts(layout):
    with pytest.raises(ValueError, match="Received"):
        Relayout(layout)


def test_relayout_checks_the_rank():
    with pytest.raises(ValueError, match="layout of 1 entries and its input 2 dims"):
        Relayout(("data",))(keras.Input((4,)))


@pytest.mark.parametrize("dtype", ["int32", "float32", "float16", "bool"])
def test_relayout_keeps_the_dtype_under_any_policy(dtype, relayouts):
    layer = Relayout((None, None), dtype="mixed_float16")
    assert layer(keras.Input((4,), dtype=dtype)).dtype == dtype
    layer(tf.zeros((2, 4), "int32"))
    layer(tf.zeros((2, 4), "float32"))
    assert [tensor.dtype for tensor, _ in relayouts] == [tf.int32, tf.float32]


def test_relayout_passes_the_mask_on():
    x = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(10, 4, mask_zero=True)(x)
    assert Relayout((None, None, None))(embedded)._keras_mask is not None
