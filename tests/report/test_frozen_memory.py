"""Level 3 keeps parts of weights that do not train, and has few of them whole at a time."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest

WIDTH, LAYERS, ROWS, RANK = 32, 6, 8, 2
KERNEL = WIDTH * WIDTH * 4


def tuned(axes: dict[str, int], level: int, **options: Any) -> keras.Model:
    """A stack whose products are adapted by LoRA, that has trained a batch."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((WIDTH,))
    for i in range(LAYERS):
        x = keras.layers.Dense(WIDTH, "tanh", use_bias=False, name=f"dense_{i}")(x)
    model = keras.Model(inputs, x)
    for layer in model.layers[1:]:
        layer.enable_lora(RANK)
    if "model" in axes:
        options["layout_map"] = {r"dense_\d/kernel": (None, "model")}
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        optimizer=kdist.OptimizerConfig(level=level, threshold_kb=1),
        **options,
    )
    kdist.parallelize(model, config).compile("sgd", "mse")
    batch = np.ones((ROWS, WIDTH), np.float32)
    model.train_on_batch(batch, batch)
    return model


PIPELINE = {"pipeline": kdist.PipelineConfig(micro_batches=2)}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data4": ({"data": 4}, {}),
    "data2_model2": ({"data": 2, "model": 2}, {}),
    "global": ({"data": 2, "model": 2}, {"batch_semantics": "global"}),
    "pipe2_data2": ({"pipe": 2, "data": 2}, PIPELINE),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_frozen_kernels_are_kept_in_parts(mesh: str) -> None:
    axes, options = MESHES[mesh]
    # Below the threshold; the factor that has the cut dim is cut like the kernel.
    factor = RANK * WIDTH * 4 * LAYERS // axes.get("pipe", 1)
    adapters = factor + factor // axes.get("model", 1)
    found = kdist.inspect(tuned(axes, 3, **options), ROWS).memory
    assert [one.parameters for one in found] == [KERNEL * LAYERS // 4 + adapters] * 4
    share = KERNEL // axes.get("model", 1)
    for one in found:
        # Of the chunk that runs and of the next; of a stage, its layers for a backward pass.
        assert one.gathered is not None
        assert share <= one.gathered <= 3 * share < LAYERS * share, found
        if mesh == "data4":  # a kernel with its adapter added, and the gradient of that
            assert one.activations is not None
            assert one.activations <= 3 * share, found


@pytest.mark.parametrize("mesh", ["data4", "data2_model2"])
def test_frozen_kernels_are_gathered_twice_and_nothing_else_is_sent(mesh: str) -> None:
    axes, options = MESHES[mesh]
    model = tuned(axes, 3, **options)
    plan, replicas = model.plan(), axes["data"]
    paths = [plan.weights[i].path for i in plan.frozen]
    assert paths == [f"dense_{i}/kernel" for i in range(LAYERS)]
    passes = [v for one in plan.gathers for v in one.weights]
    # What the forward pass ends with is still there for the backward pass; of the first layer no
    # gradient of the inputs is wanted.
    assert len(passes) == 2 * LAYERS - 2
    (gather,) = [one for one in plan.traffic() if one.what == "gather"]
    assert gather.nbytes == len(passes) * KERNEL * (replicas - 1)
    of_adapters = 2 * RANK * WIDTH * 4 * LAYERS
    (reduce,) = [one for one in plan.traffic() if one.what == "reduce"]
    assert reduce.nbytes == of_adapters * (replicas - 1)


def frozen(setting: Any = lambda layers: None, **options: Any) -> keras.Model:
    """Two layers that do not train before one that does, that has trained a batch."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, name=f"dense_{i}", trainable=False) for i in range(2)]
    head = keras.layers.Dense(4, name="head")
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, head], name="net")
    setting(layers)
    level = kdist.OptimizerConfig(level=3, threshold_kb=0)
    mesh = kdist.mesh(data=2)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, optimizer=level, **options))
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((ROWS, WIDTH)), np.ones((ROWS, 4)))
    return model


def gathered(model: keras.Model) -> list[list[str]]:
    """Paths of what each gather of a step brings of the layers that do not train."""
    plan = model.plan()
    paths = [plan.weights[i].path for i in plan.params]
    found = [[paths[v] for v in one.weights if "dense" in paths[v]] for one in plan.gathers]
    return [one for one in found if one]


def test_they_travel_together_as_fusion_says() -> None:
    apart, together = (frozen(fusion=kdist.FusionConfig(mode=m)) for m in ("none", "size"))
    both = [["net/dense_0/kernel", "net/dense_0/bias"], ["net/dense_1/kernel", "net/dense_1/bias"]]
    assert gathered(together) == both
    assert gathered(apart) == [[path] for one in both for path in one]
    # Ids count, too. Positions of `index` are of what trains.
    ids = frozen(lambda layers: kdist.set_comm_fusion(layers[0].bias, 0))
    assert [len(one) for one in gathered(ids)] == [1, 1, 2]
    index = kdist.FusionConfig(mode="index", index=(1,))
    assert [len(one) for one in gathered(frozen(fusion=index))] == [1, 1, 1, 1]


def test_levels_below_leave_them_whole() -> None:
    found = kdist.inspect(tuned({"data": 4}, 2), ROWS).memory
    adapters = 2 * RANK * WIDTH * 4 * LAYERS
    assert [one.parameters for one in found] == [KERNEL * LAYERS + adapters] * 4


def test_what_is_opted_out_stays_whole() -> None:
    model = frozen(lambda layers: kdist.set_parallel_optimizer(layers[0], False))
    placed = {one.path: one.gathered for one in model.plan().weights}
    assert not placed["net/dense_0/kernel"]
    assert placed["net/dense_1/kernel"]


def test_thawed_and_frozen_again() -> None:
    """As transfer learning does: a head first, then all of it, then the level is taken back."""
    model = tuned({"data": 2}, 3)
    before = [np.array(w) for w in model.get_weights()]
    for layer in model.layers[1:]:
        layer._kernel.trainable = True
    model.compile("sgd", "mse")
    batch = np.ones((ROWS, WIDTH), np.float32)
    model.train_on_batch(batch, batch)
    after = model.get_weights()
    assert not np.allclose(before[0], after[0])
    assert model.plan().frozen == ()
    kernels = [model.plan().weights[i] for i in model.plan().trainable]
    assert sum(one.gathered for one in kernels) == LAYERS
