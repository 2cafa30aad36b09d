"""Files of Keras, read part by part; and the texts that are in them.

- `saving_lib.H5IOStore` is what Keras reads from: `mapped_files` has its `__getitem__` give arrays
  that are read when they are used.
- `saving_lib.is_memory_sufficient` decides whether Keras reads all of a `.keras` file first.

`tests/_compat/test_keras_saving.py` fails when one of them moves.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import keras
import ml_dtypes
import numpy as np
from keras.src.export import export_utils
from keras.src.saving import saving_lib

GROUP_NAME = "name"
"""Attribute of a group of variables: the name of its layer."""
UNPACKED = 64 << 10
"""Bytes up to which a weight that cannot be mapped is copied by Keras; larger ones are unpacked."""
_ZIP_HEADER = 30
"""Bytes of what comes before each member of an archive, by the format's definition."""


@contextlib.contextmanager
def mapped_files() -> Iterator[None]:
    """Meanwhile, Keras hands layers the weights of `.h5` and `.keras` files as `np.memmap`.

    So what reads a part of one has that part in memory. What does not lie in the file as it is
    (compressed data sets, archives, files in memory) is unpacked, a chunk at a time, into a
    temporary file without a name, and mapped from there.
    """
    maps: dict[str, np.memmap] = {}
    own, own_check = saving_lib.H5IOStore.__getitem__, saving_lib.is_memory_sufficient

    def getitem(self: Any, key: str) -> Any:
        dataset = saving_lib.safe_get_h5_dataset(self._h5_entry_group, key)
        if not isinstance(dataset, h5py.Dataset) or not dataset.shape or dataset.dtype.hasobject:
            return own(self, key)
        dtype = _dtype(dataset)
        found = _lies(dataset, self.archive, self.io_file)
        if found is None:
            few = dataset.size * dtype.itemsize <= UNPACKED
            return own(self, key) if few else _unpacked(dataset, dtype)
        path, start = found
        if path not in maps:
            maps[path] = np.memmap(Path(path), np.uint8, "r")
        count = dataset.id.get_storage_size()
        return maps[path][start : start + count].view(dtype).reshape(dataset.shape)

    saving_lib.H5IOStore.__getitem__ = getitem
    saving_lib.is_memory_sufficient = lambda model: False
    try:
        yield
    finally:
        saving_lib.H5IOStore.__getitem__ = own
        saving_lib.is_memory_sufficient = own_check


def _dtype(dataset: Any) -> np.dtype:
    marked = dataset.attrs.get("dtype") == "bfloat16"
    return np.dtype(ml_dtypes.bfloat16) if marked else dataset.dtype


def _lies(dataset: Any, archive: zipfile.ZipFile | None, member: Any) -> tuple[str, int] | None:
    """The file in which the values of a data set lie as they are, and at which byte; else None."""
    start = dataset.id.get_offset()
    if start is None:
        return None
    if archive is None:
        return (dataset.file.filename, start) if dataset.file.driver in ("sec2", "stdio") else None
    info = archive.getinfo(member.name)
    if info.compress_type != zipfile.ZIP_STORED or archive.filename is None:
        return None
    with open(archive.filename, "rb") as file:
        file.seek(info.header_offset)
        header = file.read(_ZIP_HEADER)
    # The header's last numbers: the lengths of the name and of what else comes before the bytes.
    before = sum(struct.unpack("<HH", header[-4:]))
    return archive.filename, info.header_offset + _ZIP_HEADER + before + start


def _unpacked(dataset: Any, dtype: np.dtype) -> np.memmap:
    """The values of a data set in a temporary file, which goes when nobody reads it any more."""
    count = dataset.size * dtype.itemsize
    with tempfile.NamedTemporaryFile(prefix="kdist_weight_") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, count)  # a full disk ends who writes to a map
        except OSError as error:
            raise OSError(
                "A weight that is compressed is unpacked into a temporary file, to be read part by "
                "part. Set TMPDIR to a folder on a disk with room. "
                f"Received: weight={dataset.name!r}, bytes={count}, "
                f"TMPDIR={tempfile.gettempdir()!r}"
            ) from error
        values = np.memmap(file.name, dtype, "r+", shape=dataset.shape)
        for box in _boxes(dataset, dtype.itemsize):
            values[box] = np.asarray(dataset[box]).view(dtype)
        return np.memmap(file.name, dtype, "r", shape=dataset.shape)


def _boxes(dataset: Any, itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Boxes that tile a data set: the chunks that are stored, or rows."""
    if dataset.chunks is not None:
        yield from dataset.iter_chunks()
        return
    step = max(1, UNPACKED * dataset.shape[0] // (dataset.size * itemsize))
    for start in range(0, dataset.shape[0], step):
        yield (slice(start, min(start + step, dataset.shape[0])),)


def config_and_metadata(model: keras.Model) -> tuple[str, str]:
    """The texts `config.json` and `metadata.json` of a `.keras` file."""
    config, metadata = saving_lib._serialize_model_as_json(model)
    json.loads(config)
    return config, metadata


def input_signature(model: keras.Model) -> Any:
    """Specs of what a built model is called with, as `model.export` finds them."""
    return export_utils.get_input_signature(model)


FILES = {
    "config": saving_lib._CONFIG_FILENAME,
    "metadata": saving_lib._METADATA_FILENAME,
    "weights": saving_lib._VARS_FNAME_H5,
    "assets": saving_lib._ASSETS_DIRNAME,
}
"""What a `.keras` file is made of."""
