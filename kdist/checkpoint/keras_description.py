"""What a checkpoint knows of Keras's own files, so that they can be made without the model."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdist._compat import keras_places, keras_saving
from kdist._compat.keras_places import AddedProduct, Places
from kdist.checkpoint.directory import read_file
from kdist.checkpoint.manifest import CheckpointError, Manifest, SavedArray

import keras
import numpy as np

FILE, ASSETS = "keras.json", "keras_assets.zip"
"""Of a checkpoint."""

VALUES = "keras"
"""The group of what layers save that is no variable."""

VALUE_BYTES = 1 << 20
"""Such a value that is larger is not in a checkpoint."""


class KnownPlaces:
    """Where Keras puts each variable of a model, found out again only once these are others."""

    def __init__(self) -> None:
        self._variables: list[Any] = []
        self._found: Places | None = None

    def of(self, model: keras.Model, variables: Sequence[Any]) -> Places:
        """See `keras_places.places`.

        Args:
            model: Built.
            variables: All that it has, and its optimizer.
        """
        before, self._variables = self._variables, list(variables)
        same = len(before) == len(variables) and all(map(operator.is_, before, variables))
        if not same or self._found is None:
            self._found = keras_places.places(model)
        return self._found

    def forget(self) -> None:
        """What was found may be other the next time."""
        self._found = None


@dataclasses.dataclass(frozen=True)
class KerasDescription:
    """A model, as Keras's files show it.

    Attributes:
        places: Path in a `.weights.h5` file -> (group, number) of a checkpoint's array.
        names: Path of a group in that file -> name of its layer.
        config: `config.json` of a `.keras` file; None if the model has none.
        metadata: `metadata.json` of that file.
        missing: Why files of Keras cannot be made, "" if they can.
        added: Path in a `.weights.h5` file -> what is added to the array before it is stored.
        no_assets: Why a `.keras` file cannot be made, "" if it can.
    """

    places: Mapping[str, tuple[str, int]]
    names: Mapping[str, str]
    config: str | None
    metadata: str | None
    missing: str = ""
    added: Mapping[str, AddedProduct] = dataclasses.field(default_factory=dict)
    no_assets: str = ""

    @classmethod
    def of(
        cls,
        model: keras.Model,
        groups: Mapping[str, Sequence[tuple[str, Any]]],
        known: KnownPlaces | None = None,
    ) -> tuple[KerasDescription, list[np.ndarray], bytes]:
        """Of a model.

        Args:
            model: Built.
            groups: Its variables as the checkpoint has them; see `snapshot.groups_of`.
            known: Of what was described before, maybe of this model.

        Returns:
            The description; values that are no variables, the arrays of the group `VALUES`; an
            archive of further files, empty if there are none.
        """
        number = {
            id(v): (group, n)
            for group, variables in groups.items()
            for n, (_, v) in enumerate(variables)
        }
        every = [v for variables in groups.values() for _, v in variables]
        known = known or KnownPlaces()
        stored = known.of(model, every)
        places: dict[str, tuple[str, int]] = {}
        values: list[np.ndarray] = []
        missing = ""
        for path, value in stored.found.items():
            where = number.get(id(value))
            if where is None:
                array = _small(value)
                if array is None:
                    missing = missing or f"{path!r} holds what is no variable of the model"
                    continue
                where = VALUES, len(values)
                values.append(array)
            places[path] = where
        if values:
            known.forget()
        added = {
            path: AddedProduct(number[id(one.a)], number[id(one.b)], one.factor)
            for path, one in stored.added.items()
        }
        config = metadata = None
        reason = stored.no_assets
        try:
            config, metadata = keras_saving.config_and_metadata(model)
        except (NotImplementedError, TypeError, ValueError) as error:
            reason = reason or f"the model has no config: {str(error).strip().splitlines()[0]}"
        found = cls(places, stored.names, config, metadata, missing, added, reason)
        return found, values, stored.assets

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def read(cls, folder: Path, manifest: Manifest) -> KerasDescription:
        """Of a checkpoint.

        Raises:
            CheckpointError: It has none, or a damaged one.
        """
        if FILE not in manifest.files:
            raise CheckpointError(f"The checkpoint {folder} does not describe a Keras model.")
        values = json.loads(read_file(folder, manifest, FILE))
        values["places"] = {path: tuple(where) for path, where in values["places"].items()}
        added = values.get("added", {}).items()
        values["added"] = {path: AddedProduct(**one) for path, one in added}
        return cls(**values)

    def array(self, manifest: Manifest, path: str) -> SavedArray:
        """What is at a path of a `.weights.h5` file, before something is added."""
        group, number = self.places[path]
        return manifest.groups[group][number]

    def factors(self, manifest: Manifest, path: str) -> tuple[SavedArray, SavedArray, float] | None:
        """The factors of what is added at a path; None for nothing."""
        if (product := self.added.get(path)) is None:
            return None
        a, b = (manifest.groups[group][number] for group, number in (product.a, product.b))
        return a, b, product.factor


def _small(value: Any) -> np.ndarray | None:
    """A value as an array, if it is one of numbers, and not large."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, NotImplementedError):
        return None
    numbers = array.dtype.kind in "biuf" or array.dtype.name == "bfloat16"
    return array if numbers and array.nbytes <= VALUE_BYTES else None
