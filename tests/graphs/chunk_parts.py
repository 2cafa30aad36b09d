"""A model's training pass in chunks, on one device."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kdist.dtensor.stitching import Stitcher
from kdist.dtensor.traced import as_program
from kdist.graphs.chunks import cut
from kdist.graphs.flat_function import FlatFunction, flat
from kdist.pipeline.work import each_alone
from kdist.program.program import Program
from kdist.runtime.chunk_run import ChunkedProgram, ChunkRun, chunk_work
from kdist.runtime.chunking import first_uses

import keras
import tensorflow as tf

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"


def in_chunks(model: keras.Model, x: Any, y: Any, cuts: Collection[int]) -> tuple[Any, ...]:
    """Loss, gradients (0 where there is none), outputs and masks of a training pass.

    Args:
        model: A compiled model.
        x: Its inputs.
        y: Targets.
        cuts: After how many parameters, in the order of their use, a chunk ends.
    """
    program = Program(model, True)
    function = FlatFunction(program.loss_and_gradients, seeds=1)
    one = tf.constant(1.0, tf.float64)
    params = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]
    carried = [tf.convert_to_tensor(v.value) for v in program.state.carried]
    shares = tf.ones([len(keras.tree.flatten(y))], tf.float64)

    def run() -> Any:
        arguments = (params, carried, (x, y, None), shares, one, one, one)
        traced = function.trace([arguments])
        made = as_program(traced.concrete)
        stitcher, names = Stitcher(made), [argument.name for argument in made.arguments]
        order = first_uses(traced.concrete, len(params))
        chunk_of = {names[p]: sum(c <= i for c in cuts) for i, p in enumerate(order)}
        chunks = cut(stitcher.graph, chunk_of, (), {names[len(flat(arguments)) - 1]})
        given = [[t] for t in (*flat(arguments), *traced.concrete.captured_inputs)]
        cutted = ChunkedProgram(stitcher, chunks, [[DEVICE]], [])
        work = chunk_work([cutted], {}, each_alone, keep=(), free=False, early=False)
        (found,) = ChunkRun([cutted], [given], work, lambda positions, gates: []).run()
        parts = {i: one[0] for i, one in found.items()}
        return tf.nest.map_structure(lambda leaf: leaf.value(parts), traced.structure)

    result = tf.function(run, autograph=False)()
    gradients = [tf.zeros_like(p) for p in params]
    for i, gradient in zip(program.trained.connected, result["gradients"], strict=True):
        gradients[i] = gradient
    return result["loss"], gradients, keras.tree.flatten(result["outputs"]), result["masks"]
