"""Settings that users attach to layers or variables: optimizer parallelism, fusion ids, stages.

A setting is a declaration for the model that is trained here: it is kept beside the objects, not in
them, so that Keras neither tracks nor saves it. A layer may get one before it is built.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from kdist.storage.variables import stored

import keras

T = TypeVar("T")
_order = itertools.count()


def check_not_placed(layer: keras.layers.Layer, name: str) -> None:
    """Refuses a declaration that `kdist.parallelize` would have had to see.

    Args:
        layer: What the declaration is about.
        name: The public function that makes it.

    Raises:
        ValueError: The layer's weights have been placed already.
    """
    if any(stored(v) is not None for v in layer.weights):
        raise ValueError(
            f"{name} says where a layer's tensors go, and kdist.parallelize has placed them. Call "
            f"it before parallelize. Received: layer {layer.path or layer.name!r} of a model that "
            "is parallel"
        )


class Setting(Generic[T]):
    """Values given to layers and variables; of several that reach a variable the last one counts.

    Args:
        name: The public function that sets it, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # By identity, since variables compare by value; the reference tells if one is gone.
        self._given: dict[int, tuple[weakref.ref[Any], int, T]] = {}

    def set(self, target: Any, value: T) -> None:
        """Gives a layer (and all layers inside) or a variable a value.

        Raises:
            ValueError: The target is neither.
        """
        if not isinstance(target, keras.layers.Layer | keras.Variable):
            raise ValueError(
                f"{self.name} takes a keras layer, a model, or a keras.Variable. "
                f"Received: {target!r} of type {type(target).__name__}"
            )
        key = id(target)
        gone = weakref.ref(target, lambda _: self._given.pop(key, None))
        self._given[key] = (gone, next(_order), value)

    def given(self) -> list[tuple[Any, T]]:
        """Every target that still exists, with its value, in the order in which they were given."""
        found = [(r(), value) for r, _, value in sorted(self._given.values(), key=lambda g: g[1])]
        return [(target, value) for target, value in found if target is not None]

    def of(self, variables: Iterable[keras.Variable]) -> list[T | None]:
        """The value that counts for each variable, None without one."""
        reached: dict[int, T] = {}
        for target, value in self.given():
            own = [target] if isinstance(target, keras.Variable) else target.weights
            reached.update((id(variable), value) for variable in own)
        return [reached.get(id(v)) for v in variables]
