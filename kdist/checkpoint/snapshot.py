"""A model's whole state, as groups of variables; copied to the host, or read back from files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdist._compat import keras_optimizers
from kdist._compat.version import VERSION
from kdist.api.attached import parallel_of
from kdist.checkpoint import beside, shares, unsent
from kdist.checkpoint.directory import read_files
from kdist.checkpoint.keras_description import ASSETS, FILE, VALUES, KerasDescription, KnownPlaces
from kdist.checkpoint.layer_files import LayerFiles
from kdist.checkpoint.manifest import STORE, CheckpointError, Manifest, SavedArray
from kdist.checkpoint.matching import match
from kdist.checkpoint.store import Reader
from kdist.checkpoint.variables import Boxes, Written, in_host_memory, one_part, restore, saved
from kdist.checkpoint.writer import Snapshot
from kdist.display.warn import warn

import keras
import numpy as np

MODEL, OPTIMIZER, METRICS, COMPRESSION = "model", "optimizer", "metrics", "compression"
CALLBACKS = "callbacks"
"""Groups of a checkpoint."""

Named = Sequence[tuple[str, Any]]
"""Variables with their paths."""


def groups_of(model: keras.Model) -> dict[str, Named]:
    """The state of a model that trains on: its variables, by group, in Keras's order.

    Args:
        model: Built; parallelized or plain.

    Returns:
        Weights, statistics and seeds; if it is compiled and has trained, the optimizer's
        variables, those of optimizers beside it, the metrics' ones, and what compression of
        gradients has not sent yet.
    """
    metrics = list(model.metrics_variables)
    apart = {id(v) for v in metrics}
    own = {id(v): v for v in model.variables if id(v) not in apart}
    groups: dict[str, Named] = {MODEL: [(v.path, v) for v in own.values()]}
    optimizer = model.optimizer if model.compiled else None
    if optimizer is not None and optimizer.built:
        groups[OPTIMIZER] = [(v.path, v) for v in optimizer.variables]
    for name, one in beside.beside(model).items():
        groups[beside.GROUP + name] = [(v.path, v) for v in one.variables]
    if metrics:
        groups[METRICS] = [(v.path, v) for v in metrics]
    if kept := _kept_by_compression(model):
        groups[COMPRESSION] = kept
    return groups


def _kept_by_compression(model: keras.Model) -> Named:
    parallel = parallel_of(model)
    if parallel is None:
        return []
    position = {id(v): n for n, v in enumerate(model.trainable_variables)}
    found = []
    for (variable, start), state in parallel.low_rank.items():
        if variable not in position:  # has been frozen since: nothing of it is sent any more
            continue
        for name in ("q", "errors", "steps"):
            for s, one in getattr(state, name).items():
                place = f"{position[variable]}{list(start)}"
                found.append((f"{place}/{name}/slice{s}", one))
    return sorted(found, key=lambda one: one[0])


def snapshot(
    model: keras.Model,
    step: int,
    progress: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    arrays: Sequence[np.ndarray] = (),
    copied: bool = True,
    known: KnownPlaces | None = None,
    directory: Path | None = None,
) -> Snapshot:
    """Takes a model's state to host memory: each part once, from a device that holds it.

    What lies in other processes stays there, and will be written there.

    Args:
        model: Built; parallelized or plain.
        step: Training steps done.
        progress: See `Manifest`.
        files: Further files.
        arrays: Further arrays, those that callbacks keep.
        copied: Whether it is to stay as it is while training goes on. Otherwise what is in host
            memory already is written from where it is.
        known: What one snapshot after the other has in common.
        directory: Where it will be written; None to take all into this process.
    """
    beside.tell_left_out(model)
    variables_of = groups_of(model)
    writing = frozenset() if directory is None else shares.writers(directory)

    def store_of(one: Written) -> str:
        return shares.store_of(one.process) if writing and one.process in writing else STORE

    groups: dict[str, tuple[SavedArray, ...]] = {}
    found: dict[str, list[Written]] = {}
    for group, named in variables_of.items():
        described = [saved(f"{group}/{n}", Boxes.of(*one), store_of) for n, one in enumerate(named)]
        groups[group] = tuple(array for array, _ in described)
        for one in itertools.chain.from_iterable(written for _, written in described):
            found.setdefault(one.part.store, []).append(one)
    parts = in_host_memory(found.pop(STORE, ()), copied)
    others = [shares.RemoteShare(some[0].process, some, copied) for some in found.values()]
    description, values, assets = KerasDescription.of(model, variables_of, known)
    for group, further in ((CALLBACKS, arrays), (VALUES, values)):
        if further:
            kept = [one_part(f"{group}/{n}", array) for n, array in enumerate(further)]
            groups[group] = tuple(array for array, _ in kept)
            parts += [part for _, part in kept]
    manifest = Manifest(step, groups, dict(progress or {}), made_by=VERSION)
    of_optimizers = beside.to_bytes(model, variables_of[MODEL])
    more = {ASSETS: assets, beside.FILE: of_optimizers}
    own = {FILE: description.to_bytes(), **{name: data for name, data in more.items() if data}}
    return Snapshot(manifest, parts, {**own, **(files or {})}, others)


def kept_arrays(folder: Path, manifest: Manifest) -> list[np.ndarray]:
    """What `snapshot` got as `arrays`."""
    reader = Reader(folder)
    return [reader.read(one) for one in manifest.groups.get(CALLBACKS, ())]


def load(model: keras.Model, folder: Path, manifest: Manifest, within_epoch: bool = False) -> None:
    """Reads a checkpoint into a model: what each of its devices needs, and no more.

    Args:
        model: Built; parallelized or plain. Its optimizer is built if the checkpoint has state of
            one.
        folder: Of the checkpoint.
        manifest: Its manifest.
        within_epoch: Whether metrics go on too; Keras begins them anew at every epoch.

    Raises:
        CheckpointError: The checkpoint is of another model.
        DamagedError: Files are missing or damaged; the model may hold a part of its values then.
    """
    beside.build(model, folder, manifest, groups_of(model)[MODEL])
    optimizer = model.optimizer if model.compiled else None
    if optimizer is not None and not optimizer.built and OPTIMIZER in manifest.groups:
        parallel = parallel_of(model)
        if parallel is not None and not parallel.waits_for_batch:
            parallel.prepare_optimizer()
        else:
            _refuse_unplaced(model, manifest)
            with keras_optimizers.build_scope(optimizer):
                optimizer.build(model.trainable_variables)
    pairs, reader = [], Reader(folder)
    files = LayerFiles.read(folder, manifest, reader)
    saved = unsent.families([(one.path, one) for one in manifest.groups.get(COMPRESSION, ())])
    shapes = [tuple(int(n) for n in v.shape) for v in model.trainable_variables]
    kept: unsent.Families = {}
    cut: unsent.Families = {}
    groups = groups_of(model)
    for group, variables in groups.items():
        if group == METRICS and not within_epoch:
            continue
        if group == COMPRESSION:
            kept = unsent.families(variables)
            if unsent.can_be_dealt(saved, kept):
                continue
            if unsent.can_be_cut(saved, kept, shapes):
                warn(CUT)
                cut, kept = kept, {}
                continue
            kept = {}
        pairs += _pairs(group, variables, manifest)
    restore(pairs, reader)
    unsent.deal(saved, kept, reader)
    unsent.cut(saved, cut, shapes, reader)
    files.give(model, groups)


def _refuse_unplaced(model: keras.Model, manifest: Manifest) -> None:
    """Refuses state of devices where it is not known yet what each will hold.

    Raises:
        CheckpointError: There is such state.
    """
    parallel = parallel_of(model)
    config = None if parallel is None else parallel.config
    if config is None or config.compression is None or config.topology.data_size == 1:
        return
    if COMPRESSION in manifest.groups:
        raise CheckpointError(
            "What compressed gradients had not sent yet goes to the devices that will send it, and "
            "the model is cut into stages by its first batch. Predict a batch first, or resume by "
            "fit with callbacks=[kdist.callbacks.ShardedCheckpoint(...)]. "
            f"Received: model={model.name!r}, compression={config.compression!r}"
        )


BEGINS_ANEW = {
    METRICS: (
        "The metrics are not those of the checkpoint: what they have counted so far is dropped."
    ),
    COMPRESSION: (
        "The checkpoint was saved with other compression: what compressed gradients had not sent "
        "yet is dropped, and compression begins anew."
    ),
}
CUT = (
    "The checkpoint was saved with other inner axes, or another rank: what compressed gradients "
    "had not sent yet goes on, the factors of PowerSGD begin anew."
)


def _pairs(group: str, variables: Named, manifest: Manifest) -> list[Any]:
    """Arrays of a group, with the variables that get their values."""
    arrays = manifest.groups.get(group)
    if arrays is None:
        if group == OPTIMIZER or group.startswith(beside.GROUP):
            which = "the model's" if group == OPTIMIZER else repr(group.removeprefix(beside.GROUP))
            warn(f"The checkpoint was saved without an optimizer: {which} begins anew.")
        return []
    wanted = [(path, tuple(int(n) for n in v.shape)) for path, v in variables]
    try:
        found = match(arrays, wanted, group)
    except CheckpointError:
        if group not in BEGINS_ANEW:
            raise
        warn(BEGINS_ANEW[group])
        return []
    return [(one, Boxes.of(path, v)) for one, (path, v) in zip(found, variables)]


def check(folder: Path, manifest: Manifest) -> None:
    """Reads all of a checkpoint, a part at a time.

    Raises:
        DamagedError: Files are missing or damaged; says which array.
    """
    reader = Reader(folder)
    read_files(folder, manifest)
    for _, array in manifest.arrays:
        for part in array.parts:
            reader.read(array, part.box)
