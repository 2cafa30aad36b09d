import copy
import math
import pickle
import sys
import types

import kdist
from kdist.declare import (
    ResolvedShard,
    ShardDeclaration,
    declaration_of,
    declarations,
    resolve_declaration,
    shard,
)
from kdist.layers.relayout import Relayout
from kdist.mesh import Topology

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers


def topology(**axes):
    names = [f"cpu:{i}" for i in range(math.prod(axes.values()))]
    made = keras.distribution.DeviceMesh(tuple(axes.values()), list(axes), names)
    return Topology.from_mesh(made, available=names)


def resolve(layer, **axes):
    return resolve_declaration(layer, declaration_of(layer), topology(**axes))


def dense(units=8, inputs=4, **arguments):
    layer = layers.Dense(units, **arguments)
    layer.build((None, inputs))
    return layer


def dims_by_name(layer, resolved):
    names = {variable.path: variable.name for variable in layer.weights}
    return {names[path]: layout.dims for path, layout in resolved.weights.items()}


@pytest.fixture
def relayouts(monkeypatch):
    """Records what is passed to the engine's re-layout, which adds 1 here to be seen."""
    calls = []

    def relayout_active(tensor, strategy):
        calls.append((tensor, strategy))
        return tensor + 1

    module = types.ModuleType("kdist.spmd")
    module.relayout_active = relayout_active
    monkeypatch.setitem(sys.modules, "kdist.spmd", module)
    monkeypatch.setattr(kdist, "spmd", module, raising=False)
    return calls


# shard on layers


def test_shard_returns_the_layer_and_stores_the_declaration():
    layer = layers.Dense(8)
    assert shard(layer, in_strategy=((4, 1), (1, 1)), out_strategy=("data", None)) is layer
    assert declaration_of(layer) == ShardDeclaration(((4, 1), (1, 1)), ("data", None), None)


def test_a_flat_in_strategy_is_the_first_operand():
    layer = shard(layers.Dense(8), in_strategy=("data", None))
    assert declaration_of(layer).in_strategy == (("data", None),)


def test_out_strategy_may_be_nested_once():
    layer = shard(layers.Dense(8), out_strategy=((4, 1),))
    assert declaration_of(layer).out_strategy == (4, 1)
    with pytest.raises(ValueError, match="layout of one output"):
        shard(layer, out_strategy=((4, 1), (4, 1)))


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
    "target", [None, 3, np.zeros(3), "dense", keras.Variable(1.0), tf.Variable(1.0)], ids=type
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


# resolve_declaration


def test_the_second_operand_is_the_kernel():
    layer = shard(dense(), in_strategy=(("data", None), (None, "model")))
    resolved = resolve(layer, data=2, model=2)
    assert isinstance(resolved, ResolvedShard)
    assert resolved.inputs == (("data", None),)
    assert resolved.output is None
    assert dims_by_name(layer, resolved) == {"kernel": (None, "model"), "bias": ("model",)}


def test_counts_as_mindspore_writes_them():
    layer = shard(dense(), in_strategy=((4, 1), (1, 1)), out_strategy=((4, 2),))
    resolved = resolve(layer, data=4, model=2)
    assert resolved.inputs == (("data", None),)
    assert resolved.output == ("data", "model")
    assert dims_by_name(layer, resolved) == {"kernel": (None, None)}


def test_a_cut_of_the_contracted_dim_leaves_the_bias_whole():
    layer = shard(dense(), in_strategy=((2, 4), (4, 1)))
    resolved = resolve(layer, data=2, model=4)
    assert resolved.inputs == (("data", "model"),)
    assert dims_by_name(layer, resolved) == {"kernel": ("model", None)}


def test_input_and_kernel_may_be_cut_differently():
    layer = shard(dense(), in_strategy=((None, None), ("model", None)))
    assert resolve(layer, data=2, model=2).inputs == ((None, None),)


def test_an_explicit_bias_wins():
    layer = shard(dense(), in_strategy=((1, 1), (1, 2)), weights={"bias": (None,)})
    resolved = resolve(layer, model=2)
    assert dims_by_name(layer, resolved) == {"kernel": (None, "model"), "bias": (None,)}


def test_the_bias_follows_in_strategy_only():
    layer = shard(dense(), weights={"kernel": (None, "model")})
    assert dims_by_name(layer, resolve(layer, model=2)) == {"kernel": (None, "model")}


def test_a_layer_without_bias():
    layer = shard(dense(use_bias=False), in_strategy=((1, 1), (1, 2)))
    assert dims_by_name(layer, resolve(layer, model=2)) == {"kernel": (None, "model")}


def test_a_bias_of_another_shape_stays():
    layer = layers.EinsumDense("ab,bcd->acd", (2, 8), bias_axes="cd")
    layer.build((None, 4))
    shard(layer, in_strategy=((1, 1), (1, 1, 2)))
    assert dims_by_name(layer, resolve(layer, model=2)) == {"kernel": (None, None, "model")}


def test_the_kernel_of_a_convolution():
    layer = layers.Conv2D(8, 3)
    layer.build((None, 5, 5, 4))
    shard(layer, in_strategy=((1, 1, 1, 1), (1, 1, 1, 4)))
    assert dims_by_name(layer, resolve(layer, model=4)) == {
        "kernel": (None, None, None, "model"),
        "bias": ("model",),
    }


def test_the_kernel_of_a_nested_cell():
    layer = layers.LSTM(4)
    layer.build((None, 5, 3))
    shard(layer, in_strategy=((1, 1, 1), (1, 2)))
    resolved = resolve(layer, model=2)
    assert dims_by_name(layer, resolved) == {"kernel": (None, "model"), "bias": ("model",)}


def test_layers_without_a_kernel_have_inputs_only():
    a, b = keras.Input((4,)), keras.Input((4,))
    layer = layers.Add()
    layer([a, b])
    shard(layer, in_strategy=(("data", None), ("data", "model")))
    resolved = resolve(layer, data=2, model=2)
    assert resolved.inputs == (("data", None), ("data", "model"))
    assert resolved.weights == {}


def test_names_paths_and_patterns_of_weights():
    layer = layers.MultiHeadAttention(4, 2, name="att")
    layer.build((None, 5, 8), (None, 5, 8))
    shard(
        layer,
        weights={
            "(query|key|value)/kernel": (None, "model", None),
            "(query|key|value)/bias": ("model", None),
            "attention_output/kernel": ("model", None, None),
        },
    )
    resolved = resolve(layer, model=2)
    assert {path: layout.dims for path, layout in resolved.weights.items()} == {
        **{f"att/{name}/kernel": (None, "model", None) for name in ("query", "key", "value")},
        **{f"att/{name}/bias": ("model", None) for name in ("query", "key", "value")},
        "att/attention_output/kernel": ("model", None, None),
    }


def test_a_path_wins_over_a_name_and_a_name_over_a_pattern():
    layer = layers.MultiHeadAttention(4, 2, name="att")
    layer.build((None, 5, 8), (None, 5, 8))
    none = (None, None, None)
    shard(
        layer,
        weights={
            ".*kernel": none,
            "kernel": (None, "model", None),
            "query/kernel": ("model", None, None),
        },
    )
    with pytest.raises(ValueError, match=r"'\.\*kernel' applies to no weight"):
        resolve(layer, model=2)
    weights = dict(declaration_of(layer).weights)
    del weights[".*kernel"]
    weights["attention_output/kernel"] = none
    resolved = resolve(shard(layer, weights=weights), model=2)
    assert resolved.weights["att/query/kernel"].dims == ("model", None, None)
    assert resolved.weights["att/value/kernel"].dims == (None, "model", None)
    assert resolved.weights["att/attention_output/kernel"].is_replicated


def test_a_name_and_a_path_by_different_patterns():
    layer = layers.MultiHeadAttention(4, 2, name="att")
    layer.build((None, 5, 8), (None, 5, 8))
    none = (None, None, None)
    shard(layer, weights={"query/.*": none, "kern..": none})
    with pytest.raises(ValueError, match=r"Several .*/query/kernel': \['kern..', 'query/\.\*'"):
        resolve(layer, model=2)


def test_a_whole_path_is_taken():
    layer = shard(dense(name="up"), weights={"up/kernel": (None, "model")})
    assert dims_by_name(layer, resolve(layer, model=2)) == {"kernel": (None, "model")}


def test_counts_of_weights_mean_inner_axes():
    layer = shard(dense(), weights={"kernel": (1, 2)})
    assert dims_by_name(layer, resolve(layer, data=2, model=2)) == {"kernel": (None, "model")}


def test_a_weight_may_be_stored_cut_over_data():
    layer = shard(dense(), weights={"kernel": ("data", "model")})
    assert dims_by_name(layer, resolve(layer, batch=2, model=2)) == {"kernel": ("batch", "model")}


def test_the_kernel_declared_twice():
    both = {"in_strategy": ((1, 1), (1, 2)), "weights": {"kernel": (None, "model")}}
    layer = shard(dense(), **both)
    assert dims_by_name(layer, resolve(layer, model=2))["kernel"] == (None, "model")
    shard(layer, **{**both, "weights": {"kernel": ("model", None)}})
    with pytest.raises(ValueError, match="has two layouts.*Give one of them.*Received"):
        resolve(layer, model=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_strategy": ((1, 1), (1, 3))}, "fit no axes"),
        ({"in_strategy": ((1, 1), (1, 1, 2))}, "kernel' has 3 entries and the tensor 2 dims"),
        ({"in_strategy": ((1, 1), (1, 1), (1,))}, "so it has two operands"),
        ({"in_strategy": (("seq", None),)}, "no axis 'seq'"),
        ({"in_strategy": ((None, "data"),)}, "cuts the batch, dim 0"),
        ({"out_strategy": (None, "data")}, "cuts the batch, dim 0"),
        ({"weights": {"kernel": (None, "seq")}}, "no axis 'seq'"),
        ({"weights": {"kernel": ("model",)}}, "1 entries and the tensor 2 dims"),
        ({"weights": {"kernels": (None, "model")}}, r"'kernels' applies to no weight.*\['kernel'"),
        ({"weights": {"(": (None,)}}, "no regular expression"),
        ({"weights": {"k.*": (None, None), ".*l": (None, None)}}, r"\['k\.\*', '\.\*l'\]"),
    ],
)
def test_resolve_refuses(arguments, message):
    layer = shard(dense(), **arguments)
    with pytest.raises(ValueError, match=message) as caught:
        resolve(layer, data=2, model=4)
    assert "Received: " in str(caught.value)


def test_a_weight_that_does_not_divide():
    layer = shard(dense(units=6), in_strategy=((1, 1), (1, 4)))
    with pytest.raises(ValueError, match="Dim 1 of .*kernel' has 6 elements.*4 or 8 would work"):
        resolve(layer, model=4)


def test_weights_of_a_layer_that_is_not_built():
    for arguments in ({"weights": {"kernel": (1, 1)}}, {"in_strategy": ((1, 1), (1, 1))}):
        with pytest.raises(ValueError, match="not built"):
            resolve(shard(layers.Dense(8), **arguments), model=2)
    assert resolve(shard(layers.Dense(8), in_strategy=(1, 2)), model=2).inputs == ((None, "model"),)


def test_ranks_are_checked_in_a_functional_model():
    layer = layers.Dense(8)
    layer(keras.Input((5, 4)))
    with pytest.raises(ValueError, match="input 0 of layer .* has 2 entries and the tensor 3 dims"):
        resolve(shard(layer, in_strategy=("data", None)), data=2)
    with pytest.raises(ValueError, match="the output of layer .* has 2 entries"):
        resolve(shard(layer, out_strategy=("data", None)), data=2)


def test_sizes_are_checked_in_a_functional_model_except_the_batch():
    layer = layers.Dense(6)
    layer(keras.Input((4,), batch_size=3))
    assert resolve(shard(layer, in_strategy=("data", "model")), data=2, model=4).inputs
    with pytest.raises(ValueError, match="Dim 1 of the output of layer .* has 6 elements"):
        resolve(shard(layer, out_strategy=("data", "model")), data=2, model=4)


def test_more_operands_than_inputs():
    layer = layers.Embedding(10, 4)
    layer(keras.Input((5,), dtype="int32"))
    with pytest.raises(ValueError, match=r"takes 1 positional tensors.*\['embeddings'\] with"):
        resolve(shard(layer, in_strategy=((1, 1), (1, 1))), model=2)


def test_several_outputs():
    layer = layers.LSTM(4, return_state=True)
    layer(keras.Input((5, 3)))
    with pytest.raises(ValueError, match="has 3 outputs and out_strategy is for one"):
        resolve(shard(layer, out_strategy=("data", None)), data=2)


def test_a_nested_model_as_a_layer():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(8, name="up")])
    keras.Model(x := keras.Input((4,)), inner(x))
    shard(inner, out_strategy=("data", None), weights={".*up/kernel": (None, "model")})
    resolved = resolve(inner, data=2, model=2)
    assert resolved.output == ("data", None)
    assert [layout.dims for layout in resolved.weights.values()] == [(None, "model")]


# shard on tensors, and the layer it adds


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
