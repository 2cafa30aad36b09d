"""What users call: `save`, `restore`, `latest`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdist.api.attached import parallel_of
from kdist.checkpoint import beside
from kdist.checkpoint import directory as directories
from kdist.checkpoint import snapshot as snapshots
from kdist.checkpoint.manifest import CheckpointError, DamagedError, Manifest
from kdist.checkpoint.matching import match
from kdist.checkpoint.store import Compression
from kdist.checkpoint.writer import Target, write
from kdist.display.warn import warn
from kdist.runtime.keras_contract import is_built

import keras
import numpy as np

PathLike = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that a model was restored from.

    Attributes:
        folder: Where it is.
        manifest: What it says of itself.

    Example:
        >>> folder = kdist.checkpoint.save(model, "checkpoints", step=7)
        >>> restored = kdist.checkpoint.restore(model, "checkpoints")
        >>> restored.step, restored.folder == folder
        (7, True)
    """

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Training steps that had been done."""
        return self.manifest.step

    @property
    def progress(self) -> Mapping[str, Any]:
        """Epoch, history, state of callbacks, if `ShardedCheckpoint` saved it."""
        return self.manifest.progress


def save(
    model: keras.Model,
    directory: PathLike,
    *,
    step: int | None = None,
    keep: int | None = None,
    compression: Compression = "none",
) -> Path:
    """Saves all that training needs to go on: weights, statistics, seeds, optimizer, metrics.

    Every part is written once, as it lies on its device: no weight is put together. The bytes go
    through TensorStore, into zarr arrays of one OCDBT store; a manifest that is written last makes
    the checkpoint visible. So a process that dies while it saves leaves the checkpoints that were
    there. The layout follows the sharded checkpoints of Orbax and torch.distributed.checkpoint.

    Args:
        model: Built; parallelized, or a plain Keras model.
        directory: Of checkpoints; each is a folder in it.
        step: Which training step this is; by default the optimizer's count, of several the largest.
        keep: How many checkpoints stay in the directory, the newest; None for all.
        compression: "zstd" for smaller files; trained weights hardly shrink.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: The model is not built, there is a checkpoint of another model of the same
            step, or the file system refuses.
        ValueError: `step`, `keep` or `compression` has no meaning.
        TypeError: `model` is no model.

    Example:
        >>> kdist.checkpoint.save(model, "checkpoints", step=120, keep=3)
        PosixPath('checkpoints/step-00000120')
    """
    _check_model(model)
    target = target_of(directory, keep, compression)
    number = _step(model, step)
    refuse_another(model, _candidates(target.directory, number))
    taken = snapshots.snapshot(model, number, copied=False, directory=target.directory)
    return write(taken, target)


def target_of(directory: PathLike, keep: int | None, compression: Compression) -> Target:
    """Where checkpoints go.

    Raises:
        ValueError: For a value that has no meaning.
    """
    if keep is not None and not is_count(keep):
        raise ValueError(f"keep is a number of checkpoints, or None for all. Received: {keep!r}")
    if compression not in ("none", "zstd"):
        raise ValueError(f"compression is 'none' or 'zstd'. Received: {compression!r}")
    if "\\" in str(Path(directory).resolve()):
        raise ValueError(
            "TensorStore takes a backslash in a path for a slash: arrays would lie elsewhere. "
            f"Name a directory without one. Received: directory={str(directory)!r}"
        )
    return Target(Path(directory), keep, compression)


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 1 on."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and value >= 1


def _step(model: keras.Model, step: int | None) -> int:
    if not (model.built or is_built(model)):
        raise CheckpointError(
            "The model has no weights yet. Build it, or train it, before it is saved. "
            f"Received: model={model.name!r}"
        )
    if step is None:
        return beside.steps_of(model)
    number = None if isinstance(step, bool) or not hasattr(step, "__index__") else int(step)
    if number is None or number < 0:
        raise ValueError(
            "step is the number of training steps done, from 0 on; by default the optimizer's "
            f"count. Received: step={step!r}"
        )
    return number


def refuse_another(model: keras.Model, there: Sequence[Path]) -> None:
    """Refuses to save beside checkpoints of another model, which would be replaced.

    Args:
        model: Built.
        there: The checkpoints that are in question; damaged ones are not.

    Raises:
        CheckpointError: One of them is of another model.
    """
    named = snapshots.groups_of(model)[snapshots.MODEL]
    wanted = [(path, tuple(int(n) for n in v.shape)) for path, v in named]
    for folder in there:
        with contextlib.suppress(DamagedError):
            saved = directories.load(folder).groups[snapshots.MODEL]
            try:
                match(saved, wanted, snapshots.MODEL)
            except CheckpointError as difference:
                raise CheckpointError(
                    "There is a checkpoint of another model, which one of this model would "
                    "replace. Give each model a directory of its own, or `save` another step. "
                    f"Received: model={model.name!r}, {folder}. {difference}"
                ) from None


def latest(directory: PathLike) -> Path | None:
    """The newest whole checkpoint of a directory; None if there is none.

    Args:
        directory: What `kdist.checkpoint.save`, or a `ShardedCheckpoint`, writes to.

    Returns:
        Its folder, by the largest number of a step. Folders without a manifest do not count.

    Example:
        >>> folder = kdist.checkpoint.save(model, "checkpoints", step=120)
        >>> kdist.checkpoint.latest("checkpoints")
        PosixPath('checkpoints/step-00000120')
    """
    found = directories.folders(Path(directory))
    return found[-1] if found else None


def restore(model: keras.Model, directory: PathLike, *, step: int | None = None) -> Restored:
    """Gives a model the state of a checkpoint, whatever mesh, stages or levels it was saved on.

    Each device reads the parts that it holds, and no more. Of a model that its first batch cuts
    into stages (lists of layers, measured costs) the state is read whole, and placed with that
    batch. A plain Keras model reads what a parallel one saved, and the reverse. If the newest
    checkpoint is damaged, a line says what is wrong with it, and the one before is taken.

    Args:
        model: Built; compiled if its optimizer is to go on.
        directory: Of checkpoints, or one checkpoint's folder.
        step: Which checkpoint; the newest by default. One that is asked for is not replaced by
            another.

    Returns:
        Which checkpoint it was.

    Raises:
        CheckpointError: There is none, it is of another model, or all are damaged.
        TypeError: `model` is no model.

    Example:
        >>> folder = kdist.checkpoint.save(model, "checkpoints", step=120)
        >>> kdist.checkpoint.restore(model, "checkpoints").step
        120
    """
    _check_model(model)
    if not (model.built or is_built(model)):
        raise CheckpointError(
            "The model has no weights yet to restore. Build it first, with an Input layer or "
            f"model.build(shape). Received: model={model.name!r}"
        )
    prepare(model)

    def load(folder: Path, manifest: Manifest) -> None:
        snapshots.load(model, folder, manifest)

    return first_whole(Path(directory), step, load)


def _check_model(model: keras.Model) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            "A checkpoint is of a Keras model, which comes first, before the directory. "
            f"Received: model={model!r}"
        )


def prepare(model: keras.Model) -> None:
    """Places a parallel model's weights, so that its devices read what is theirs.

    Not those of one that its first batch cuts into stages: they are placed then, with the values
    that they have got.
    """
    parallel = parallel_of(model)
    if parallel is not None and parallel.layouts is None and not parallel.waits_for_batch:
        parallel.place()


def first_whole(
    directory: Path, step: int | None, load: Any, without: Collection[Path] = ()
) -> Restored:
    """The newest checkpoint that `load` takes; tells of those that are damaged.

    Args:
        directory: Of checkpoints, or one checkpoint's folder.
        step: Which; None for the newest.
        load: Called with a folder and its manifest.
        without: Folders that are known to be damaged.

    Raises:
        CheckpointError: See `restore`.
    """
    candidates = [one for one in _candidates(directory, step) if one not in without]
    for n, folder in enumerate(candidates):
        try:
            manifest = directories.load(folder)
            load(folder, manifest)
            return Restored(folder, manifest)
        except DamagedError as error:
            tell_damaged(error, candidates[n + 1 :])
    raise CheckpointError(
        "There is no whole checkpoint here. Name a directory that kdist.checkpoint.save or "
        f"ShardedCheckpoint wrote to. Received: {directory}"
        + (f", step={step}" if step is not None else "")
    )


def tell_damaged(error: DamagedError, others: Sequence[Path]) -> None:
    """Says that a checkpoint is damaged, and which is taken instead.

    Args:
        error: What was found.
        others: Checkpoints that may be taken, the best first.

    Raises:
        DamagedError: There is no other.
    """
    if not others:
        raise error
    warn(f"{error}. The checkpoint before it is taken: {others[0]}")


def _candidates(directory: Path, step: int | None) -> list[Path]:
    """Checkpoints that may be restored, the best first."""
    if (directory / directories.MANIFEST).exists():
        return [directory]
    found = directories.folders(directory)[::-1]
    if step is None:
        return found
    return [one for one in found if directories.step_of(one) == step][:1]
