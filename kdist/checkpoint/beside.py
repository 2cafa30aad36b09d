"""Optimizers that a step of the user's own applies, beside the one that its model is compiled with.

The compiled one too, where it is for some of the trainable weights.
A model has them as attributes (`self.d_optimizer`), or in lists and dicts that are, and their names
are how a checkpoint knows them. Each updates some of the model's weights, which is known once it
has been applied: so which they are is saved too, for a model that has not trained yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdist._compat import keras_optimizers
from kdist.api.attached import parallel_of
from kdist.checkpoint.directory import read_file
from kdist.checkpoint.manifest import Manifest
from kdist.checkpoint.matching import match
from kdist.display.warn import warn
from kdist.optimizer.wrappers import optimizers_of

import keras

FILE = "optimizers.json"
"""Of a checkpoint: by name of the attribute, numbers of the arrays of the weights it updates."""

COMPILED = "optimizer"
"""The name of the compiled one."""

GROUP = "optimizer."
"""How the names of the groups of their state begin."""


def beside(model: keras.Model) -> dict[str, Any]:
    """Optimizers that are attributes of a model, built, and not what it is compiled with.

    Those that update weights of others are left out.
    """
    return {name: one for name, one in _built(model).items() if not _of_others(one, model)}


def _built(model: keras.Model) -> dict[str, Any]:
    compiled = model.optimizer if model.compiled else None
    every = optimizers_of(model).items()
    return {name: one for name, one in every if one is not compiled and one.built}


def _compiled_for_some(model: keras.Model) -> dict[str, Any]:
    """The compiled optimizer, under its name, if it updates some of the trainable weights alone."""
    optimizer = model.optimizer if model.compiled else None
    if optimizer is None or not optimizer.built or _of_others(optimizer, model):
        return {}
    updated = {id(v) for v in keras_optimizers.updated_by(optimizer)}
    every = all(id(v) in updated for v in model.trainable_variables)
    return {} if every else {COMPILED: optimizer}


def _of_others(optimizer: Any, model: keras.Model) -> list[str]:
    """What an optimizer updates that is no weight of a model."""
    known = {id(v) for v in model.variables}
    return [v.path for v in keras_optimizers.updated_by(optimizer) if id(v) not in known]


def steps_of(model: keras.Model) -> int:
    """How often a model's optimizers have been applied, the most of them."""
    every = optimizers_of(model).values()
    return max((int(one.iterations) for one in every), default=0)


def to_bytes(model: keras.Model, weights: Sequence[tuple[str, Any]]) -> bytes:
    """What `FILE` says; empty if there are no such optimizers.

    Args:
        model: The model.
        weights: Its variables, in the order of the checkpoint's arrays.
    """
    number = {id(v): n for n, (_, v) in enumerate(weights)}
    found = {
        name: [number[id(v)] for v in keras_optimizers.updated_by(one)]
        for name, one in {**_compiled_for_some(model), **beside(model)}.items()
    }
    return json.dumps(found).encode() if found else b""


def tell_left_out(model: keras.Model) -> None:
    """Says, once, which optimizers a checkpoint does not have."""
    parallel = parallel_of(model)
    say = warn if parallel is None else parallel.warn_once
    for name, one in _built(model).items():
        if others := _of_others(one, model):
            say(
                "Checkpoints have the state of optimizers of the model's own weights. Make what "
                "this one updates part of the model (a layer, or add_weight), or save it and its "
                f"optimizer apart. Received: {name} = {type(one).__name__} {one.name!r}, which "
                f"updates {others[:8]}"
            )
    if parallel is None:
        return
    known = {id(one) for one in optimizers_of(model).values()}
    for optimizer in parallel.own_updates.beside:
        if id(optimizer) not in known:
            parallel.warn_once(
                "Checkpoints have the state of the compiled optimizer, and of those that are "
                "attributes of the model, or in a list or dict that is one. Make this one an "
                "attribute, or its state begins anew: "
                f"model.second = optimizer. Received: {type(optimizer).__name__} "
                f"{optimizer.name!r}, applied to weights of {model.name!r}"
            )


def build(
    model: keras.Model, folder: Path, manifest: Manifest, weights: Sequence[tuple[str, Any]]
) -> None:
    """Builds the optimizers that a checkpoint has state of, where the model has not yet.

    Args:
        model: The model.
        folder: Of the checkpoint.
        manifest: Its manifest.
        weights: The model's variables, with their paths.

    Raises:
        DamagedError: The file is damaged.
    """
    if FILE not in manifest.files:
        return
    saved: Mapping[str, list[int]] = json.loads(read_file(folder, manifest, FILE))
    arrays = manifest.groups["model"]
    wanted = [(path, tuple(int(n) for n in v.shape)) for path, v in weights]
    found = match(arrays, wanted, "model")
    variable = {id(array): v for array, (_, v) in zip(found, weights)}
    optimizers, parallel = optimizers_of(model), parallel_of(model)
    for name, numbers in saved.items():
        if name not in optimizers and name == COMPILED:
            warn(
                "The checkpoint has the state of the compiled optimizer, and the model is not "
                "compiled with one: it is left out. Compile the model before restoring."
            )
        elif name not in optimizers:
            warn(
                f"The checkpoint has the state of an optimizer {name!r}, which the model does not "
                "have as an attribute: it is left out."
            )
        elif not optimizers[name].built:
            updated = [variable[id(arrays[n])] for n in numbers]
            if parallel is not None and not parallel.waits_for_batch:
                parallel.prepare_beside(optimizers[name], updated)
            else:
                with keras_optimizers.build_scope(optimizers[name]):
                    optimizers[name].build(updated)
