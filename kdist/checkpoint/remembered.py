"""What Python objects remember: attributes of theirs that are plain data, or random generators."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

PLAIN = (bool, int, float, str, type(None))
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


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
    kept = isinstance(value, np.ndarray | np.generic) and value.dtype != object
    return kept or (isinstance(value, tf.Tensor) and hasattr(value, "numpy"))


def _same(a: Any, b: Any) -> bool:
    of_a: list[np.ndarray] = []
    of_b: list[np.ndarray] = []
    alike = encode(a, of_a) == encode(b, of_b) and len(of_a) == len(of_b)
    return alike and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(of_a, of_b))
