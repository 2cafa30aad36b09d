"""What Python objects remember: attributes of theirs that are plain data, or random generators."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kdist.checkpoint.store import can_hold

import numpy as np
import tensorflow as tf

PLAIN = (bool, int, float, str, type(None))
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


class Remembered:
    """What an object remembers, from the beginning of a run on.

    Attributes are kept once they differ from what they were then, and those that a checkpoint has
    given. An object that outlives a run, in a notebook, holds what happened after the checkpoint
    that the next run goes on from: that is undone.

    Args:
        owner: The object, as it is before the run.
        attributes: Those of it that can be kept.
    """

    def __init__(self, owner: Any, attributes: Callable[[Any], dict[str, Any]]) -> None:
        self.owner, self._attributes = owner, attributes
        self.before = copy.deepcopy(attributes(owner))
        self._there = {*vars(owner)}
        self._given: set[str] = set()

    def save(self, arrays: list[np.ndarray]) -> dict[str, Any]:
        """What is kept now, encoded.

        Args:
            arrays: See `encode`.
        """
        now = self._attributes(self.owner)
        kept = {*changed(now, self.before), *(self._given & {*now})}
        return {k: encode(v, arrays) for k, v in now.items() if k in kept}

    def load(self, values: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """Gives the object what was saved, and undoes what a run before has changed besides."""
        for name, value in _changed_by_runs(self.owner).items():
            if name not in values and value is _ABSENT:
                vars(self.owner).pop(name, None)
            elif name not in values:
                setattr(self.owner, name, copy.deepcopy(value))
                self._given.add(name)
        put(self.owner, values, arrays)
        self._given.update(values)

    def end(self, goes_on: bool) -> None:
        """Notes, as the run ends, what it has changed, for one that goes on with the same object.

        Args:
            goes_on: Whether this one was to go on where another stopped, of which the notes stay.
        """
        now = self._attributes(self.owner)
        noted = {k: self.before[k] for k in changed(now, self.before) if k in self.before}
        noted |= {k: _ABSENT for k in now if k not in self._there}
        if goes_on:
            noted |= _changed_by_runs(self.owner)
        _CHANGED[id(self.owner)] = weakref.ref(self.owner, _forget(id(self.owner))), noted


_ABSENT = object()
_CHANGED: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
"""Of objects that live: what attributes were that a run has changed."""


def _changed_by_runs(owner: Any) -> dict[str, Any]:
    return _CHANGED[id(owner)][1] if id(owner) in _CHANGED else {}


def _forget(number: int) -> Callable[[Any], object]:
    return lambda _: _CHANGED.pop(number, None)


def plain_attributes(owner: Any, apart: Collection[str]) -> dict[str, Any]:
    """Attributes that can be kept, but for some."""
    return {k: v for k, v in vars(owner).items() if k not in apart and _is_plain(v)}


def other_attributes(owner: Any, apart: Collection[str]) -> list[str]:
    """Names of those that cannot, but for some, and for functions."""
    plain = plain_attributes(owner, apart)
    return [k for k, v in vars(owner).items() if not (k in plain or k in apart or callable(v))]


def changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that are others than before."""
    return {k: v for k, v in now.items() if k not in before or not _same(v, before[k])}


def put(owner: Any, values: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Gives an object attributes that were encoded; a generator of its own goes on itself."""
    for name, value in values.items():
        found, own = decode(value, arrays), getattr(owner, name, None)
        if type(own) is type(found) and isinstance(own, GENERATORS):
            set_generator(own, generator_state(found))
        else:
            setattr(owner, name, found)


def generator_state(generator: Any) -> Any:
    """Where a random generator is."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def set_generator(generator: Any, state: Any) -> None:
    """The reverse of `generator_state`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """Plain data in JSON's types; arrays are added to `arrays`, and known by their number."""
    if _is_array(value):
        arrays.append(np.asarray(value))
        return {"array": len(arrays) - 1}
    if isinstance(value, GENERATORS):
        kind = "Random" if isinstance(value, random.Random) else type(value).__name__
        return {"random": kind, "state": encode(generator_state(value), arrays)}
    if isinstance(value, dict):
        return {"dict": {k: encode(v, arrays) for k, v in value.items()}}
    if isinstance(value, tuple):
        return {"tuple": [encode(one, arrays) for one in value]}
    return [encode(one, arrays) for one in value] if isinstance(value, list) else value


def decode(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    """The reverse of `encode`."""
    if isinstance(value, list):
        return [decode(one, arrays) for one in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]][()]
    if "random" in value:
        return _generator(value["random"], decode(value["state"], arrays))
    if "tuple" in value:
        return tuple(decode(one, arrays) for one in value["tuple"])
    return {k: decode(v, arrays) for k, v in value["dict"].items()}


def _generator(kind: str, state: Any) -> Any:
    """A random generator that is there."""
    found: Any
    if kind == "Generator":
        found = np.random.Generator(getattr(np.random, state["bit_generator"])())
    else:
        found = np.random.RandomState() if kind == "RandomState" else random.Random()
    set_generator(found, state)
    return found


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):  # one of a kind of its own would come back as a bare one
        return all(_is_plain(one) for one in value)
    if type(value) is dict:
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return type(value) in GENERATORS or isinstance(value, PLAIN) or _is_array(value)


def _is_array(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return can_hold(value.dtype)
    there = isinstance(value, tf.Tensor) and hasattr(value, "numpy")
    return there and can_hold(np.dtype(value.dtype.as_numpy_dtype))


def _same(a: Any, b: Any) -> bool:
    of_a: list[np.ndarray] = []
    of_b: list[np.ndarray] = []
    alike = encode(a, of_a) == encode(b, of_b) and len(of_a) == len(of_b)
    return alike and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(of_a, of_b))
