"""What a checkpoint knows of Keras's own files, so that they can be made without the model."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdist._compat import keras_saving
from kdist.checkpoint.directory import read_file
from kdist.checkpoint.manifest import CheckpointError, Manifest, SavedArray

import keras

FILE = "keras.json"
"""Of a checkpoint."""


class KnownPlaces:
    """Where Keras puts each variable of a model, found out again only once these are others."""

    def __init__(self) -> None:
        self._variables: list[Any] = []
        self._found: Any = None

    def of(self, model: keras.Model, variables: Sequence[Any]) -> Any:
        """See `keras_saving.places`.

        Args:
            model: Built.
            variables: All that it has, and its optimizer.
        """
        before, self._variables = self._variables, list(variables)
        same = len(before) == len(variables) and all(map(operator.is_, before, variables))
        if not same or self._found is None:
            self._found = keras_saving.places(model)
        return self._found


@dataclasses.dataclass(frozen=True)
class KerasDescription:
    """A model, as Keras's files show it.

    Attributes:
        places: Path in a `.weights.h5` file -> (group, number) of a checkpoint's array.
        names: Path of a group in that file -> name of its layer.
        config: `config.json` of a `.keras` file; None if the model has none.
        metadata: `metadata.json` of that file.
        missing: Why files of Keras cannot be made, "" if they can.
    """

    places: Mapping[str, tuple[str, int]]
    names: Mapping[str, str]
    config: str | None
    metadata: str | None
    missing: str = ""

    @classmethod
    def of(
        cls,
        model: keras.Model,
        groups: Mapping[str, Sequence[tuple[str, Any]]],
        known: KnownPlaces | None = None,
    ) -> KerasDescription:
        """Of a model.

        Args:
            model: Built.
            groups: Its variables as the checkpoint has them; see `snapshot.groups_of`.
            known: Of what was described before, maybe of this model.
        """
        number = {
            id(v): (group, n)
            for group, variables in groups.items()
            for n, (_, v) in enumerate(variables)
        }
        every = [v for variables in groups.values() for _, v in variables]
        stored, names = (known or KnownPlaces()).of(model, every)
        found = {path: number.get(id(value)) for path, value in stored.items()}
        unknown = [path for path, where in found.items() if where is None]
        places = {path: where for path, where in found.items() if where is not None}
        missing = f"{unknown[0]!r} holds what is no variable of the model" if unknown else ""
        if isinstance(getattr(model, "optimizer", None), keras.optimizers.MultiOptimizer):
            missing = missing or "the optimizer is several, each with files of its own"
        try:
            config, metadata = keras_saving.config_and_metadata(model)
        except (NotImplementedError, TypeError, ValueError) as error:
            return cls(places, names, None, None, missing or f"the model has no config: {error}")
        return cls(places, names, config, metadata, missing)

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
        return cls(**values)

    def array(self, manifest: Manifest, path: str) -> SavedArray:
        """What is at a path of a `.weights.h5` file."""
        group, number = self.places[path]
        return manifest.groups[group][number]
