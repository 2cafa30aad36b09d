"""What a declaration means for the operands and weights of a layer on a mesh."""

from kdist.config.shard import ResolvedShard, declaration_of, resolve_declaration, shard

import keras
import pytest

from ..runtime.mesh_parts import topology

layers = keras.layers


def resolve(layer, **axes):
    return resolve_declaration(layer, declaration_of(layer), topology(**axes))


def dense(units=8, inputs=4, **arguments):
    layer = layers.Dense(units, **arguments)
    layer.build((None, inputs))
    return layer


def dims_by_name(layer, resolved):
    names = {variable.path: variable.name for variable in layer.weights}
    return {names[path]: layout.dims for path, layout in resolved.weights.items()}


def test_the_second_operand_is_the_kernel():
    layer = shard(dense(), in_strategy=(("data", None), (None, "model")))
    resolved = resolve(layer, data=2, model=2)
    assert isinstance(resolved, ResolvedShard)
    assert resolved.inputs == (("data", None),)
    assert resolved.outputs == ()
    assert dims_by_name(layer, resolved) == {"kernel": (None, "model"), "bias": ("model",)}


def test_counts_as_mindspore_writes_them():
    layer = shard(dense(), in_strategy=((4, 1), (1, 1)), out_strategy=((4, 2),))
    resolved = resolve(layer, data=4, model=2)
    assert resolved.inputs == (("data", None),)
    assert resolved.outputs == (("data", "model"),)
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
    with pytest.raises(ValueError, match=r"takes 1 tensors.*\['embeddings'\] with"):
        resolve(shard(layer, in_strategy=((1, 1), (1, 1))), model=2)


def test_several_outputs():
    layer = layers.LSTM(4, return_state=True)
    layer(keras.Input((5, 3)))
    cut = (("data", None), (None, "model"))
    assert resolve(shard(layer, out_strategy=cut), data=2, model=2).outputs == cut
    with pytest.raises(ValueError, match="gives 3 tensors and out_strategy has 4 entries"):
        resolve(shard(layer, out_strategy=(*cut, *cut)), data=2, model=2)
    with pytest.raises(ValueError, match="Dim 1 of output 1 of layer .* has 4 elements"):
        resolve(shard(layer, out_strategy=cut), data=2, model=3)


def test_a_nested_model_as_a_layer():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(8, name="up")])
    keras.Model(x := keras.Input((4,)), inner(x))
    shard(inner, out_strategy=("data", None), weights={".*up/kernel": (None, "model")})
    resolved = resolve(inner, data=2, model=2)
    assert resolved.outputs == (("data", None),)
    assert [layout.dims for layout in resolved.weights.values()] == [(None, "model")]
