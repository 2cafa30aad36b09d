"""`kdist.shard` on layers: what is declared, and where it goes with the layer."""

import copy
import pickle

from kdist.config.shard import ShardDeclaration, declaration_of, declarations, shard

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers


def dense(units=8, inputs=4, **arguments):
    layer = layers.Dense(units, **arguments)
    layer.build((None, inputs))
    return layer


def test_shard_returns_the_layer_and_stores_the_declaration():
    layer = layers.Dense(8)
    assert shard(layer, in_strategy=((4, 1), (1, 1)), out_strategy=("data", None)) is layer
    assert declaration_of(layer) == ShardDeclaration(((4, 1), (1, 1)), (("data", None),))


def test_a_flat_in_strategy_is_the_first_operand():
    layer = shard(layers.Dense(8), in_strategy=("data", None))
    assert declaration_of(layer).in_strategy == (("data", None),)


def test_out_strategy_has_one_strategy_an_output():
    layer = shard(layers.Dense(8), out_strategy=((4, 1),))
    assert declaration_of(layer).out_strategy == ((4, 1),)
    shard(layer, out_strategy=((4, 1), (1, 4)))
    assert declaration_of(layer).out_strategy == ((4, 1), (1, 4))


def test_the_second_declaration_replaces_the_first():
    layer = shard(layers.Dense(8), in_strategy=("data", None), weights={"bias": ("model",)})
    shard(layer, weights={"kernel": (None, "model")})
    assert declaration_of(layer) == ShardDeclaration(weights={"kernel": (None, "model")})


def test_a_layer_without_declaration():
    assert declaration_of(layers.Dense(8)) is None


def test_a_built_layer_may_be_declared():
    assert declaration_of(shard(dense(), weights={"kernel": (None, "model")})) is not None


def test_a_later_change_of_the_users_dict_has_no_effect():
    weights = {"kernel": (None, "model")}
    layer = shard(layers.Dense(8), weights=weights)
    weights["kernel"] = ("model", None)
    assert declaration_of(layer).weights == {"kernel": (None, "model")}


def test_the_layers_own_setattr_does_not_see_the_declaration():
    class Closed(layers.Dense):
        def __setattr__(self, name, value):
            assert name != "_kdist_shard" and not isinstance(value, ShardDeclaration)
            super().__setattr__(name, value)

    layer = shard(Closed(8), weights={"kernel": (None, "model")})
    assert declaration_of(layer) is not None


def test_the_declaration_is_not_tracked():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8)])
    before = [len(model._flatten_layers()), len(model.variables)]
    shard(model.layers[0], weights={"kernel": (None, "model")})
    assert [len(model._flatten_layers()), len(model.variables)] == before
    assert type(declaration_of(model.layers[0]).weights) is dict


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"in_strategy": ()},
        {"in_strategy": "model"},
        {"in_strategy": (2, "model")},
        {"in_strategy": ((0, 1),)},
        {"in_strategy": ((2.0, 1),)},
        {"out_strategy": 4},
        {"out_strategy": ("model", "model")},
        {"weights": {}},
        {"weights": [("kernel", (None,))]},
        {"weights": {0: (None,)}},
        {"weights": {"kernel": "model"}},
        {"weights": {"kernel": (2, "model")}},
    ],
)
def test_shard_refuses_other_forms(arguments):
    layer = layers.Dense(8)
    with pytest.raises(ValueError, match="Received: "):
        shard(layer, **arguments)
    assert declaration_of(layer) is None


@pytest.mark.parametrize(
    "target",
    [None, 3, np.zeros(3), "dense", keras.Variable(1.0), tf.Variable(1.0), layers.Dense],
    ids=type,
)
def test_shard_refuses_other_targets(target):
    with pytest.raises(ValueError, match="shard takes a keras layer.*Received: target="):
        shard(target, out_strategy=("model",))


# a declared model is an ordinary model


def declared_model():
    up = shard(layers.Dense(8, name="up"), in_strategy=((2, 1), (1, 2)))
    down = shard(layers.Dense(4, name="down"), weights={"kernel": ("model", None)})
    return keras.Sequential([keras.Input((4,)), up, down])


def test_save_and_load_drop_the_declaration(tmp_path):
    model, x = declared_model(), np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x), model(x))
    assert declarations(loaded) == []
    assert len(declarations(model)) == 2


@pytest.mark.parametrize(
    "copier",
    [
        lambda model: pickle.loads(pickle.dumps(model)),
        copy.deepcopy,
        keras.models.clone_model,
        lambda model: type(model).from_config(model.get_config()),
    ],
    ids=["pickle", "deepcopy", "clone_model", "from_config"],
)
def test_copies_drop_the_declaration(copier):
    model = declared_model()
    copied = copier(model)
    assert [v.name for v in copied.weights] == [v.name for v in model.weights]
    assert declarations(copied) == []


# declarations


def test_declarations_walks_nested_models():
    inner = keras.Sequential([shard(layers.Dense(8), out_strategy=("data", None))])

    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.plain = layers.Dense(2)
            self.inner = inner
            self.blocks = [shard(layers.Dense(3), weights={"bias": (None,)})]

    model = Outer()
    assert declarations(model) == [
        (inner.layers[0], declaration_of(inner.layers[0])),
        (model.blocks[0], declaration_of(model.blocks[0])),
    ]
    shard(model, out_strategy=("data", None))
    assert declarations(model)[0] == (model, declaration_of(model))


def test_a_shared_layer_is_listed_once():
    shared = shard(layers.Dense(4), out_strategy=("data", None))
    x = keras.Input((4,))
    model = keras.Model(x, keras.Sequential([shared])(shared(x)))
    assert [layer for layer, _ in declarations(model)] == [shared]
