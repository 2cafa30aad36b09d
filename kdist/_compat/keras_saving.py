"""Where Keras puts each variable in a `.weights.h5` file; and such files, read part by part.

- `saving_lib.H5IOStore` is what Keras writes to and reads from: `places` has one that notes,
  `mapped_files` has its `__getitem__` give arrays that are read when they are used.
- `saving_lib.is_memory_sufficient` decides whether Keras reads all of a `.keras` file first.

`tests/_compat/test_keras_saving.py` fails when one of them moves.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
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


class _Recorder(saving_lib.H5IOStore):
    """Notes what is stored where, and stores nothing."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), mode="w")
        self.found: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self._at = ""

    def make(self, path: str, metadata: Mapping[str, Any] | None = None) -> Any:
        """See Keras's."""
        self._at = f"{path}/vars" if path else "vars"
        if metadata:
            self.names[self._at] = metadata[GROUP_NAME]
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        """See Keras's."""
        self.found[f"{self._at}/{key}"] = value

    def __bool__(self) -> bool:
        return True


def places(model: keras.Model) -> tuple[dict[str, Any], dict[str, str]]:
    """Where `model.save` puts what layers and the optimizer give it.

    Returns:
        Path in the file -> what is stored there, a variable or an array; path of a group -> name.
    """
    recorder = _Recorder()
    optimizer = getattr(model, "optimizer", None)
    try:
        # Not the optimizer itself, which would give arrays, each of them a whole copy.
        saving_lib._save_state(model, recorder, None, "", {id(optimizer)})
    finally:
        recorder.close()
    if optimizer is not None and optimizer.built:
        _add_optimizer(recorder, optimizer, "optimizer")
    return recorder.found, recorder.names


def _add_optimizer(recorder: _Recorder, optimizer: Any, path: str) -> None:
    recorder.make(path, {GROUP_NAME: optimizer.name})
    for n, variable in enumerate(optimizer.variables):
        recorder[str(n)] = variable
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        _add_optimizer(recorder, inner, f"{path}/inner_optimizer")


@contextlib.contextmanager
def mapped_files() -> Iterator[None]:
    """Meanwhile, Keras hands layers the weights of `.h5` files as `np.memmap`, not as copies.

    So what reads a part of one has that part in memory. Not for files that are compressed or in
    memory themselves: there Keras makes a copy of each weight, one at a time.
    """
    maps: dict[str, np.memmap] = {}
    own, own_check = saving_lib.H5IOStore.__getitem__, saving_lib.is_memory_sufficient

    def getitem(self: Any, key: str) -> Any:
        dataset = saving_lib.safe_get_h5_dataset(self._h5_entry_group, key)
        mapped = _mapped(dataset, maps)
        return own(self, key) if mapped is None else mapped

    saving_lib.H5IOStore.__getitem__ = getitem
    saving_lib.is_memory_sufficient = lambda model: False
    try:
        yield
    finally:
        saving_lib.H5IOStore.__getitem__ = own
        saving_lib.is_memory_sufficient = own_check


def _mapped(dataset: Any, maps: dict[str, np.memmap]) -> np.ndarray | None:
    """What a dataset holds, mapped; None if it does not lie in a file as it is."""
    if not isinstance(dataset, h5py.Dataset) or dataset.id.get_offset() is None:
        return None
    if dataset.file.driver not in ("sec2", "stdio") or not dataset.shape:
        return None
    path = dataset.file.filename
    if path not in maps:
        maps[path] = np.memmap(Path(path), np.uint8, "r")
    start, count = dataset.id.get_offset(), dataset.id.get_storage_size()
    marked = dataset.attrs.get("dtype") == "bfloat16"
    dtype = np.dtype(ml_dtypes.bfloat16) if marked else dataset.dtype
    return maps[path][start : start + count].view(dtype).reshape(dataset.shape)


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
}
"""What a `.keras` file is made of."""
