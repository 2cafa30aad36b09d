"""The largest single thing that is made while weights and slots are born: a shard and a chunk."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.storage import recipes, unborn

import keras
import numpy as np
import pytest
from tensorflow.python.framework import op_callbacks

WIDTH, PARTS, CHUNK = 256, 4, 16 << 10
WHOLE = 4 * WIDTH * WIDTH
# Each weight in parts, though there are as many alike as devices.
CONFIG: dict[str, Any] = {"level": 3, "threshold_kb": 0, "partition": "slice"}


def build() -> keras.Model:
    keras.utils.set_random_seed(4)
    layers = [
        keras.layers.Dense(WIDTH, kernel_initializer=kind, name=f"of_{kind}")
        for kind in ("glorot_uniform", "truncated_normal", "ones", "identity")
    ]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


def born() -> keras.Model:
    mesh = kdist.mesh(data=PARTS)
    with kdist.scope(kdist.ParallelConfig(mesh=mesh, optimizer=kdist.OptimizerConfig(**CONFIG))):
        model = build()
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def largest(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of the largest result of an operation, or array to be filled, meanwhile."""
    sizes = [0]

    def note(kind: str, inputs: Any, attrs: Any, outputs: Any, *_: Any, **__: Any) -> None:
        # Reading a variable, and taking over an array, make nothing.
        if kind not in ("ReadVariableOp", "Bitcast", "Identity"):
            sizes.extend(one.numpy().nbytes for one in outputs if one.dtype.is_numpy_compatible)

    own = unborn.aligned

    def aligned(*given: Any) -> np.ndarray:
        made = own(*given)
        sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(unborn, "aligned", aligned)
    op_callbacks.add_op_callback(note)
    try:
        work()
    finally:
        op_callbacks.clear_op_callbacks()
    return max(sizes)


def parts(model: keras.Model) -> None:
    """Makes all of them."""
    attached(model).prepare_optimizer()
    for entry in attached(model).entries.values():
        entry.stored_parts()


def test_no_more_than_a_shard_and_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain build shows that what is whole is seen."""
    monkeypatch.setattr(recipes, "CHUNK", CHUNK)
    made: list[keras.Model] = []
    assert largest(lambda: parts(made.append(born()) or made[0]), monkeypatch) <= (
        WHOLE // PARTS + CHUNK
    )
    kdist.checkpoint.save(made[0], tmp_path)
    again = born()
    read = largest(lambda: kdist.checkpoint.restore(again, tmp_path), monkeypatch)
    assert 0 < read <= WHOLE // PARTS + CHUNK
    assert largest(build, monkeypatch) >= WHOLE


@pytest.mark.parametrize("kind", ["glorot_uniform", "truncated_normal"])
def test_two_chunks_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn, and what it is scaled to; TensorFlow's own pool takes more, by powers of 2."""
    monkeypatch.setattr(recipes, "CHUNK", CHUNK)
    with kdist.scope(kdist.ParallelConfig(mesh=kdist.mesh(data=PARTS))):
        keras.utils.set_random_seed(4)
        layer = keras.layers.Dense(WIDTH, use_bias=False, kernel_initializer=kind)
        model = keras.Sequential([keras.Input((WIDTH,)), layer])
    alive: list[tuple[Any, int, int]] = []
    found = [0]

    def note(kind: str, inputs: Any, attrs: Any, outputs: Any, *_: Any, **__: Any) -> None:
        if kind in ("ReadVariableOp", "Bitcast", "Identity"):
            return  # of the parts
        for one in outputs:
            if one.dtype.is_numpy_compatible:
                array = np.asarray(one)
                alive.append((weakref.ref(one), array.ctypes.data, array.nbytes))
        alive[:] = [one for one in alive if one[0]() is not None]
        # By address: some are views of others.
        found.append(sum({address: size for _, address, size in alive}.values()))

    op_callbacks.add_op_callback(note)
    try:
        attached(model).entries[id(layer.kernel)].stored_parts()
    finally:
        op_callbacks.clear_op_callbacks()
    assert CHUNK <= max(found) < 2 * CHUNK + 1024
