"""A model with a `call` of its own as a graph of one node, for a stage that is all of it."""

from __future__ import annotations

from typing import Any

from kdist._compat import keras_models
from kdist.config.pipeline import PipelineConfig
from kdist.sharding.mesh import Topology
from kdist.stages.stages import StagedModel

import keras


def as_one_stage(
    model: keras.Model, example: Any, topology: Topology, whole_loss: str
) -> StagedModel | str:
    """A model as one stage, or why it cannot be one.

    Args:
        model: A built model.
        example: See `as_functional`.
        topology: The mesh.
        whole_loss: Why its loss is one over the whole batch.
    """
    try:
        if keras_models.functional_of(model) is None:
            model = as_functional(model, example)
        pipeline = PipelineConfig(micro_batches=1)
        return StagedModel.of(model, pipeline, topology, whole_loss=whole_loss, settings=False)
    except ValueError as reason:
        return str(reason).split(". ")[0]


def as_functional(model: keras.Model, example: Any) -> Any:
    """A `Functional` whose only layer is the model.

    Args:
        model: A built model.
        example: Specs of its input, as the first batch showed them.

    Raises:
        ValueError: No batch has been seen, or the model cannot be a node.
    """
    if example is None:
        raise ValueError("its inputs are known with the first batch")
    leaves = keras.tree.flatten(example)
    if not leaves or not all(isinstance(one, keras.KerasTensor) for one in leaves):
        raise ValueError("inputs are left out, or no plain tensors")
    if any(one.sparse or one.ragged for one in leaves):
        raise ValueError("inputs are sparse or ragged")
    if model.activity_regularizer is not None:
        raise ValueError("the model has an activity regularizer of its own")
    # Keras warns of inputs in a dict whose names are not its keys.
    names = list(example) if isinstance(example, dict) else []
    alone = len(names) == len(leaves)
    given = [
        keras.Input(
            batch_shape=(None, *one.shape[1:]), dtype=one.dtype, name=name if alone else None
        )
        for one, name in zip(leaves, sorted(names) if alone else [None] * len(leaves))
    ]
    inputs = keras.tree.pack_sequence_as(example, given)
    try:
        return keras.Model(inputs, model(inputs))
    except Exception as error:  # whatever the user's `call` raises for symbolic inputs
        raise ValueError(f"its `call` takes no symbolic inputs: {error}") from error
