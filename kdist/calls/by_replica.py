"""A layer's call by plain operations, replica by replica, where tapes differentiate it again.

A call over the mesh (`kdist.calls.over_mesh`) has one gradient. A penalty on gradients, an equation
of derivatives, and a jacobian ask for gradients of that one. So each replica computes its rows as
Keras does, on one of its devices, and TensorFlow's own gradients do the rest, on that one too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist._compat.backward_places import placed
from kdist._compat.pass_through import PassesThrough
from kdist.calls.anchors import stand_in
from kdist.calls.arguments import CallArguments
from kdist.calls.functions import CallFunctions
from kdist.program.batch import SplitBatch, join
from kdist.program.blocks import named
from kdist.program.logits import logits_of, with_logits
from kdist.program.program import attach_masks
from kdist.rows.model_study import ModelStudy
from kdist.runtime.metrics import join_masks
from kdist.storage.fetched_table import is_fetched

import keras
import tensorflow as tf


class NotByReplica(PassesThrough):
    """A call cannot be computed so, and runs on one device."""


def refuse_others(functions: CallFunctions, study: ModelStudy, why: str) -> None:
    """Refuses a call that would compute other numbers so.

    Args:
        functions: The call's over the mesh, which show what it reads and writes.
        study: Where its rows meet.
        why: It is to be computed so.

    Raises:
        NotByReplica: It would; says why.
    """
    if any(is_fetched(v) for v in functions.variables):
        raise NotByReplica(f"{why}, and rows of a table on the host, or split by hand")
    if functions.adders:
        raise NotByReplica(f"{why}, and added losses")
    if written := [functions.program.state.written[i].path for i in functions.updated]:
        raise NotByReplica(f"{why}, and state that it writes ({', '.join(written[:3])})")
    if study.findings or study.mixings or study.statistics or study.failed:
        raise NotByReplica(f"{why}, and rows of the batch that meet")


def by_replica(
    functions: CallFunctions, call: Callable, given: CallArguments, batch: SplitBatch
) -> Any:
    """Calls a layer on each replica's rows.

    Args:
        functions: The call's over the mesh.
        call: The layer's `call`.
        given: What it is called with.
        batch: The replicas' rows of that, with their masks and logits.

    Returns:
        What the layer returns for the whole batch.
    """
    program, backend, variables = functions.program, functions.backend, functions.variables
    trained = sum(i < len(program.state.trainable) for i in functions.params)
    outputs, marks = [], []
    for s, ((rows, masks), _, _) in enumerate(batch.parts):
        device = str(backend.devices(s)[0])
        with placed(device):
            values = [backend.read(v, s).whole(device) for v in variables]
            values[:trained] = map(_known_to_tapes, variables[:trained], values[:trained])
            scope = program.scope_of(list(zip(variables, values)), variables[:trained])
            args, kwargs = given.filled(rows, masks, given.shared)
            with scope, named(None):
                made = call(*args, **kwargs)
            outputs.append(keras.tree.map_structure(tf.convert_to_tensor, made))
            marks.append(with_logits(program.masks_of(made), logits_of(made)))
    return attach_masks(join(outputs, batch.counts), join_masks(marks, batch))


def _known_to_tapes(variable: keras.Variable, value: Any) -> Any:
    """A replica's value of a weight; tapes take its gradient for one of the weight."""

    @tf.custom_gradient
    def read(_: Any) -> tuple[Any, Callable]:
        return tf.identity(value), lambda gradient: gradient

    return read(stand_in(variable))
