"""A model of which layers run again equals one that keeps what it computed.

Masks, statistics and weights are the same. The reference is kdist on the same mesh without
recompute, since masks depend on the layout; without dropout, it is one plain device.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import kdist
from kdist.api.attached import attached

import keras
import pytest

from .case import CLASSES, TOKENS, VOCABULARY
from .features import BY_NAME as FEATURES
from .harness import Run, compare, train
from .matrix import MESHES, product, spread
from .optimizer_zoo import OPTIMIZERS
from .outcome import TOLERANCES, check
from .recompute_parts import BLOCKS, PLAN, STAGED_PLAN, copies, planned, saved, twins
from .zoo import BY_NAME


def level(number: int) -> dict[str, Any]:
    return {"optimizer": kdist.OptimizerConfig(level=number, threshold_kb=0)}


CONFIGS: dict[str, dict[str, Any]] = {
    "level0": {},
    "level1": level(1),
    "level2": level(2),
    "level3": level(3),
    "no_overlap": {"fusion": kdist.FusionConfig(overlap=False)},
}
DEFAULT = [
    ("full", "level0", "data2"),
    ("budget", "level0", "data2"),
    ("selective", "level3", "model2"),
]
ROWS = product(PLAN, CONFIGS, ("data2", "model2", "data2_model2"))


@pytest.mark.parametrize(("plan", "config", "mesh"), spread(ROWS, DEFAULT))
def test_recompute_equals_none(
    plan: str, config: str, mesh: str, trained: list[keras.Model]
) -> None:
    twins(trained, plan, mesh_axes=MESHES[mesh], config=CONFIGS[config])


STAGED: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline": kdist.PipelineConfig(micro_batches=2)},
    "zero_bubble": {"pipeline": kdist.PipelineConfig(micro_batches=2, schedule="zero_bubble")},
    "level3": {"pipeline": kdist.PipelineConfig(micro_batches=2), **level(3)},
}
STAGED_MESHES: dict[str, dict[str, int]] = {
    "pipe2": {"pipe": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}
STAGED_ROWS = product(STAGED_PLAN, STAGED, STAGED_MESHES)


@pytest.mark.parametrize(
    ("plan", "config", "mesh"), spread(STAGED_ROWS, [("full", "1f1b", "pipe2")])
)
def test_stages(plan: str, config: str, mesh: str, trained: list[keras.Model]) -> None:
    twins(trained, plan, mesh_axes=STAGED_MESHES[mesh], config=STAGED[config])


@pytest.mark.long
@pytest.mark.parametrize("feature", ["gradient_accumulation", "global_clipnorm", "ema"])
@pytest.mark.parametrize("plan", PLAN)
def test_with_other_features(plan: str, feature: str, trained: list[keras.Model]) -> None:
    features = [FEATURES[feature]]
    twins(trained, plan, mesh_axes=MESHES["data2_model2"], features=features)


@pytest.mark.long
@pytest.mark.parametrize("plan", PLAN)
def test_mixed_precision(plan: str, trained: list[keras.Model]) -> None:
    twins(trained, plan, mesh_axes={"data": 2}, dtype="mixed_bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("plan", PLAN)
def test_half_precision_is_the_same(plan: str, trained: list[keras.Model]) -> None:
    """To the last bit, where both run node by node, as with a budget that nothing exceeds.

    In functions, as without recompute, TensorFlow rounds a value of half precision otherwise.
    """
    run = Run(
        case=BLOCKS,
        optimizer=OPTIMIZERS["adam"],
        mesh_axes=MESHES["data2_model2"],
        dtype="mixed_float16",
        samples=11,
    )
    roomy = dataclasses.replace(PLAN["budget"], budget_mb=1000.0)
    again = planned(plan, 4, run.dtype)
    expected, actual = (
        train(dataclasses.replace(run, config={"recompute": one}), "kdist")
        for one in (roomy, again)
    )
    assert not copies(trained[0])
    assert copies(trained[-1])
    for part in ("history", "weights", "slots"):
        before, after = getattr(expected, part), getattr(actual, part)
        assert all((before[name] == after[name]).all() for name in before)


SCOPES: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "activations": {"mode": "activations"},
    "larger_than": {"mode": "larger_than", "output_size_threshold": 30},
    "list_of_layers": {"mode": "list_of_layers", "layer_names": ["attention", "up"]},
    "none": {"mode": None},
}
SCOPE_ROWS = product(SCOPES, ("data1", "data2_model2"))


def _flat() -> keras.Model:
    """Keras cannot make a layer in a scope that calls layers with keyword arguments."""
    x = inputs = keras.Input((TOKENS,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(VOCABULARY, 8, name="vocabulary")(x)
    attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.3, seed=3, name="attention")
    x = keras.layers.add([x, attention(x, x)])
    h = keras.layers.BatchNormalization(momentum=0.7, name="norm")(x)
    h = keras.layers.Dense(16, "gelu", name="up")(h)
    h = keras.layers.Dropout(0.4, seed=4, name="drop")(h)
    x = x + keras.layers.Dense(8, name="down")(h)
    x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="flat")


@pytest.mark.parametrize(("mode", "mesh"), spread(SCOPE_ROWS, [("full", "data1")]))
def test_models_built_in_a_remat_scope(mode: str, mesh: str, trained: list[keras.Model]) -> None:
    """They equal plain Keras without one on one device, masks of dropout included."""

    def build() -> keras.Model:
        with keras.RematScope(**SCOPES[mode]):
            return _flat()

    axes = MESHES.get(mesh, {"data": 1})
    case = dataclasses.replace(BLOCKS, build=_flat)
    run = Run(case=case, optimizer=OPTIMIZERS["adam"], mesh_axes=axes)
    scoped = dataclasses.replace(run, case=dataclasses.replace(case, build=build))
    expected = train(run, "plain" if mesh == "data1" else "kdist")
    check(expected, train(scoped, "kdist"), TOLERANCES[run.dtype], title=f"{run.title} [{mode}]")
    if mode == "none":
        assert not attached(trained[-1]).blocks
    else:
        assert copies(trained[-1])


class Wrapping(keras.layers.Layer):
    """Has its function, and a layer, run by `keras.remat`, unless told not to."""

    def __init__(self, name: str, remat: bool, where: str) -> None:
        super().__init__(name=name)
        self.norm = keras.layers.BatchNormalization(momentum=0.7, name="norm")
        self.up = keras.layers.Dense(16, "gelu", name="up")
        self.drop = keras.layers.Dropout(0.4, seed=4, name="drop")
        self.down = keras.layers.Dense(8, name="down")
        self.remat, self.where = remat, where
        held = remat and where == "held"
        self.held = keras.remat(self.feed_forward) if held else self.feed_forward

    def feed_forward(self, x: Any) -> Any:
        h = self.drop(self.up(self.norm(x, training=True)), training=True)
        return self.down(h)

    def call(self, x: Any) -> Any:
        if self.where == "captures":
            gate = keras.ops.sigmoid(self.up(x))[..., :8]

            def gated(x: Any) -> Any:
                return self.feed_forward(x) * gate

            return x + (keras.remat(gated) if self.remat else gated)(x)
        if self.remat and self.where == "inside":
            x = x + keras.remat(self.feed_forward)(x)
            return keras.remat(self.up)(x)[..., :8] + x
        x = x + self.held(x)
        return self.up(x)[..., :8] + x


def _wrapping(remat: bool, where: str) -> keras.Model:
    x = inputs = keras.Input((TOKENS,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(VOCABULARY, 8, name="vocabulary")(x)
    x = Wrapping("first", remat, where)(x)
    x = keras.layers.Dense(8, name="last")(x)
    x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="wrapping")


WRAPPED_MESHES = {
    "data1": {"data": 1},
    "data2": {"data": 2},
    "data2_model2": {"data": 2, "model": 2},
    "pipe2": {"pipe": 2},
}
WRAPPED_ROWS = product(("held", "inside", "captures"), WRAPPED_MESHES)


@pytest.mark.parametrize(
    ("where", "mesh"), spread(WRAPPED_ROWS, [("held", "data1"), ("inside", "data2")])
)
def test_functions_that_a_layer_wraps_in_remat(
    where: str, mesh: str, trained: list[keras.Model]
) -> None:
    """Masks are the same, and weights inside get their gradients.

    Those of what a function captures are lost in plain Keras, so it goes without `keras.remat`.
    """
    plain, wrapped = (functools.partial(_wrapping, remat, where) for remat in (False, True))
    staged = {"pipeline": kdist.PipelineConfig(micro_batches=2)} if mesh == "pipe2" else {}
    run = Run(
        case=dataclasses.replace(BLOCKS, build=plain),
        optimizer=OPTIMIZERS["adam"],
        mesh_axes=WRAPPED_MESHES[mesh],
        config=staged,
    )
    again = dataclasses.replace(run, case=dataclasses.replace(BLOCKS, build=wrapped))
    expected = train(run, "plain" if mesh == "data1" else "kdist")
    check(expected, train(again, "kdist"), TOLERANCES[run.dtype], title=f"{run.title} [{where}]")
    note = "recompute (full): 1 blocks, from keras.remat in first"
    assert note in trained[-1].plan().notes
    if mesh == "pipe2":
        assert saved(trained[-1]) < saved(trained[0])
    else:
        repeated = copies(trained[-1])
        assert any("/drop" in name for name in repeated)
        assert all("kdist_remat_0" in name for name in repeated)


ZOO = ("mlp", "shared_mlp", "siamese", "resnet", "lstm", "dlrm", "gpt_tied", "encoder")
ZOO_ROWS = product(ZOO, ("data2", "data2_model2"))


@pytest.mark.parametrize(("name", "mesh"), spread(ZOO_ROWS, [("shared_mlp", "data2_model2")]))
def test_every_layer_again_equals_one_device(name: str, mesh: str) -> None:
    compare(
        BY_NAME[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        config={"recompute": kdist.RecomputeConfig()},
    )


class Branching(keras.layers.Layer):
    """Multiplies by one of two matrices."""

    def build(self, shape: Any) -> None:
        self.kernels = [self.add_weight(shape=(shape[-1], 8), name=f"kernel_{i}") for i in (0, 1)]

    def call(self, x: Any) -> Any:
        first, second = self.kernels
        return keras.ops.cond(first[0, 0] < 9, lambda: x @ first, lambda: x @ second)


def _looping() -> keras.Model:
    x = inputs = keras.Input((TOKENS,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(VOCABULARY, 8, name="vocabulary")(x)
    x = keras.layers.LSTM(8, return_sequences=True, name="block_0_lstm")(x)
    x = Branching(name="block_0_branch")(x)
    x = keras.layers.Dense(8, "gelu", name="block_0_dense")(x)
    x = keras.layers.Dense(8, "gelu", name="block_1_dense")(x)
    x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x), name="looping")


LOOPING = dataclasses.replace(BLOCKS, name="looping", build=_looping, layout_map={})
LOOP_ROWS = product(("least", "more"), ("data1", "data2", "model2", "pipe2"))


@pytest.mark.parametrize(("budget", "mesh"), spread(LOOP_ROWS, [("least", "data1")]))
def test_budgets_of_blocks_with_loops_and_branches(budget: str, mesh: str) -> None:
    """Their time is not estimated; they run again where everything does."""
    axes = {**MESHES, **WRAPPED_MESHES}[mesh]
    staged = {"pipeline": kdist.PipelineConfig(micro_batches=2)} if "pipe" in axes else {}

    def again(budget_mb: float) -> dict[str, Any]:
        recompute = kdist.RecomputeConfig(
            layers=[r"block_(\d)_.*"], policy="budget", budget_mb=budget_mb
        )
        return {"recompute": recompute, **staged}

    adam = OPTIMIZERS["adam"]
    with pytest.raises(ValueError, match="Give budget_mb at least") as least:
        train(Run(case=LOOPING, mesh_axes=axes, optimizer=adam, config=again(1e-4)), "kdist")
    found = float(re.search(r"need (\S+) MB", str(least.value))[1])  # type: ignore[index]
    config = again(found if budget == "least" else 1.2 * found)
    compare(LOOPING, axes, optimizer=adam, config=config)
