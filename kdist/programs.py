"""Which form the model's pure functions take: whole, or in segments."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from kdist.mesh import Topology
from kdist.program import Program
from kdist.segment import cut, segment_limit
from kdist.segmented import SegmentedProgram, as_node, cuttable

import keras


def make_program(
    model: keras.Model,
    topology: Topology,
    segments: bool,
    sizes: Sequence[int],
    mean: bool,
    xla: bool,
    whole_loss: str,
) -> Program:
    """The model's pure functions.

    Args:
        model: The built and compiled model.
        topology: The mesh.
        segments: Whether the model is to be cut into segments, if it can be.
        sizes: Bytes of each trainable parameter.
        mean: See `Program`.
        xla: Compile segments with XLA.
        whole_loss: See `kdist.loss_terms.whole_loss`.
    """
    if not segments or one_segment(model, topology, whole_loss):
        return Program(model, mean)
    wrap = functools.partial(as_node, jit_compile=xla)
    return SegmentedProgram(model, mean, functools.partial(cut, limit=segment_limit(sizes)), wrap)


def one_segment(model: keras.Model, topology: Topology, whole_loss: str) -> str:
    """Why a model is one segment, "" if it can be cut."""
    reason = ""
    if topology.inner_size > 1:
        reason = "slices are DTensor meshes"
    elif model.run_eagerly:
        reason = "run_eagerly"
    elif whole_loss:
        reason = whole_loss
    elif not cuttable(model):
        reason = "not a Functional or Sequential model"
    return reason and f"{reason}: the model is one segment"
