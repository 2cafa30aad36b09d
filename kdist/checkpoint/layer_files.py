"""What layers keep beside variables: vocabularies in files, and numbers that are no variables.

They are in a checkpoint for Keras's files; here they go back into a model.
"""

from __future__ import annotations

import dataclasses
import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdist._compat import keras_places
from kdist.api.attached import parallel_of
from kdist.checkpoint.directory import read_file
from kdist.checkpoint.keras_description import ASSETS, FILE, VALUES, KerasDescription
from kdist.checkpoint.manifest import Manifest
from kdist.checkpoint.store import Reader
from kdist.display.warn import warn

import keras
import numpy as np


@dataclasses.dataclass(frozen=True)
class LayerFiles:
    """Of a checkpoint.

    Attributes:
        assets: An archive of files; empty if there are none.
        values: Path in a `.weights.h5` file -> the number, or array, that a layer stores there.
        variables: Paths in that file of what are variables.
    """

    assets: bytes
    values: Mapping[str, np.ndarray]
    variables: frozenset[str]

    @classmethod
    def read(cls, folder: Path, manifest: Manifest, reader: Reader) -> LayerFiles:
        """Of a checkpoint.

        Raises:
            DamagedError: Files are missing or damaged.
        """
        assets = read_file(folder, manifest, ASSETS) if ASSETS in manifest.files else b""
        if VALUES not in manifest.groups or FILE not in manifest.files:
            return cls(assets, {}, frozenset())
        places = KerasDescription.read(folder, manifest).places
        values = {
            path: reader.read(manifest.groups[group][n])
            for path, (group, n) in places.items()
            if group == VALUES
        }
        return cls(assets, values, frozenset(places.keys() - values.keys()))

    def give(self, model: keras.Model, groups: Mapping[str, Sequence[tuple[str, Any]]]) -> None:
        """Hands layers what they stored, if they have other things now.

        Steps that have been traced hold on to the tables of before, and are made anew.

        Args:
            model: With the variables of the checkpoint.
            groups: Its variables; see `snapshot.groups_of`.
        """
        if not self.assets and not self.values:
            return
        described, arrays, assets = KerasDescription.of(model, groups)
        now = {path: arrays[n] for path, (group, n) in described.places.items() if group == VALUES}
        if _same(self.values, now) and _members(self.assets) == _members(assets):
            return
        self._give_values(keras_places.places(model).layers)
        if self.assets:
            keras_places.load_assets(model, self.assets)
        _forget_functions(model)

    def _give_values(self, layers: Mapping[str, Any]) -> None:
        by_group: dict[str, dict[str, np.ndarray]] = {}
        for path, value in self.values.items():
            group, _, key = path.rpartition("/")
            by_group.setdefault(group, {})[key] = value
        mixed = {path.rpartition("/")[0] for path in self.variables}
        for group, stored in by_group.items():
            layer = layers.get(group)
            if layer is not None and group not in mixed:
                layer.load_own_variables(stored)
            elif layer is not None and not getattr(layer, "lora_enabled", False):
                warn(
                    "A layer saves numbers beside its variables, and can only load all together: "
                    "make them variables, or call kdist.checkpoint.consolidate and "
                    f"model.load_weights. Received: layer={layer.path!r}, not "
                    f"restored={sorted(stored)}"
                )


def _same(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[path], b[path]) for path in a)


def _members(packed: bytes) -> dict[str, bytes]:
    """The files in an archive, without their dates."""
    if not packed:
        return {}
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        return {one: archive.read(one) for one in archive.namelist()}


def _forget_functions(model: keras.Model) -> None:
    kinds = [k for k in ("train", "test", "predict") if getattr(model, f"{k}_function") is not None]
    parallel = parallel_of(model)
    if parallel is not None:
        parallel.forget_functions(parallel.jit_compile)
    for kind in kinds:
        getattr(model, f"make_{kind}_function")(force=True)
