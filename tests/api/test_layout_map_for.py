"""Layout maps that are found: what is cut, and what is left."""

from __future__ import annotations

import importlib
from typing import Any

import kdist
from kdist.plan import column_row

import keras
import numpy as np
import pytest

found_by = importlib.import_module("kdist.api.layout_map_for")


def axes(**sizes: int) -> Any:
    return kdist.mesh(**(sizes or {"data": 2, "model": 2}))


def block(x: Any, name: str, width: int = 16, heads: int = 4) -> Any:
    h = keras.layers.LayerNormalization(name=f"{name}_norm_1")(x)
    h = keras.layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")(h, h)
    x = keras.layers.Add(name=f"{name}_add_1")([x, h])
    h = keras.layers.LayerNormalization(name=f"{name}_norm_2")(x)
    gate = keras.layers.Dense(4 * width, activation="silu", name=f"{name}_gate")(h)
    h = keras.layers.Dense(4 * width, name=f"{name}_up")(h)
    h = keras.layers.Dropout(0.0, name=f"{name}_drop")(keras.ops.multiply(gate, h))
    h = keras.layers.Dense(width, name=f"{name}_down")(h)
    return keras.layers.Add(name=f"{name}_add_2")([x, h])


def transformer(heads: int = 4, depth: int = 2) -> keras.Model:
    keras.utils.set_random_seed(0)
    ids = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(64, 16, name="tokens")(ids)
    for index in range(depth):
        x = block(x, f"block_{index}", heads=heads)
    return keras.Model(ids, keras.layers.Dense(64, name="head")(x))


class Attention(keras.layers.Layer):
    """As many write it: four equal products, cut into heads by a reshape."""

    def __init__(self, width: int, heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_heads, self.head = heads, width // heads
        self.query, self.key, self.value, self.combine = (
            keras.layers.Dense(width, name=name) for name in ("query", "key", "value", "combine")
        )

    def build(self, shape: Any) -> None:
        for layer in (self.query, self.key, self.value, self.combine):
            layer.build(shape)
        super().build(shape)

    def call(self, x: Any) -> Any:
        ops, shape = keras.ops, keras.ops.shape(x)

        def heads(layer: Any) -> Any:
            return ops.reshape(layer(x), (-1, shape[1], self.num_heads, self.head))

        scores = ops.einsum("bqhd,bkhd->bhqk", heads(self.query), heads(self.key))
        mixed = ops.einsum("bhqk,bkhd->bqhd", ops.softmax(scores), heads(self.value))
        return self.combine(ops.reshape(mixed, shape))


BY_HEADS = (None, "model", None)
TRANSFORMER = {
    **{rf"block_\d+_attention/{n}/kernel": BY_HEADS for n in ("query", "key", "value")},
    **{rf"block_\d+_attention/{n}/bias": ("model", None) for n in ("query", "key", "value")},
    r"block_\d+_attention/attention_output/kernel": ("model", None, None),
    r"block_\d+_gate/kernel": (None, "model"),
    r"block_\d+_gate/bias": ("model",),
    r"block_\d+_up/kernel": (None, "model"),
    r"block_\d+_up/bias": ("model",),
    r"block_\d+_down/kernel": ("model", None),
}


def test_a_transformer_is_cut_as_megatron_cuts_it() -> None:
    assert kdist.layout_map_for(transformer(), axes()) == TRANSFORMER


def test_large_tables_and_last_layers_are_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (found_by, column_row):
        monkeypatch.setattr(module, "LARGE", 1024)
    found = kdist.layout_map_for(transformer(), axes())
    ends = {"tokens/embeddings": ("model", None), "head/kernel": (None, "model")}
    assert found == {**ends, **TRANSFORMER, "head/bias": ("model",)}

    keras.utils.set_random_seed(0)
    model = transformer()
    kdist.place(model.get_layer("tokens"), "host")
    assert "tokens/embeddings" not in kdist.layout_map_for(model, axes())


@pytest.mark.parametrize(
    ("widths", "roles"),
    [
        ((32, 8, 3), "cr-"),
        ((16, 16, 16, 16), "crcr"),
        ((7, 12, 7, 4), "-cr-"),  # 7 has no halves: what follows is looked at anew
    ],
)
def test_a_chain_is_cut_in_pairs(widths: Any, roles: str, recwarn: Any) -> None:
    layers = [keras.layers.Dense(width, "relu", name=f"d{n}") for n, width in enumerate(widths)]
    model = keras.Sequential([keras.Input((16,)), *layers], name="chain")
    found = kdist.layout_map_for(model, axes())
    kernels = {path: dims for path, dims in found.items() if path.endswith("kernel")}
    wanted = {"c": (None, "model"), "r": ("model", None)}
    cut = [(n, role) for n, role in enumerate(roles) if role != "-"]
    assert kernels == {f"chain/d{n}/kernel": wanted[role] for n, role in cut}


def test_the_few_that_are_laid_out_otherwise_have_paths(float64: None, recwarn: Any) -> None:
    """The pattern serves a deeper model, and what is left whole is whole."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        x = inputs = keras.Input((8,))
        for n in range(6):
            h = keras.layers.Dense(7 if n == 2 else 16, "relu", name=f"up_{n}")(x)
            x = keras.layers.LayerNormalization(name=f"norm_{n}")(
                keras.layers.Dense(8, name=f"down_{n}")(h)
            )
        return keras.Model(inputs, x)

    plain, parallel = build(), build()
    found = kdist.layout_map_for(parallel, axes())
    assert found == {
        r"up_\d+/kernel": (None, "model"),
        "up_2/kernel": (None, None),
        r"up_\d+/bias": ("model",),
        "up_2/bias": (None,),
        r"down_\d+/kernel": ("model", None),
        "down_2/kernel": (None, None),
    }
    kdist.parallelize(parallel, kdist.ParallelConfig(mesh=axes(), layout_map=found))
    x, y = np.random.default_rng(0).normal(size=(2, 8, 8))
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    for one, other in zip(plain.get_weights(), parallel.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_a_residual_between_two_products_keeps_them_apart() -> None:
    x = keras.Input((16,))
    first = keras.layers.Dense(16, name="first")(x)
    model = keras.Model(x, keras.layers.Dense(16, name="second")(keras.layers.add([x, first])))
    with pytest.raises(ValueError, match="Nothing to cut was found: no attention, no two products"):
        kdist.layout_map_for(model, axes())


def normalized(width: int, name: str, axis: int = -1) -> keras.Model:
    """A block as many write it, of its own name."""
    parts = [
        keras.layers.Dense(width, name="dense"),
        keras.layers.BatchNormalization(axis, momentum=0.7, name="norm"),
        keras.layers.PReLU(shared_axes=[1], name="rectified"),
        keras.layers.Dropout(0.0),
    ]
    return keras.Sequential(parts, name=name)


def deep(axis: int = -1) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = keras.Input((8, 16))
    h = normalized(64, "first", axis)(x)
    h = normalized(16, "second", axis)(keras.ops.leaky_relu(h) / 2.0)
    return keras.Model(x, keras.layers.Dense(3, name="last")(h))


def test_what_lies_between_a_pair_may_be_in_models_inside(float64: None) -> None:
    """One sum in a step, and nothing for what is normalized."""
    mesh = kdist.mesh(model=2)
    plain, parallel = deep(), deep()
    layouts = kdist.layout_map_for(parallel, mesh)
    assert layouts == {
        "first/dense/kernel": (None, "model"),
        "first/dense/bias": ("model",),
        **{
            f"first/norm/{name}": ("model",)
            for name in ("gamma", "beta", "moving_mean", "moving_variance")
        },
        "first/rectified/alpha": (None, "model"),
        "second/dense/kernel": ("model", None),
    }
    kdist.parallelize(parallel, kdist.ParallelConfig(mesh=mesh, layout_map=layouts))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 8, 16)), rng.normal(size=(8, 8, 3))
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    for one, other in zip(plain.get_weights(), parallel.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    inspection = kdist.inspect(parallel)
    assert inspection.count("all-reduce", phase="forward") == 1
    assert inspection.count("all-gather") == 0, inspection


def test_statistics_over_what_a_pair_cuts_keep_it_apart() -> None:
    with pytest.raises(ValueError, match="no two products"):
        kdist.layout_map_for(deep(axis=1), axes())


def test_what_a_model_inside_takes_counts_at_each_call() -> None:
    x = keras.Input((16,))
    inside = keras.Sequential([keras.layers.Dense(16, name="down")], name="inside")
    first, second = (keras.layers.Dense(16, name=name) for name in ("first", "second"))
    both = keras.Model(x, keras.layers.add([inside(first(x)), inside(second(x))]))
    found = kdist.layout_map_for(both, axes())
    kernels = {path for path in found if path.endswith("kernel")}
    assert kernels == {"first/kernel", "second/kernel", "inside/down/kernel"}
    other = keras.Model(x, keras.layers.add([inside(first(x)), inside(x)]))
    with pytest.raises(ValueError, match="no two products"):
        kdist.layout_map_for(other, axes())


def test_attention_of_four_equal_products_is_cut_by_heads() -> None:
    x = keras.Input((8, 16))
    model = keras.Model(x, Attention(16, 4, name="mine")(x))
    found = kdist.layout_map_for(model, axes())
    columns = ["mine/query", "mine/key", "mine/value"]
    kernels = {f"{path}/kernel": (None, "model") for path in columns}
    biases = {f"{path}/bias": ("model",) for path in columns}
    assert found == {**kernels, **biases, "mine/combine/kernel": ("model", None)}

    odd = keras.Model(x, Attention(15, 3, name="mine")(keras.layers.Dense(15)(x)))
    with pytest.raises(ValueError, match="Nothing to cut"):
        kdist.layout_map_for(odd, axes())


def test_fewer_key_heads_than_devices_stay_whole() -> None:
    x = keras.Input((8, 16))
    attention = keras.layers.GroupQueryAttention(4, 4, 1, use_bias=False, name="grouped")
    model = keras.Model(x, attention(x, x))
    with pytest.warns(UserWarning, match="these stay whole: grouped/key/kernel .dim 1 has 1, no"):
        found = kdist.layout_map_for(model, axes())
    assert found == {
        "grouped/query/kernel": BY_HEADS,
        "grouped/attention_output/kernel": ("model", None, None),
    }


def test_heads_that_do_not_divide_are_told() -> None:
    model, message = transformer(), "left whole: .*_gate/kernel .dim 1 has 64, no multiple of 3"
    with pytest.raises(ValueError, match=message):  # 64 hidden units have no thirds either
        kdist.layout_map_for(model, kdist.mesh(model=3))
    assert kdist.layout_map_for(transformer(heads=2), kdist.mesh(model=2)) == TRANSFORMER


def test_numbers_at_the_end_of_names_tell_layers_apart() -> None:
    layers = [keras.layers.Dense(16, name=f"layer_{n}") for n in range(3)]
    model = keras.Sequential([keras.Input((16,)), *layers], name="chain")
    found = kdist.layout_map_for(model, axes())
    assert list(found) == [f"chain/layer_{one}" for one in ("0/kernel", "0/bias", "1/kernel")]


def test_values_of_another_width_are_cut_with_their_keys() -> None:
    x = keras.Input((8, 16))
    attention = keras.layers.MultiHeadAttention(4, 2, value_dim=3, use_bias=False, name="mine")
    found = kdist.layout_map_for(keras.Model(x, attention(x, x)), axes())
    columns = {f"mine/{name}/kernel": BY_HEADS for name in ("query", "key", "value")}
    assert found == {**columns, "mine/attention_output/kernel": ("model", None, None)}


def test_a_product_over_another_dim_is_no_first_of_a_pair() -> None:
    """What it cuts is not what the next one sums over."""
    x = keras.Input((6, 16))
    over_time = keras.layers.EinsumDense("abc,bd->adc", (32, 16), name="over_time")
    h = keras.layers.Dense(64, name="up")(over_time(x))
    found = kdist.layout_map_for(keras.Model(x, keras.layers.Dense(8, name="down")(h)), axes())
    assert list(found) == ["up/kernel", "up/bias", "down/kernel"]


def test_networks_that_share_paths_get_layouts_that_fit_all_of_them() -> None:
    def network(hidden: int) -> keras.Model:
        layers = [keras.layers.Dense(hidden, name="up"), keras.layers.Dense(8, name="down")]
        return keras.Sequential([keras.Input((8,)), *layers], name="network")

    x, other = keras.Input((8,)), keras.Input((8,))
    end = [keras.layers.Dense(16, name="wide"), keras.layers.Dense(4, name="end")]
    h = keras.layers.Maximum()(
        [keras.Model(i, network(n)(i))(i) for n, i in ((32, x), (33, other))]
    )
    model = keras.Model([x, other], end[1](end[0](h)))
    with pytest.warns(UserWarning, match=r"network/up/kernel .one of that path has shape .8, 33."):
        found = kdist.layout_map_for(model, axes())
    assert [*found][-3:] == ["wide/kernel", "wide/bias", "end/kernel"]
    kdist.parallelize(model, kdist.ParallelConfig(mesh=axes(), layout_map=found))


def test_the_map_of_a_shallow_model_serves_a_deep_one_that_is_never_whole() -> None:
    found = kdist.layout_map_for(transformer(depth=1), axes())
    config = kdist.ParallelConfig(mesh=axes(), layout_map=found)
    with kdist.scope(config):
        model = transformer(depth=12)
    plan = model.plan()
    cut = [one.path for one in plan.weights if any(one.layout.dims)]
    assert len(cut) == 12 * len(TRANSFORMER)
    assert "block_11_down/kernel" in cut


@pytest.mark.parametrize(
    ("sizes", "axis", "message"),
    [
        ({"data": 4}, None, "Received: axis=None"),
        ({"model": 2, "expert": 2}, None, "Received: axis=None"),
        ({"data": 2, "model": 2}, "data", "Received: axis='data'"),
    ],
)
def test_an_axis_that_cuts_no_layer_is_refused(sizes: Any, axis: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kdist.layout_map_for(transformer(), kdist.mesh(**sizes), axis)


def test_one_of_several_axes_is_named() -> None:
    found = kdist.layout_map_for(transformer(), kdist.mesh(model=2, expert=2), "expert")
    assert found[r"block_\d+_up/kernel"] == (None, "expert")


def test_a_model_that_is_not_built_is_refused() -> None:
    with pytest.raises(ValueError, match="Build the model first"):
        kdist.layout_map_for(keras.Sequential([keras.layers.Dense(8)]), axes())


class Holder(keras.Model):
    """As models with a `train_step` of their own hold networks: without a `call`."""

    def __init__(self, *networks: keras.Layer) -> None:
        super().__init__()
        self.networks = networks
        self.joined = keras.layers.Concatenate()


def test_a_model_that_only_holds_others_has_their_map() -> None:
    holder = Holder(transformer())
    assert not holder.built
    assert kdist.layout_map_for(holder, axes()) == kdist.layout_map_for(transformer(), axes())


def test_layers_that_are_not_built_are_named() -> None:
    holder = Holder(transformer(), keras.layers.Dense(8, name="late"))
    with pytest.raises(ValueError, match="with \\['late'\\] not built"):
        kdist.layout_map_for(holder, axes())


def test_quantized_products_are_told_and_cut_by_a_map_of_before(float64: None) -> None:
    def quantized() -> keras.Model:
        model = transformer(depth=1)
        for name in ("block_0_gate", "block_0_up", "block_0_down"):
            model.get_layer(name).quantize("int8")
            model.get_layer(name).enable_lora(2)
        return model

    before = kdist.layout_map_for(transformer(depth=1), axes())
    plain, model = quantized(), quantized()
    told = "these stay whole: block_0_gate .quantized to int8.; .*up .*; .*down .quantized"
    with pytest.warns(UserWarning, match=told):
        found = kdist.layout_map_for(model, axes())
    assert found == {path: dims for path, dims in before.items() if "attention" in path}
    model.get_layer("block_0_attention").trainable = False
    plain.get_layer("block_0_attention").trainable = False
    kdist.parallelize(model, kdist.ParallelConfig(mesh=axes(), layout_map=before))
    ids = np.arange(64).reshape(8, 8)
    losses = []
    for one in (plain, model):
        one.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        losses.append(one.fit(ids, ids, epochs=2, shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-9)


def test_a_model_of_quantized_products_is_refused_with_what_to_do() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(8)])
    for layer in model.layers:
        layer.quantize("int8")
    with pytest.raises(ValueError, match="find it before quantize.* .quantized to int8"):
        kdist.layout_map_for(model, axes())
