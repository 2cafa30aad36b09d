"""What tensors cut along the sequence send, and how much memory they take."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import kdist

import keras
import numpy as np
import pytest

import gpt_model

SIZES = gpt_model.GPTSizes(vocabulary=32, length=16, width=16, depth=3, heads=4)


def trained(
    axes: dict[str, int],
    sequence: bool,
    sizes: gpt_model.GPTSizes = SIZES,
    cuts: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """What `kdist.inspect` finds of a model that has trained a step."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    model = gpt_model.build(sizes)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=gpt_model.layout_map() | (cuts or {}),
        sequence_parallel=sequence,
        **options,
    )
    kdist.parallelize(model, config)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, (8, sizes.length + 1))
    model.train_on_batch(tokens[:, :-1], tokens[:, 1:])
    return kdist.inspect(model, 8)


def counted(found: Any) -> dict[tuple[str, str], int]:
    """Collectives of more than some vectors, by kind and phase."""
    large = [one for one in found.collectives if np.prod(one.shape) > 4 * SIZES.width]
    return dict(collections.Counter((one.kind, one.phase) for one in large))


def test_sums_are_scattered_and_values_gathered() -> None:
    axes = {"data": 2, "model": 4}
    whole, along = trained(axes, sequence=False), trained(axes, sequence=True)
    depth = SIZES.depth
    assert counted(whole) == {
        ("all-reduce", "forward"): 2 * depth,
        ("all-reduce", "backward"): 2 * depth + 1,  # of the head
    }
    # One sum of query, key and value. A whole table gives all tokens, which the first norm takes:
    # what comes back to it is no scattered sum.
    assert counted(along) == {
        ("reduce-scatter", "forward"): 2 * depth,
        ("reduce-scatter", "backward"): 2 * depth,
        ("all-reduce", "backward"): 1,
        ("all-gather", "forward"): 2 * depth,
        ("all-gather", "backward"): 2 * depth + 2,  # of the positions, and their table
    }
    activation = 4 * SIZES.length * SIZES.width * 4  # bytes, of a replica's four rows
    sent = {one.bytes for one in along.collectives if one.kind == "reduce-scatter"}
    assert sent == {activation}
    sizes = [max(one.activations or 0 for one in found.memory) for found in (along, whole)]
    assert 0 < sizes[0] < 0.75 * sizes[1], sizes


def test_look_ups_of_a_cut_table_are_scattered_too() -> None:
    sizes = dataclasses.replace(SIZES, vocabulary=512)  # more than are looked up
    table = {".*embedding/embeddings": ("model", None)}
    along = trained({"data": 2, "model": 4}, sequence=True, sizes=sizes, cuts=table)
    depth = SIZES.depth
    assert counted(along) == {
        ("reduce-scatter", "forward"): 2 * depth + 1,
        ("reduce-scatter", "backward"): 2 * depth + 1,
        ("all-gather", "forward"): 2 * depth + 1,
        ("all-gather", "backward"): 2 * depth + 2,  # of the positions' table
    }


class Block(keras.layers.Layer):
    """A feed-forward layer as one block."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.up = keras.layers.Dense(64, "gelu", name="up")
        self.down = keras.layers.Dense(16, name="down")

    def call(self, x: Any) -> Any:
        return x + self.down(self.up(self.norm(x)))


def feed_forward(length: int | None) -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((length, 16))
    x = keras.layers.Dense(16, name="start")(inputs)
    for i in range(3):
        x = Block(f"block_{i}")(x)
    return keras.Model(inputs, x)


LAYOUTS: dict[str, Any] = {
    ".*up/kernel": (None, "model"),
    ".*down/kernel": ("model", None),
    ".*(start|down)/output": (None, "model", None),
}


@pytest.mark.parametrize("repeat", [None, True, False])
def test_blocks_repeat_their_collectives_or_keep_what_these_gave(repeat: bool | None) -> None:
    options: dict[str, Any] = {}
    if repeat is not None:
        options["recompute"] = kdist.RecomputeConfig(layers=["block_.*"], mp_comm_recompute=repeat)
    plain, model = feed_forward(16), feed_forward(16)
    mesh = kdist.mesh(data=2, model=2)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, layout_map=LAYOUTS, **options))
    data = np.random.default_rng(0).normal(size=(8, 16, 16))
    losses = []
    for one in (plain, model):
        one.compile("sgd", "mse")
        losses.append([one.train_on_batch(data, data) for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert counted(kdist.inspect(model, 8)) == {
        ("all-gather", "forward"): 3,
        ("reduce-scatter", "forward"): 3,
        # Gradients of what was scattered, of the first layer's output too; what runs again.
        ("all-gather", "backward"): 4 + 3 * bool(repeat),
        ("reduce-scatter", "backward"): 3,
    }


def test_sequences_of_many_lengths() -> None:
    """Programs for all sizes, with parts that begin where the length says; some do not divide."""
    plain, model = feed_forward(None), feed_forward(None)
    mesh = kdist.mesh(data=2, model=2)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, layout_map=LAYOUTS))
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(8, length, 16)) for length in (8, 12, 20, 16, 7, 10)]
    losses = []
    for one in (plain, model):
        one.compile("sgd", "mse")
        losses.append([one.train_on_batch(x, x) for x in batches])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
