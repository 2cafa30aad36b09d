"""What a step of a pipeline has in memory, by the allocator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kdist
from kdist.pipeline import live_formula

import keras
import numpy as np
import pytest

PEAK = """
import sys
import kdist
kdist.init(cpu_devices=4)
import tensorflow as tf
from tests.runtime.pipeline_parts import chain

model = kdist.PipelineModel(chain(8, 256), 4, 8, sys.argv[1])
model.compile("sgd", "mse")
x = tf.zeros((8192, 256))
for _ in range(2):
    model.train_on_batch(x, x)
before = tf.config.experimental.get_memory_info("CPU:0")["current"]
tf.config.experimental.reset_memory_stats("CPU:0")
model.train_on_batch(x, x)
print("peak", tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
"""


def peak(argument: str, program: str = PEAK) -> float:
    """Bytes that a step needs beyond what is there between steps.

    In a process of its own: TensorFlow counts them only while oneDNN is on, which it is not by
    itself on every processor.
    """
    done = subprocess.run(
        [sys.executable, "-c", program, argument],
        env=os.environ | {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout.rpartition("peak ")[2])


GATHERED = """
import sys
import kdist
kdist.init(cpu_devices=4)
import keras
import tensorflow as tf

x = inputs = keras.Input((1024,))
for i in range(16):
    x = keras.layers.Dense(1024, "tanh", use_bias=False)(x)
config = kdist.ParallelConfig(
    mesh=kdist.mesh(pipe=2, data=2),
    optimizer=kdist.OptimizerConfig(level=3, threshold_kb=0, keep_gathered=sys.argv[1] == "keep"),
    pipeline=kdist.PipelineConfig(micro_batches=2, schedule="interleaved", chunks=4),
)
model = kdist.parallelize(keras.Model(inputs, x), config)
model.compile("sgd", "mse")
x = tf.zeros((8, 1024))
peaks = []
for _ in range(9):
    model.train_on_batch(x, x)
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    model.train_on_batch(x, x)
    peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
# Four devices share one allocator: what happens on them at a time differs from step to step.
print(sorted(peaks))
print("peak", sorted(peaks)[4])
"""


@pytest.mark.long
def test_parameters_gathered_for_one_chunk_at_a_time_take_less() -> None:
    # A quarter of a stage's parameters instead of all; the sums of gradients are there in both.
    assert peak("free", GATHERED) < 0.75 * peak("keep", GATHERED)


@pytest.mark.long
def test_1f1b_keeps_less_than_gpipe_by_the_formula() -> None:
    live = live_formula("1f1b", 4, 8)
    assert live is not None
    activations = 2 * 8192 // 8 * 256 * 4  # of two layers, for one micro-batch, float32
    expected = sum(8 - kept for kept in live) * activations
    assert peak("gpipe") - peak("1f1b") == pytest.approx(expected, rel=0.2)


def of_activations(micro_batches: int, **axes: int) -> int:
    """The most that a device has, by the executed graph; all micro-batches are of two rows."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((16,))
    for i in range(6):
        x = keras.layers.Dense(16, "gelu", name=f"{'up' if i % 2 else 'down'}_{i}")(x)
    layouts = {"up.*kernel": (None, "model"), "down.*kernel": ("model", None)}
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(pipe=2, **axes),
        layout_map=layouts if axes else None,
        pipeline=kdist.PipelineConfig(micro_batches=micro_batches, schedule="1f1b"),
    )
    model = kdist.parallelize(keras.Model(inputs, x), config)
    model.compile("sgd", "mse")
    rows = 2 * micro_batches
    model.train_on_batch(np.zeros((rows, 16), "f4"), np.zeros((rows, 16), "f4"))
    found = [one.activations for one in kdist.inspect(model, rows).memory]
    assert None not in found
    return max(found)  # type: ignore[type-var]


@pytest.mark.parametrize("axes", [{}, {"model": 2}], ids=str)
def test_more_micro_batches_of_one_size_take_no_more(axes: dict[str, int]) -> None:
    """What a micro-batch made inside is gone, and its gradients are added, before the next one.

    Stages of several devices are part of the step's graph, so that nothing but edges says so. What
    grows are the rows that come in and go out.
    """
    given = 2 * 16 * 4 * 3  # inputs, targets, outputs
    assert of_activations(8, **axes) - of_activations(4, **axes) <= 4 * given
