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
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

_SPARE = "kdist_spare_seed_generator"
"""Under which Keras keeps the spare one until `keras.utils.clear_session`."""


def unseeded_generator() -> keras.Variable | None:
    """State of the generator behind random operations without a seed; None before its first use."""
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def make_unseeded_generator() -> keras.random.SeedGenerator:
    """The generator behind random operations without a seed; a spare one where there is none yet.

    Models have one spare between them: whichever draws first, the others go on from there, as they
    do from Keras's. It starts as it would if Keras made it now; Python's random numbers go on as if
    none was drawn. A thread of its own makes it: in a trace TensorFlow refuses variables that it
    did not have the first time, and a strategy would mirror it.
    """
    known = unseeded()
    if known is not None:
        return known
    before = random.getstate()
    seed = seed_generator.make_default_seed()
    random.setstate(before)
    spare = global_state.get_global_attribute(_SPARE)
    with ThreadPoolExecutor(1) as alone:
        if spare is None:
            spare = alone.submit(keras.random.SeedGenerator, seed).result()
            global_state.set_global_attribute(_SPARE, spare)
        else:
            alone.submit(spare.state.assign, [seed, 0]).result()
    return spare


def unseeded() -> keras.random.SeedGenerator | None:
    """The generator behind random operations without a seed; None before its first use."""
    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


def adopt(generator: keras.random.SeedGenerator) -> None:
    """Has random operations without a seed draw from a spare generator, unless they have one.

    That takes one of Python's random numbers, as it does where Keras makes its own.
    """
    if unseeded() is None:
        global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, generator)
        seed_generator.make_default_seed()
    if generator is global_state.get_global_attribute(_SPARE):
        global_state.set_global_attribute(_SPARE, None)


def is_late(generator: keras.random.SeedGenerator) -> bool:
    """Whether it is the spare one, from which nobody has drawn, and Keras has made its own since.

    Whoever draws from it would draw the numbers that Keras's has drawn.
    """
    spare = global_state.get_global_attribute(_SPARE)
    return generator is spare and unseeded() not in (None, spare)


@contextlib.contextmanager
def drawing_from(generator: keras.random.SeedGenerator) -> Iterator[None]:
    """Meanwhile, random operations without a seed draw from this generator.

    If they do, and had none before, it becomes Keras's.
    """
    name = seed_generator.GLOBAL_SEED_GENERATOR
    before, own = unseeded(), generator.next
    around = vars(generator).get("next")  # of a context around this one
    drawn = []

    def noted(ordered: bool = True) -> Any:
        drawn.append(True)
        return own(ordered)

    global_state.set_global_attribute(name, generator)
    generator.next = noted
    try:
        yield
    finally:
        del generator.next
        if around is not None:
            generator.next = around
        global_state.set_global_attribute(name, before)
        if drawn:
            adopt(generator)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Meanwhile, random operations without a seed may draw; then they go on as if none had."""
    names = (seed_generator.GLOBAL_SEED_GENERATOR, _SPARE)
    before = {name: global_state.get_global_attribute(name) for name in names}
    known = [one for one in before.values() if one is not None and tf.executing_eagerly()]
    values = [tf.identity(one.state.value) for one in known]
    try:
        yield
    finally:
        for one, value in zip(known, values, strict=True):
            one.state.assign(value)
        for name, one in before.items():
            global_state.set_global_attribute(name, one)
