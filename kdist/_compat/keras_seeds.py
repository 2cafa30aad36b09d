"""The generator of Keras behind random operations without a seed.

Keras makes it where the first of these runs, which may be inside of the trace of a step. It has no
public way to make it before, nor to say which one a trace draws from;
`tests/_compat/test_keras_seeds.py` fails by name when that moves.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import keras
from keras.src.backend.common import global_state
from keras.src.random import seed_generator


def unseeded_generator() -> keras.Variable | None:
    """State of the generator behind random operations without a seed; None before its first use."""
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def make_unseeded_generator() -> keras.random.SeedGenerator:
    """The generator behind random operations without a seed; a spare one where there is none yet.

    It starts as it would if Keras made it now; Python's random numbers go on as if none was drawn.
    A thread of its own makes it: in a trace TensorFlow refuses variables that it did not have the
    first time, and a strategy would mirror it.
    """
    known = unseeded()
    if known is not None:
        return known
    before = random.getstate()
    seed = seed_generator.make_default_seed()
    random.setstate(before)
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(keras.random.SeedGenerator, seed).result()


def unseeded() -> keras.random.SeedGenerator | None:
    """The generator behind random operations without a seed; None before its first use."""
    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


def adopt(generator: keras.random.SeedGenerator) -> None:
    """Has random operations without a seed draw from a spare generator, unless they have one."""
    if unseeded() is None:
        global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, generator)


@contextlib.contextmanager
def drawing_from(generator: keras.random.SeedGenerator | None) -> Iterator[None]:
    """Meanwhile, random operations without a seed draw from this generator."""
    name = seed_generator.GLOBAL_SEED_GENERATOR
    before = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, generator)
    try:
        yield
    finally:
        global_state.set_global_attribute(name, before)
