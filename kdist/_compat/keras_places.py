"""Where Keras puts each variable in a `.weights.h5` file, and the files that it puts beside them.

- `saving_lib._save_state` goes through a model, and `saving_lib.H5IOStore` is what it writes to:
  `places` has one that notes. An optimizer would give arrays, each of them a whole copy: what it
  saves is noted here, as `_walk_saveable` and `_save_container_state` would find it.
- `saving_lib.DiskIOStore` packs what layers keep in files of their own: vocabularies; and
  `saving_lib._load_state` hands them back.
- `_save_state` asks whether it has seen an object right before it asks where to store it.

`tests/_compat/test_keras_places.py` fails when one of them moves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

from kdist._compat import keras_models
from kdist._compat.keras_saving import FILES, GROUP_NAME

import keras
from keras.src.saving import saving_lib
from keras.src.utils import naming

LORA = (
    ("_kernel", "lora_kernel_a", "lora_kernel_b"),
    ("_embeddings", "lora_embeddings_a", "lora_embeddings_b"),
)
"""Attributes of layers: a weight, and the factors of what LoRA adds to it."""


@dataclasses.dataclass(frozen=True)
class AddedProduct:
    """What is added to a weight before it is stored: `factor * matmul(a, b)`.

    Attributes:
        a: A variable; in a checkpoint's description, (group, number) of its array.
        b: The same.
        factor: A number.
    """

    a: Any
    b: Any
    factor: float


@dataclasses.dataclass(frozen=True)
class Places:
    """What is in Keras's files of a model.

    Attributes:
        found: Path in the `.weights.h5` file -> what is stored there: a variable, or else a value.
        names: Path of a group in that file -> name of its layer.
        added: Path -> what is added to the variable there.
        assets: An archive of the other files; empty if there are none.
        no_assets: Why there are none although there should be, "" if all is well.
        layers: Path of a group -> the layer that stores it.
    """

    found: Mapping[str, Any]
    names: Mapping[str, str]
    added: Mapping[str, AddedProduct]
    assets: bytes
    no_assets: str
    layers: Mapping[str, Any]


class _Seen(set[int]):
    """Ids of what was stored; and which one was asked for last."""

    last = 0

    def __contains__(self, one: object) -> bool:
        self.last = one if isinstance(one, int) else 0
        return super().__contains__(one)


class _Recorder(saving_lib.H5IOStore):
    """Notes what is stored where, and stores nothing."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__(io.BytesIO(), mode="w")
        self.found: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.ids: dict[str, int] = {}
        self._seen = seen
        self._at = ""

    def make(self, path: str, metadata: Mapping[str, Any] | None = None) -> Any:
        """See Keras's."""
        self._at = f"{path}/vars" if path else "vars"
        self.ids[self._at] = self._seen.last
        if metadata:
            self.names[self._at] = metadata[GROUP_NAME]
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        """See Keras's."""
        self.found[f"{self._at}/{key}"] = value

    def __bool__(self) -> bool:
        return True


def places(model: keras.Model) -> Places:
    """What `model.save` puts where, of its layers and its optimizer."""
    optimizer = getattr(model, "optimizer", None)
    seen = {id(optimizer)}
    recorder = _Recorder(seen_now := _Seen(seen))
    try:
        with _without_lora(model) as products:
            saving_lib._save_state(model, recorder, None, "", seen_now)
    finally:
        recorder.close()
    if optimizer is not None and optimizer.built:
        _add_optimizer(recorder, optimizer, "optimizer")
    found = recorder.found.items()
    added = {path: products[id(value)] for path, value in found if id(value) in products}
    assets, reason = _assets(model, seen)
    own = {id(layer): layer for layer in keras_models.flat_layers(model)}
    layers = {path: own[one] for path, one in recorder.ids.items() if one in own}
    return Places(recorder.found, recorder.names, added, assets, reason, layers)


@contextlib.contextmanager
def _without_lora(model: keras.Model) -> Iterator[dict[int, AddedProduct]]:
    """Meanwhile, layers give their own weights; gives what belongs to which of these.

    Not layers with quantised weights: they quantise the sum anew.
    """
    layers = [
        layer
        for layer in keras_models.flat_layers(model)
        if getattr(layer, "lora_enabled", False)
        and getattr(layer, "quantization_mode", None) is None
    ]
    products = {}
    for layer in layers:
        factor = float(layer.lora_alpha / layer.lora_rank)
        for weight, *factors in LORA:
            if hasattr(layer, factors[0]):
                a, b = (getattr(layer, name) for name in factors)
                products[id(getattr(layer, weight))] = AddedProduct(a, b, factor)
    try:
        for layer in layers:
            layer.lora_enabled = False
        yield products
    finally:
        for layer in layers:
            layer.lora_enabled = True


def _add_optimizer(recorder: _Recorder, optimizer: Any, path: str) -> None:
    recorder.make(path, {GROUP_NAME: optimizer.name})
    for n, variable in enumerate(optimizer.variables):
        recorder[str(n)] = variable
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        _add_optimizer(recorder, inner, f"{path}/inner_optimizer")
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        used: dict[str, int] = {}
        for one in optimizer.optimizers:
            name = naming.to_snake_case(type(one).__name__)
            name = saving_lib._get_unique_name(name, used)
            _add_optimizer(recorder, one, f"{path}/{MEMBERS}/{name}")


MEMBERS = "optimizers"
"""Where Keras puts the members of a `MultiOptimizer`."""


def _assets(model: keras.Model, seen: set[int]) -> tuple[bytes, str]:
    """An archive of the files that layers keep; why there is none, if one cannot write its own."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        store = saving_lib.DiskIOStore(FILES["assets"], archive=archive, mode="w")
        try:
            saving_lib._save_state(model, None, store, "", set(seen))
        except Exception as error:  # whatever a layer of the user's raises
            return b"", f"{type(error).__name__}: {error}"
        finally:
            store.close()
        empty = not archive.namelist()
    return b"" if empty else packed.getvalue(), ""


def load_assets(model: keras.Model, assets: bytes) -> None:
    """Gives layers the files that `places` packed."""
    with zipfile.ZipFile(io.BytesIO(assets)) as archive:
        store = saving_lib.DiskIOStore(FILES["assets"], archive=archive, mode="r")
        try:
            seen = {id(getattr(model, "optimizer", None))}
            saving_lib._load_state(model, None, store, "", visited_saveables=seen)
        finally:
            store.close()
