"""One file of a checkpoint, for Keras or for others, made part by part in little memory."""

from __future__ import annotations

import io
import json
import math
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdist._compat import keras_saving
from kdist.checkpoint.checkpoints import PathLike, first_whole
from kdist.checkpoint.directory import read_file
from kdist.checkpoint.keras_description import ASSETS, KerasDescription
from kdist.checkpoint.manifest import Box, CheckpointError, Manifest, SavedArray
from kdist.checkpoint.snapshot import MODEL
from kdist.checkpoint.store import CHUNK_BYTES, Reader, chunk_shape, dtype_of

import h5py
import numpy as np

SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Names of dtypes in a safetensors file."""


def consolidate(directory: PathLike, out: PathLike, *, step: int | None = None) -> Path:
    """Makes one file of a checkpoint, without the model and without a device.

    Args:
        directory: Of checkpoints, or one checkpoint's folder.
        out: `.keras` for `keras.models.load_model`, `.weights.h5` for `model.load_weights`, or
            `.safetensors` with the weights under their Keras paths.
        step: Which checkpoint; the newest by default.

    Returns:
        The file.

    Raises:
        CheckpointError: There is no whole checkpoint, the name ends otherwise, or a layer saves
            more than a MiB of what is no variable, which only `model.save` can.

    Example:
        >>> folder = kdist.checkpoint.save(model, "checkpoints")
        >>> kdist.checkpoint.consolidate("checkpoints", "model.keras")
        PosixPath('model.keras')
    """
    out = Path(out)
    writers = {".keras": _keras, ".weights.h5": _weights, ".safetensors": _safetensors}
    write = next((w for end, w in writers.items() if out.name.endswith(end)), None)
    if write is None:
        raise CheckpointError(
            f"The file's name ends in one of {list(writers)}, which says what it is. "
            f"Received: {out}"
        )
    beside = out.with_name(out.name + ".new")

    def load(folder: Path, manifest: Manifest) -> None:
        write(folder, manifest, beside)

    try:
        first_whole(Path(directory), step, load)
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)
    return out


def _description(folder: Path, manifest: Manifest) -> KerasDescription:
    found = KerasDescription.read(folder, manifest)
    if found.missing:
        raise CheckpointError(
            "Keras's files cannot be made of this checkpoint. Restore it into the model, and call "
            "model.save or model.save_weights. "
            f"Received: {found.missing}"
        )
    return found


def _keras(folder: Path, manifest: Manifest, out: Path) -> None:
    description = _description(folder, manifest)
    if description.no_assets:
        raise CheckpointError(
            "A .keras file needs the model's config, and what its layers keep in files of their "
            "own. Make a .weights.h5 file instead. "
            f"Received: {description.no_assets}"
        )
    names = keras_saving.FILES
    with tempfile.TemporaryDirectory(dir=out.parent) as beside, zipfile.ZipFile(out, "w") as file:
        file.writestr(names["metadata"], description.metadata or "")
        file.writestr(names["config"], description.config or "")
        weights = Path(beside) / names["weights"]
        _write_h5(folder, manifest, weights, description)
        file.write(weights, names["weights"])
        if ASSETS in manifest.files:
            assets = io.BytesIO(read_file(folder, manifest, ASSETS))
            with zipfile.ZipFile(assets) as archive:
                for one in archive.infolist():
                    file.writestr(one, archive.read(one))


def _weights(folder: Path, manifest: Manifest, out: Path) -> None:
    _write_h5(folder, manifest, out, _description(folder, manifest))


def _write_h5(folder: Path, manifest: Manifest, out: Path, description: KerasDescription) -> None:
    reader = Reader(folder)
    with h5py.File(out, "w") as file:
        for path, name in description.names.items():
            file.require_group(path).attrs[keras_saving.GROUP_NAME] = name
        for path in description.places:
            array = description.array(manifest, path)
            dtype = dtype_of(array.dtype)
            made = file.create_dataset(path, array.shape, dtype)
            if array.dtype == "bfloat16":
                made.attrs["dtype"] = "bfloat16"
            added = description.factors(manifest, path)
            for box, values in _pieces(reader, array):
                more = 0 if added is None else _product(reader, added, box).astype(dtype)
                made[box if box else ()] = values + more if added else values


def _product(reader: Reader, added: tuple[SavedArray, SavedArray, float], box: Box) -> np.ndarray:
    """The part of `factor * matmul(a, b)` in a box."""
    a, b, factor = added
    rows = reader.read(a, (*box[:-1], slice(0, a.shape[-1])))
    columns = reader.read(b, (slice(0, b.shape[0]), box[-1]))
    return factor * np.matmul(rows, columns)


def _safetensors(folder: Path, manifest: Manifest, out: Path) -> None:
    """The format is a length, a header of JSON, and the arrays one after the other."""
    reader, arrays = Reader(folder), manifest.groups[MODEL]
    header: dict[str, Any] = {"__metadata__": {"format": "keras", "step": str(manifest.step)}}
    start = 0
    for array in arrays:
        stop = start + array.elements * dtype_of(array.dtype).itemsize
        if array.path in header or array.dtype not in SAFETENSORS:
            raise CheckpointError(
                "A safetensors file has one array to a name, of a dtype that it knows. Make a "
                f".keras file instead. Received: {array.path!r} of dtype {array.dtype}"
            )
        header[array.path] = {
            "dtype": SAFETENSORS[array.dtype],
            "shape": array.shape,
            "data_offsets": (start, stop),
        }
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(out, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            for _, values in _pieces(reader, array):
                file.write(np.ascontiguousarray(values).tobytes())


def _pieces(reader: Reader, array: SavedArray) -> Iterator[tuple[Box, np.ndarray]]:
    """An array in pieces of at most a few chunks, in the order of its elements."""
    chunk = chunk_shape(array.shape, dtype_of(array.dtype).itemsize, CHUNK_BYTES)
    counts = [math.ceil(n / c) for n, c in zip(array.shape, chunk)]
    for at in np.ndindex(*counts):
        box = tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(at, chunk, array.shape))
        yield box, reader.read(array, box)
