"""Where Keras puts each variable in a `.weights.h5` file, found out without writing one."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import keras
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
