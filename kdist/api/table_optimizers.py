"""Optimizers of single tables, beside the model's: one `MultiOptimizer` of all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kdist._compat import keras_models, keras_optimizers
from kdist.layers.distributed_embedding import DistributedEmbedding
from kdist.layers.lazy import again
from kdist.optimizer.wrappers import unwrap

import keras


def _tables(model: keras.Model) -> Iterator[tuple[keras.layers.Embedding, str, Any]]:
    """Tables with an optimizer of their own: the embedding, the end of its path, the optimizer."""
    for layer in keras_models.flat_layers(model):
        if isinstance(layer, DistributedEmbedding):
            for table in layer.table_configs:
                if table.optimizer is not None:
                    yield layer.tables[table.name], f"{layer.name}/{table.name}", table.optimizer


def with_table_optimizers(model: keras.Model, optimizer: Any) -> Any:
    """What updates a model: what `compile` was given, and the optimizers of its tables.

    Args:
        model: Whose `DistributedEmbedding` layers say which tables have an optimizer.
        optimizer: As `compile` takes it.

    Returns:
        `optimizer` if no table has one, or if it is a `MultiOptimizer` already; else a
        `MultiOptimizer` of copies of the tables' optimizers, of which `optimizer` is the default. A
        wrapper (`LossScaleOptimizer`, `ShardedOptimizer`) stays, with that inside. A table's own
        optimizer updates all that is trained of the table: with LoRA its factors.

    Raises:
        ValueError: `optimizer` is built.
    """
    tables = list(_tables(model))
    if not tables or optimizer is None:
        return optimizer
    given = keras.optimizers.get(optimizer)
    inner = unwrap(given).inner
    if isinstance(inner, keras.optimizers.MultiOptimizer):
        return given
    if given.built:
        raise ValueError(
            "Some tables have an optimizer of their own, and the one of all other weights is built "
            "with them. Give compile() a new one. "
            f"Received: optimizer={given.name!r}, tables {[name for _, name, _ in tables]}"
        )
    rules = keras.optimizers.OptimizerMap(inner)
    for _, name, own in tables:
        rules[rf"(.*/)?{re.escape(name)}/[^/]+"] = again(own)
    several = keras.optimizers.MultiOptimizer(rules)
    wrapper = given
    while wrapper is not inner and wrapper.inner_optimizer is not inner:
        wrapper = wrapper.inner_optimizer
    if wrapper is inner:
        return several
    wrapper.inner_optimizer = several
    return given


def check_table_optimizers(model: keras.Model) -> None:
    """Refuses to train tables by another optimizer than theirs.

    Raises:
        ValueError: What the model, whose optimizer is built, was compiled with is not of the class
            that a table asks for.
    """
    inner = unwrap(model.optimizer).inner
    several = isinstance(inner, keras.optimizers.MultiOptimizer)
    for layer, name, own in _tables(model):
        for variable in layer.trainable_variables:
            found = keras_optimizers.member_optimizer(inner, variable) if several else inner
            if several and type(found) is type(own):
                continue
            raise ValueError(
                "A table with an optimizer of its own is updated by that. model.compile(...) takes "
                "it up, after kdist.parallelize: compile the model then. A MultiOptimizer names "
                "an optimizer of that class for the table, and for its factors of LoRA; or leave "
                f"`optimizer` out of its TableConfig. Received: {type(found).__name__} for "
                f"{variable.path!r} of table {name!r}, which asks for {type(own).__name__}"
            )


def table_notes(model: keras.Model) -> list[str]:
    """What a plan says of the optimizers of tables."""
    return [
        f"table {name!r} is updated by {type(own).__name__}"
        if layer.trainable_variables
        else f"table {name!r} has nothing to train: its {type(own).__name__} updates nothing"
        for layer, name, own in _tables(model)
    ]
