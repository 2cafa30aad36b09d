"""What a checkpoint says of itself: its arrays, where their parts are, and how far training was.

Without TensorFlow, as all that writes and reads files here: a writer can be a process without it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT, CODED = "kdist checkpoint 1", "kdist checkpoint 2"
"""What a manifest begins with: the second where arrays are codes, which versions that do not know
them must not read as numbers. Another number is for what this version cannot read."""

STORE = "arrays"
"""Of a checkpoint, the folder of the store that the program itself writes."""

Box = tuple[slice, ...]
"""A part of an array: a slice, with start and stop, of each dim."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of another model. The message says which.

    Example:
        >>> try:
        ...     kdist.checkpoint.restore(model, "nothing-here")
        ... except kdist.checkpoint.CheckpointError as error:
        ...     print(error)
        There is no whole checkpoint here. ...
    """


class DamagedError(CheckpointError):
    """Files of a checkpoint are missing, cut short or changed. The message names the part."""


@dataclasses.dataclass(frozen=True)
class SavedPart:
    """A box of an array as it was written, by the device that owned it.

    Attributes:
        key: Of its zarr array in the store.
        start: Where it begins in the whole array, per dim.
        shape: Its shape.
        store: The folder of its store; each process that writes has one.
    """

    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    store: str = STORE

    def to(self, store: str) -> SavedPart:
        """The same in another store."""
        return dataclasses.replace(self, store=store)

    @property
    def box(self) -> Box:
        """Where it lies in the whole array."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape))


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """One variable of a checkpoint.

    Attributes:
        path: Its Keras path.
        shape: Whole.
        dtype: Name of the dtype of its elements.
        parts: What it is put together from; disjoint.
        codes: What its elements are written as, see `kdist.checkpoint.codes`; "" for themselves.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[SavedPart, ...]
    codes: str = ""

    @property
    def elements(self) -> int:
        """Elements of the whole array."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One checkpoint.

    Attributes:
        step: Training steps done.
        groups: Name of a group ("model", "optimizer", ...) -> its arrays, in Keras's order.
        progress: What else is needed to go on, in JSON's types: epoch, history, callbacks.
        files: Further files of the checkpoint, relative to it -> their SHA-256.
        made_by: Version of kdist.
    """

    step: int
    groups: Mapping[str, Sequence[SavedArray]]
    progress: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    made_by: str = ""

    def to_json(self) -> str:
        """As text, with a checksum of the rest."""
        body = json.dumps(dataclasses.asdict(self))
        known = CODED if any(array.codes for _, array in self.arrays) else FORMAT
        head = {"format": known, "sha256": hashlib.sha256(body.encode()).hexdigest()}
        return json.dumps(head) + "\n" + body + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads what `to_json` wrote.

        Raises:
            DamagedError: The text is damaged.
            CheckpointError: It is of another format.
        """
        first, _, body = text.partition("\n")
        try:
            head = json.loads(first)
            known, wanted = head["format"], head["sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"The manifest's first line is damaged: {error}") from error
        if known not in (FORMAT, CODED):
            raise CheckpointError(
                "The checkpoint was written in another format. Restore it with the kdist that "
                f"wrote it. Received: {known!r}, known: {FORMAT!r}, {CODED!r}"
            )
        if hashlib.sha256(body.removesuffix("\n").encode()).hexdigest() != wanted:
            raise DamagedError("The manifest's checksum differs from its text: it is damaged.")
        values = json.loads(body)
        values["groups"] = {
            name: tuple(_array(one) for one in arrays) for name, arrays in values["groups"].items()
        }
        return cls(**values)

    @property
    def arrays(self) -> list[tuple[str, SavedArray]]:
        """(group, array) of all."""
        return [(name, one) for name, arrays in self.groups.items() for one in arrays]


def _array(values: Mapping[str, Any]) -> SavedArray:
    parts = [
        SavedPart(one["key"], tuple(one["start"]), tuple(one["shape"]), one.get("store", STORE))
        for one in values["parts"]
    ]
    shape, codes = tuple(values["shape"]), values.get("codes", "")
    return SavedArray(values["path"], shape, values["dtype"], tuple(parts), codes)
