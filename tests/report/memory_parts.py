"""A model whose memory is known by formula, and what an analysis of its step says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.graphs.live_tensors import LiveTensors, Op
from kdist.report import memory

import keras
import numpy as np

REPLICAS = 4
WIDTH, LAYERS, ROWS = 16, 6, 8
KERNEL, BIAS = 4 * WIDTH * WIDTH, 4 * WIDTH
COUNTERS = 32
"""Bytes of the scalars that may be there beside: steps, learning rates."""
CUT, WHOLE = LAYERS * KERNEL, LAYERS * BIAS
# A device's own step counter (int64) and learning rate (float32).
SCALARS = 8 + 4


def build(layers: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((WIDTH,))
    for _ in range(layers):
        x = keras.layers.Dense(WIDTH, "tanh")(x)
    return keras.Model(inputs, x)


def prepared(
    level: int,
    replicas: int = REPLICAS,
    layers: int = LAYERS,
    bucket_bytes: int = KERNEL,
    make: Callable[[], keras.Model] | None = None,
    mesh: Any = None,
    layout_map: Any = None,
    pipeline: Any = None,
    **options: Any,
) -> keras.Model:
    """A model that is about to train: all there is to its step, without having run it."""
    spread = kdist.OptimizerConfig(level=level, threshold_kb=KERNEL / 1024, **options)
    # A bucket is a kernel: a model so small would travel in one or two.
    fusion = kdist.FusionConfig(mode="size", size_mb=bucket_bytes / 2**20)
    config = kdist.ParallelConfig(
        mesh=mesh or kdist.mesh(data=replicas),
        optimizer=spread,
        fusion=fusion,
        layout_map=layout_map or {},
        pipeline=pipeline,
    )
    model = kdist.parallelize(make() if make else build(layers), config)
    model.compile("adam", "mse")
    batch = np.zeros((ROWS, WIDTH), np.float32)
    attached(model).prepare("train", (batch, batch, None))
    return model


def analysed(model: keras.Model) -> LiveTensors:
    found = memory.analyse(attached(model), ROWS)
    assert isinstance(found, LiveTensors)
    return found


def chunk(model: keras.Model) -> int:
    """Bytes of the parameters of the largest chunk; of a step that has been traced."""
    chunks = attached(model).plain_step.runner.chunks
    sizes: Counter[int] = Counter()
    for position, number in chunks.chunk_of.items():
        sizes[number] += 4 * math.prod(chunks.entries[position].variable.shape)
    return max(sizes.values())


def bucket(model: keras.Model) -> int:
    """Bytes of the largest bucket; a kernel of one owner is none, but travels like one."""
    update = attached(model).update
    assert update is not None
    sizes = [4 * sum(math.prod(s) for s in one.shapes) for one in update.jobs.buckets]
    return max([*sizes, KERNEL])


def most(live: LiveTensors, *kinds: Any) -> int:
    return max(live.peak(f"/device:CPU:{n}", kinds).nbytes for n in range(REPLICAS))


def gradients_at_level_2(live: LiveTensors, model: keras.Model) -> bool:
    """Own shards, the chunk at work, and a bucket in flight."""
    allowed = CUT / REPLICAS + WHOLE + chunk(model) + bucket(model)
    return most(live, "gradient") <= allowed


def values_at_level_2(live: LiveTensors, model: keras.Model) -> bool:
    """New values of the bucket that arrives, and of one in flight."""
    return most(live, "gathered") <= 2 * bucket(model)


def parameters_at_level_3(live: LiveTensors, model: keras.Model) -> bool:
    """Those of the chunk at work, and of one in flight."""
    return most(live, "gathered") <= 2 * chunk(model)


def with_edges(
    live: LiveTensors, change: Callable[[Op], Op], shared_memory: bool = True
) -> LiveTensors:
    """The same step with other control edges."""
    kinds = live._kinds
    gradients = [o for o, kind in kinds.items() if kind == "gradient"]
    return LiveTensors(
        map(change, live.ops.values()),
        gradients,
        live.parameters,
        writes=live.writes,
        shared_memory=shared_memory,
    )
