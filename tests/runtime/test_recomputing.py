"""What is said where nothing can be computed again."""

from __future__ import annotations

import re
import warnings
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.graphs import executed

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers


def elsewhere(function: Any, x: Any) -> Any:
    return keras.remat(function)(x)


class Wraps:
    """No layer, and no function."""

    def __call__(self, function: Any, x: Any) -> Any:
        return keras.remat(function)(x)


class Helped(keras.layers.Layer):
    """Calls what another function, or object, wraps."""

    def __init__(self, wraps: Any) -> None:
        super().__init__(name="helped")
        self.inner = layers.Dense(4, "gelu", name="inner")
        self.wraps = wraps

    def call(self, x: Any) -> Any:
        return self.wraps(self.inner, x)


def hidden(function: Any, x: Any) -> Any:
    """Nothing in its code leads to the wrapper."""
    return globals()["elsewhere"](function, x)


def helped(mode: bool | None, wraps: Any = hidden) -> keras.Model:
    keras.utils.set_random_seed(0)
    layer = Helped(wraps)
    if mode is not None:
        kdist.recompute(layer, mode)
    model = keras.Sequential([keras.Input((8,)), layer])
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=1)))
    model.compile("sgd", "mse")
    return model


def test_a_function_wrapped_elsewhere_is_refused() -> None:
    """It would give the weights inside no gradient."""
    rule = "(?s)keras.remat is taken to.*declare the layer with kdist.recompute.*inner.*elsewhere"
    with pytest.raises(ValueError, match=rule):
        helped(None).train_on_batch(np.ones((4, 8)), np.ones((4, 4)))


def test_a_function_that_another_wraps_runs_again() -> None:
    found = []
    for wraps in (elsewhere, Wraps(), lambda function, x: function(x)):
        model = helped(None, wraps)
        model.train_on_batch(np.ones((4, 8)), np.ones((4, 4)))
        found.append(model.get_weights())
        notes = [n for n in model.plan().notes if "keras.remat in " in n]
        assert bool(notes) == (len(found) < 3), model.plan().notes
    for one, other, expected in zip(*found, strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-6)
        np.testing.assert_allclose(other, expected, rtol=1e-6)


@pytest.mark.parametrize("mode", [True, False])
def test_a_function_wrapped_elsewhere_in_a_declared_layer(mode: bool) -> None:
    model = helped(mode)
    before = model.get_weights()
    model.train_on_batch(np.ones((4, 8)), np.ones((4, 4)))
    assert all((b != a).all() for b, a in zip(before, model.get_weights()))
    assert any(note.startswith("recompute") for note in model.plan().notes) is mode


class Own(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((y - y_pred) ** 2)


def messages(kind: type[keras.Model], blocks: str) -> tuple[list[str], str]:
    """What is told of recompute that computes nothing again, and the plan's line about blocks."""
    words = keras.Input((5,), dtype="int32")
    h: Any = layers.Embedding(9, 8)(words)
    for k in range(2):
        h = layers.Dense(8, "gelu", name=f"block{k}_down")(layers.Dense(16, "gelu")(h))
    model = kind(words, layers.Dense(1, name="head")(layers.GlobalAveragePooling1D()(h)))
    again = kdist.RecomputeConfig(layers=[blocks])
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2), recompute=again)
    kdist.parallelize(model, config).compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(np.zeros((4, 5)), np.zeros((4, 1)), verbose=0)
    (note,) = [one for one in model.plan().notes if one.startswith("recompute")]
    told = [str(one.message) for one in found if "computes nothing again" in str(one.message)]
    return told, note


@pytest.mark.parametrize("kind", [keras.Model, Own])
@pytest.mark.parametrize(("blocks", "count"), [(r"block(\d)_.*", 0), ("head", 1)])
def test_a_pass_without_anything_to_repeat_is_told(
    blocks: str, count: int, kind: type[keras.Model]
) -> None:
    """The gradients of a linear layer read what goes into it, and that is kept."""
    told, note = messages(kind, blocks)
    assert len(told) == count
    assert all(f"Received: {note}" in one for one in told)


def budgeted(axes: dict[str, int], budget: float = 0.02, **options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8)])
    for k in range(2):
        for width in (64, 8):
            model.add(layers.Dense(width, "gelu", name=f"block{k}_{width}"))
    again = kdist.RecomputeConfig(layers=[r"block(\d)_.*"], policy="budget", budget_mb=budget)
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), recompute=again, **options)
    kdist.parallelize(model, config).compile("sgd", "mse")
    return model


STAGES = {"pipeline": kdist.PipelineConfig(micro_batches=2)}


@pytest.mark.parametrize("source", ["arrays", "dataset"])
@pytest.mark.parametrize(
    ("axes", "options"), [({"data": 2}, {}), ({"pipe": 2}, STAGES)], ids=["data2", "pipe2"]
)
def test_a_budget_where_the_last_batch_is_smaller(
    axes: dict[str, int], options: dict[str, Any], source: str
) -> None:
    """Keras does not say how many rows a batch has then; it is chosen by the first one."""
    model = budgeted(axes, **options)
    x, y = np.ones((20, 8), "float32"), np.ones((20, 8), "float32")
    if source == "arrays":
        model.fit(x, y, batch_size=16, verbose=0)
    else:
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(16), verbose=0)
    whole = budgeted(axes, **options)
    whole.fit(x[:16], y[:16], batch_size=16, verbose=0)
    found, expected = attached(model).choices, attached(whole).choices
    assert expected
    assert all(one.repeated > 0 for one in expected.values())
    for name, one in expected.items():
        assert (found[name].peak, found[name].why) == (one.peak, "")
        assert found[name].repeated == pytest.approx(one.repeated)


def test_a_budget_and_ragged_inputs() -> None:
    """They have no size to choose by."""
    given = keras.Input((None,), dtype="int32", ragged=True)
    table = kdist.layers.TableConfig("words", 9, 4)
    feature = kdist.layers.FeatureConfig("words", table, (None, 3), (None, 4))
    rows = kdist.layers.DistributedEmbedding(feature)(given)
    model = keras.Model(given, layers.Dense(1, name="head")(rows))
    again = kdist.RecomputeConfig(layers=["head"], policy="budget", budget_mb=1.0)
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2), recompute=again)
    kdist.parallelize(model, config).compile("sgd", "mse")
    words = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7], [8, 1]], dtype=tf.int32)
    data = tf.data.Dataset.from_tensor_slices((words, np.ones((6, 1), "float32"))).batch(4)
    model.fit(data, verbose=0)
    assert "everything runs again" in "".join(model.plan().notes)


CUT = {
    "pipeline": kdist.PipelineConfig(micro_batches=2),
    "layout_map": {".*block._64/kernel": (None, "model"), ".*block._8/kernel": ("model", None)},
}


def test_a_budget_of_stages_over_inner_axes() -> None:
    """What a device has of each tensor is known once a stage is lowered, and chosen by then."""
    repeated = []
    for budget in (0.0105, 0.012):
        model = budgeted({"pipe": 2, "model": 2}, budget, **CUT)
        model.train_on_batch(np.ones((16, 8), "float32"), np.ones((16, 8), "float32"))
        choices = attached(model).choices.values()
        assert [one.why for one in choices] == ["", ""]
        assert all(0 < one.peak <= budget * 2**20 for one in choices)
        found = [one.activations for one in kdist.inspect(model, 16).memory]
        assert all(one is not None and one <= budget * 2**20 for one in found), found
        repeated.append(sum(one.repeated for one in choices))
    assert repeated[0] > repeated[1]


MADE = re.compile(r"PartitionedCall/(?:kdist_again/)?(.+)/DTensor\w+/group\d+/(?:sum|gather)$")
"""What one device makes of what all of its slice have, and for which operation."""


def test_a_sum_lies_where_a_budget_expects_it() -> None:
    """In each function that makes it: in the forward pass, and again in the backward pass."""
    model = budgeted({"pipe": 2, "model": 2}, 0.0105, **CUT)
    x = np.ones((16, 8), "float32")
    made: dict[str, list[str]] = {}
    for function in executed.watch(lambda: model.train_on_batch(x, x)):
        for node in function.nodes:
            if node.op in ("AddN", "ConcatV2") and (found := MADE.search(node.name)):
                made.setdefault(found[1], []).append(node.device)
    (stages,) = attached(model).mesh_step.runner.programs._traced.values()  # type: ignore[union-attr]
    expected = {}
    for stage, one in enumerate(stages):
        for name, turn in one._known.turns(one.vjp.numbers).items():
            expected[name] = f"/device:CPU:{2 * stage + turn % 2}"
            there = one._known.elsewhere()[turn % 2]
            assert one.vjp.numbers[name] not in there
    assert {name: {*devices} for name, devices in made.items()} == {
        name: {device} for name, device in expected.items()
    }
    # Of both stages, two micro-batches: a sum forward, which one stage repeats, and two backward.
    assert sorted(map(len, made.values())) == [2, 2, 2, 2, 2, 4]


def test_a_budget_of_several_chunks() -> None:
    """They share a device: what one repeats counts while another one computes."""
    pipeline = kdist.PipelineConfig(micro_batches=2, schedule="interleaved", chunks=2)
    repeated = []
    for budget in (0.019, 0.028):
        model = budgeted({"pipe": 2}, budget, pipeline=pipeline)
        model.train_on_batch(np.ones((16, 8), "float32"), np.ones((16, 8), "float32"))
        choices = attached(model).choices
        assert [*choices] == ["stage 0", "stage 1"]
        assert all(one.peak <= budget * 2**20 for one in choices.values())
        found = [one.activations for one in kdist.inspect(model, 16).memory]
        assert all(one is not None and one <= budget * 2**20 for one in found), found
        repeated.append(sum(one.repeated for one in choices.values()))
    assert repeated[0] > repeated[1]
