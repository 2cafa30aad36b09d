"""The graph of Keras models: its nodes compute what the model computes, stage by stage."""

from __future__ import annotations

from kdist._compat import keras_models
from kdist.pipeline import partition
from kdist.stages.model_graph import graph_of

import keras
import numpy as np
import pytest
from keras import layers, ops

from ..equivalence import zoo
from ..parity import mlp


def run(described, values):
    """Interprets the graph's nodes, with nothing but what `sources` says."""
    known = dict(zip(described.inputs, values))
    for node in described.graph.nodes:
        source = described.sources[node.name]
        keras_node = source.node
        filled = {
            id(tensor): known[name]
            for tensor, name in zip(keras_node.arguments.keras_tensors, source.inputs)
        }
        args, kwargs = keras_node.arguments.fill_in(filled)
        made = keras.tree.flatten(keras_node.operation(*args, **kwargs))
        known.update(zip(source.outputs, made))
    return [known[name] for name in described.outputs]


def encoder():
    x = keras.Input((6,), name="inner_in")
    h = layers.Dense(6, "tanh", name="first")(x)
    return keras.Model(
        x, layers.Add(name="sum")([x, layers.Dense(6, name="second")(h)]), name="enc"
    )


def nested_twice():
    x, net = keras.Input((6,), name="x"), encoder()
    y = net(net(x))
    return keras.Model(x, [layers.Dense(2, name="head")(y), y])


def nested_sequential():
    net = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(3)], name="stack")
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(2, name="head")(net(x)))


def called_with_training():
    x, net = keras.Input((6,)), encoder()
    return keras.Model(x, layers.Dense(2, name="head")(net(x, training=False)))


def deeply_nested():
    x, net = keras.Input((6,)), encoder()
    outer = keras.Model(x, net(net(x)), name="outer")
    z = keras.Input((6,))
    return keras.Model(z, outer(outer(z)))


def two_inputs_dict():
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    pair = keras.Model({"a": a, "b": b}, {"sum": a + b, "dif": a - b}, name="pair")
    x, y = keras.Input((6,), name="x"), keras.Input((6,), name="y")
    made = pair({"a": y, "b": x})
    return keras.Model([x, y], ops.concatenate([made["dif"], made["sum"] * 2.0]))


def identity_inside():
    x = keras.Input((6,))
    net = keras.Model(x, [x, layers.Dense(3)(x)], name="both")
    z = keras.Input((6,))
    a, b = net(z)
    return keras.Model(z, layers.Concatenate()([a, b]))


MODELS = {
    "mlp": mlp,
    "sequential": lambda: keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(3)]),
    "nested-twice": nested_twice,
    "nested-sequential": nested_sequential,
    "called-with-training": called_with_training,
    "deeply-nested": deeply_nested,
    "two-inputs-dict": two_inputs_dict,
    "identity-inside": identity_inside,
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", MODELS)
def test_the_nodes_compute_the_model(name):
    model = MODELS[name]()
    described = graph_of(model)
    values = [np.random.default_rng(i).normal(size=(3, 6)) for i in range(len(model.inputs))]
    expected = keras.tree.flatten(model(values if len(values) > 1 else values[0]))
    for got, want in zip(run(described, values), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    assert {id(v) for v in described.variables.values()} == {id(v) for v in model.variables}


def test_names_of_nested_calls():
    assert [node.name for node in graph_of(nested_twice()).graph.nodes] == [
        "enc/first", "enc/second", "enc/sum", "enc#1/first", "enc#1/second", "enc#1/sum", "head",
    ]  # fmt: skip
    pair = graph_of(two_inputs_dict()).graph.nodes
    assert sum(node.name.startswith("pair/") for node in pair) == 2
    names = {node.name for node in graph_of(deeply_nested()).graph.nodes}
    assert len(names) == 12
    assert "outer#1/enc#1/first" in names


def test_a_frozen_backbone_is_cut():
    """As in Keras's guide on transfer learning: base(x, training=False)."""
    described = graph_of(called_with_training())
    assert [node.name for node in described.graph.nodes][:2] == ["enc/first", "enc/second"]


@pytest.mark.parametrize("given", [False, None])
def test_keras_runs_a_nested_model_as_the_outer_one(given):
    """What the row above rests on: Keras overrides `training=False` of a nested call."""
    x, net = keras.Input((6,)), keras.Sequential([keras.Input((6,)), layers.BatchNormalization()])
    model = keras.Model(x, net(x, training=given))
    moving = net.layers[0].moving_mean
    model(np.ones((4, 6)), training=True)
    assert moving.numpy().any()
    before = moving.numpy()
    model(np.ones((4, 6)), training=False), model(np.ones((4, 6)))
    np.testing.assert_array_equal(moving.numpy(), before)


def test_shared_weights_are_tied():
    described = graph_of(nested_twice())
    result = partition(described.graph.assign({"enc/sum": 0, "enc#1/first": 1}), 2)
    assert result.stages[0] == ("enc/first", "enc/second", "enc/sum")
    assert set(result.tied.values()) == {(0, 1)}
    tied = {described.variables[key].path for key in result.tied}
    assert tied == {"first/kernel", "first/bias", "second/kernel", "second/bias"}


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_of_a_gpt(tied):
    described = graph_of((zoo.GPT_TIED if tied else zoo.GPT).build())
    result = partition(described.graph, 2)
    assert "vocabulary" in result.stages[0] and "vocabulary#1" in result.stages[1]
    assert result.tied == ({"vocabulary/embeddings": (0, 1)} if tied else {})
    assert result.imbalance < 1.3


def test_two_variables_of_one_path_stay_two():
    x = keras.Input((6,))
    one, other = encoder(), encoder()
    other.name = "enc2"
    described = graph_of(keras.Model(x, other(one(x))))
    assert set(described.variables) >= {"first/kernel", "first/kernel#1"}
    assert len(described.variables) == 8


class Doubled(keras.Model):
    """A Functional model with a call of its own."""

    def call(self, inputs, training=None, mask=None):
        return 2.0 * super().call(inputs)


def kept_own_call():
    x = keras.Input((6,))
    return Doubled(x, layers.Dense(3)(x), name="inner")


def kept_regularized():
    x = keras.Input((6,))
    net = keras.Model(x, layers.Dense(3)(x), name="inner")
    net.activity_regularizer = keras.regularizers.L2(1.0)
    return net


def kept_other_dtype():
    x = keras.Input((6,), dtype="float16")
    return keras.Model(x, layers.Dense(3)(x), name="inner")


def kept_other_rank():
    x = keras.Input((6, 1))
    return keras.Model(x, layers.Dense(3)(x), name="inner")


KEPT = [kept_own_call, kept_other_dtype, kept_other_rank]


@pytest.mark.parametrize("make", KEPT, ids=lambda make: make.__name__)
def test_nested_models_that_cannot_be_cut_stay_whole(make):
    x = keras.Input((6,))
    model = keras.Model(x, make()(x))
    described = graph_of(model)
    assert [node.name for node in described.graph.nodes] == ["inner"]
    value = np.random.default_rng(0).normal(size=(3, 6)).astype("float32")
    np.testing.assert_allclose(run(described, [value])[0], model(value), rtol=1e-6)


def test_a_regularized_nested_model_stays_whole():
    x = keras.Input((6,))
    graph = graph_of(keras.Model(x, kept_regularized()(x))).graph
    assert [node.name for node in graph.nodes] == ["inner"]


def test_a_nested_model_called_with_arguments_stays_whole():
    x, net = keras.Input((6,)), encoder()
    graph = graph_of(keras.Model(x, net(x, training=True))).graph
    assert [node.name for node in graph.nodes] == ["enc"]
    inner = graph_of(net).graph
    assert graph.nodes[0].cost == pytest.approx(sum(node.cost for node in inner.nodes))


class Subclassed(keras.Model):
    def call(self, x):
        return x


@pytest.mark.parametrize(
    "make", [Subclassed, lambda: keras.Sequential([layers.Dense(3)]), kept_own_call, lambda: 3]
)
def test_models_without_a_graph_are_refused(make):
    with pytest.raises(
        ValueError, match=r"Functional.*Build the Sequential.*list of layers.*Recei"
    ):
        graph_of(make())


def test_a_large_model_is_cut_evenly():
    blocks = [layers.Dense(64, "relu", name=f"d{i}") for i in range(40)]
    described = graph_of(keras.Sequential([keras.Input((64,)), *blocks]))
    for stages in (2, 4, 8):
        result = partition(described.graph, stages)
        assert {len(names) for names in result.stages} == {40 // stages}
    assert keras_models.functional_of(Subclassed()) is None


def test_a_change_of_shape_is_no_stage():
    """Behind one that moves more than all later layers compute."""
    model = keras.Sequential([keras.Input((6, 12)), layers.Flatten()])
    for width in (8, 8, 3):
        model.add(layers.Dense(width))
    first, _ = partition(graph_of(model, examples=4).graph, 2).stages
    assert len(first) > 1
